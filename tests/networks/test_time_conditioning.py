"""Time reaches every architecture, every sequence and every layer, and no call leaves anything behind."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jaxtyping
import pytest
import torch
from backbones import (
    ARCHITECTURES,
    NUM_TOKENIZER_IDS,
    UNSHARED,
    backbone_of,
    bare_log_probs,
    overlapping,
    sentences,
    tokenizer_allowed,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import FNetConfig, FNetForMaskedLM, PreTrainedModel
from transformers.models.bert.modeling_bert import BertLayer

from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import (
    LayerwiseTime,
    LearnedTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
    TimeConditioning,
    TimeEmbedding,
)

NUM_STEPS = 10
WAYS: dict[str, Callable[[PreTrainedModel], TimeConditioning]] = {
    "agnostic": lambda backbone: TimeAgnostic(),
    "prefix": lambda backbone: PrefixTime(backbone, NUM_STEPS),
    "layerwise-sinusoidal": lambda backbone: LayerwiseTime(backbone, SinusoidalTime(16)),
    "layerwise-learned": lambda backbone: LayerwiseTime(backbone, LearnedTime(NUM_STEPS, 16)),
}
LAYERWISE = ["layerwise-sinusoidal", "layerwise-learned"]
CHECKPOINTABLE = [name for name in UNSHARED if name != "mpnet"]
"""Transformers itself cannot checkpoint the layers of MPNet and ALBERT."""
TIMED = [
    (architecture, way)
    for architecture in ARCHITECTURES
    for way in ["prefix", *LAYERWISE]
    if way == "prefix" or architecture in UNSHARED
]


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def denoiser_of(architecture: str, way: str) -> Denoiser:
    backbone = backbone_of(architecture)
    return Denoiser(backbone, WAYS[way](backbone), tokenizer_allowed()).eval()


def stirred(denoiser: Denoiser) -> Denoiser:
    """Gives the time's parameters values as large as the backbone's, in place of zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in denoiser.conditioning.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return denoiser


def answer(denoiser: Denoiser, batch: Batch, t: Tensor) -> Tensor:
    return denoiser(batch.tokens, batch.attention_mask, t, batch.editable)


def loss(denoiser: Denoiser, batch: Batch, t: Tensor) -> Tensor:
    """Sums unlike weights times log-probabilities, so that no gradient is zero by symmetry."""
    log_p = answer(denoiser, batch, t)[:, tokenizer_allowed().nonzero().squeeze(1)]
    return (log_p * torch.linspace(-1, 1, log_p.numel()).view_as(log_p)).sum()


@pytest.mark.parametrize(("architecture", "way"), TIMED)
def test_the_output_depends_on_the_time_of_its_own_sequence(architecture: str, way: str):
    denoiser = stirred(denoiser_of(architecture, way))
    one = sentences(denoiser.backbone, (8,))
    batch = Batch.of(one.tokens.expand(3, -1), one.editable.expand(3, -1))
    early, same, late = answer(denoiser, batch, times(0.2, 0.2, 0.8))[:, 5:NUM_TOKENIZER_IDS].chunk(3)
    torch.testing.assert_close(early, same)
    assert (early - late).abs().max() > 1e-2


@pytest.mark.parametrize("way", LAYERWISE)
@pytest.mark.parametrize("architecture", UNSHARED)
def test_layerwise_time_starts_as_the_bare_model(architecture: str, way: str):
    denoiser = denoiser_of(architecture, way)
    batch = sentences(denoiser.backbone)
    expected = bare_log_probs(denoiser.backbone, batch)[batch.editable]
    torch.testing.assert_close(
        answer(denoiser, batch, times(0.1, 0.5, 0.9))[:, :NUM_TOKENIZER_IDS], expected, atol=1e-5, rtol=0
    )


def test_layerwise_time_that_starts_at_random_changes_the_model():
    torch.manual_seed(0)
    backbone = backbone_of("bert")
    batch = sentences(backbone)
    expected = bare_log_probs(backbone, batch)[batch.editable]
    found = {}
    for time in (TimeEmbedding.LAYERS, TimeEmbedding.LAYERS_RANDOM):
        denoiser = Denoiser(backbone, time.conditioning(backbone, NUM_STEPS), tokenizer_allowed()).eval()
        found[time] = answer(denoiser, batch, times(0.1, 0.5, 0.9))[:, :NUM_TOKENIZER_IDS]
    torch.testing.assert_close(found[TimeEmbedding.LAYERS], expected, atol=1e-5, rtol=0)
    apart = (found[TimeEmbedding.LAYERS_RANDOM] - expected)[:, tokenizer_allowed()[:NUM_TOKENIZER_IDS]]
    assert apart.abs().max() > 1e-2


@pytest.mark.parametrize("layer", [0, 1])
def test_layerwise_time_is_added_to_the_input_of_each_layer(layer: int):
    """BERT's hidden states come out of a LayerNorm, whose bias is one more way to add to them."""
    denoiser = denoiser_of("bert", "layerwise-sinusoidal")
    batch, t, vector = sentences(denoiser.backbone), times(0.1, 0.5, 0.9), torch.linspace(-1, 1, 32)
    biased = copy.deepcopy(denoiser.backbone)
    norm = [biased.bert.embeddings.LayerNorm, biased.bert.encoder.layer[0].output.LayerNorm][layer]
    with torch.no_grad():
        denoiser.conditioning.projections[layer].bias.copy_(vector)
        norm.bias.add_(vector)
    expected = bare_log_probs(biased, batch)[batch.editable]
    torch.testing.assert_close(answer(denoiser, batch, t)[:, :NUM_TOKENIZER_IDS], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prefix_equal_to_a_token_embedding_acts_as_that_token(architecture: str):
    denoiser = denoiser_of(architecture, "prefix")
    batch, step, word = sentences(denoiser.backbone), 3, 11
    with torch.no_grad():
        denoiser.conditioning.embedding.table.weight[step] = denoiser.backbone.get_input_embeddings().weight[word]

    def with_column(rows: Tensor, value: int) -> Tensor:
        return torch.cat([rows[:, :1], torch.full_like(rows[:, :1], value), rows[:, 1:]], dim=1)

    longer = Batch.of(
        with_column(batch.tokens, word), with_column(batch.editable, 0), with_column(batch.attention_mask, 1)
    )
    expected = bare_log_probs(denoiser.backbone, longer)[longer.editable]
    actual = answer(denoiser, batch, torch.full((3,), step / NUM_STEPS, dtype=torch.float64))
    torch.testing.assert_close(actual[:, :NUM_TOKENIZER_IDS], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", LAYERWISE)
@pytest.mark.parametrize("architecture", UNSHARED)
def test_the_projection_of_every_layer_learns_from_the_start(architecture: str, way: str):
    denoiser = denoiser_of(architecture, way)
    loss(denoiser, sentences(denoiser.backbone), times(0.1, 0.5, 0.9)).backward()
    gradients = [projection.weight.grad for projection in denoiser.conditioning.projections]
    assert len(gradients) == 2
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_the_prefixes_in_use_get_gradients(architecture: str):
    denoiser = denoiser_of(architecture, "prefix")
    loss(denoiser, sentences(denoiser.backbone), times(0.0, 0.31, 1.0)).backward()
    learning = denoiser.conditioning.embedding.table.weight.grad.abs().amax(dim=1) > 1e-4
    assert learning.nonzero().flatten().tolist() == [0, 3, NUM_STEPS]


def test_prefixes_are_initialized_like_token_embeddings():
    backbone = backbone_of("bert")
    drawn, words = PrefixTime(backbone, 200).embedding.table.weight, backbone.get_input_embeddings().weight
    torch.testing.assert_close(drawn.std(), words.std(), atol=0, rtol=0.1)


def test_every_step_of_the_grid_has_its_own_embedding():
    for num_steps in (1, 7, 64, 2000):
        learned = LearnedTime(num_steps, 1)
        with torch.no_grad():
            learned.table.weight.copy_(torch.arange(num_steps + 1.0)[:, None])
        t = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
        assert learned(t).flatten().tolist() == list(range(num_steps + 1))


def test_sinusoidal_time_distinguishes_neighboring_steps():
    torch.manual_seed(0)
    features = SinusoidalTime(32)(torch.arange(1001, dtype=torch.float64) / 1000)
    assert (features[1:] - features[:-1]).norm(dim=1).min() > 1e-3


def test_layerwise_time_refuses_shared_layers():
    backbone = backbone_of("albert")
    with pytest.raises(ValueError, match=r"^AlbertForMaskedLM .*; use PrefixTime or TimeAgnostic$"):
        LayerwiseTime(backbone, SinusoidalTime(16))


@pytest.mark.parametrize("width", [0, 7])
def test_sinusoidal_time_refuses_odd_widths(width: int):
    with pytest.raises(ValueError, match=f"must be even and >= 2, got {width}; half of them"):
        SinusoidalTime(width)


def test_a_table_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="`num_steps` of learned times must be >= 1, got 0; give the T"):
        LearnedTime(0, 16)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("architecture", "reentrant"), [*((architecture, False) for architecture in CHECKPOINTABLE), ("bert", True)]
)
def test_checkpointed_layers_give_equal_gradients(architecture: str, way: str, reentrant: bool):
    """Two forwards at two times come before the one backward, which runs their layers again."""
    plain = stirred(denoiser_of(architecture, way)).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.backbone.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batch, runs = sentences(plain.backbone), []
    layers = next(module for module in checkpointed.backbone.modules() if isinstance(module, nn.ModuleList))
    layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    for denoiser in (plain, checkpointed):
        first, second = (loss(denoiser, batch, times(*t)) for t in ((0.1, 0.2, 0.3), (0.7, 0.8, 0.9)))
        (first + 2 * second).backward()
    assert len(runs) == 4
    for (name, expected), actual in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert (expected.grad is None) == (actual.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("way", ["prefix", *LAYERWISE])
def test_a_backbone_keeps_no_reference_to_its_denoisers(way: str):
    backbone = backbone_of("bert")
    batch, t = sentences(backbone), times(0.1, 0.5, 0.9)
    bare = bare_log_probs(backbone, batch)
    first = stirred(Denoiser(backbone, WAYS[way](backbone), tokenizer_allowed()))
    before = answer(first, batch, t)
    second = stirred(Denoiser(backbone, WAYS[way](backbone), tokenizer_allowed()))
    with pytest.raises(IndexError):
        answer(second, replace(batch, tokens=batch.tokens + 1000), t)
    assert torch.equal(answer(second, batch, t), before)
    assert torch.equal(answer(first, batch, t), before)
    assert torch.equal(bare_log_probs(backbone, batch), bare)


@pytest.mark.parametrize("architecture", UNSHARED)
@torch.no_grad()
def test_layerwise_time_equals_vectors_added_by_hand(architecture: str):
    """The oracle is a bare backbone whose layers get their vectors from hooks that are made for this one call."""
    bare = backbone_of(architecture)
    denoiser = stirred(denoiser_of(architecture, "layerwise-sinusoidal"))
    batch, t, conditioning = sentences(bare), times(0.1, 0.5, 0.9), denoiser.conditioning
    [layers] = [list_ for list_ in bare.base_model.modules() if isinstance(list_, nn.ModuleList)]
    for layer, projection in zip(layers, conditioning.projections, strict=True):
        vector = projection(conditioning.features(t))[:, None]
        layer.register_forward_pre_hook(lambda _, inputs, vector=vector: (inputs[0] + vector, *inputs[1:]))
    expected = bare_log_probs(bare, batch)[batch.editable]
    torch.testing.assert_close(answer(denoiser, batch, t)[:, :NUM_TOKENIZER_IDS], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", UNSHARED)
@torch.no_grad()
def test_a_prepared_backbone_is_an_ordinary_model(architecture: str, tmp_path: Path):
    bare, prepared = backbone_of(architecture), stirred(denoiser_of(architecture, LAYERWISE[0])).backbone
    batch = sentences(bare)
    options = {"output_hidden_states": True, "output_attentions": True, "attention_mask": batch.attention_mask.long()}
    for model in (bare, prepared):
        model.set_attn_implementation("eager")  # the one that can return attentions
    expected, actual = bare(batch.tokens, **options), prepared(batch.tokens, **options)
    assert torch.equal(actual.logits, expected.logits)
    for field in ("hidden_states", "attentions"):
        for one, other in zip(actual[field], expected[field], strict=True):
            assert torch.equal(one, other)
    assert list(prepared.state_dict()) == list(bare.state_dict())
    for model, name in ((bare, "bare"), (prepared, "prepared")):
        model.save_pretrained(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "prepared" / file).read_bytes() == (tmp_path / "bare" / file).read_bytes()


def test_prepared_layers_are_found_by_their_class():
    """Those who shard or compile layers look for `_no_split_modules`, or for instances."""
    [layers] = [each for each in denoiser_of("bert", LAYERWISE[0]).modules() if isinstance(each, nn.ModuleList)][:1]
    assert {type(layer).__name__ for layer in layers} == {"BertLayer"}
    assert all(isinstance(layer, BertLayer) for layer in layers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["bert", "deberta-v2"])
@torch.no_grad()
def test_networks_made_one_after_another_share_a_backbone(architecture: str, way: str):
    backbone = backbone_of(architecture)
    batch, t = sentences(backbone), times(0.1, 0.5, 0.9)
    first = stirred(Denoiser(backbone, WAYS[LAYERWISE[0]](backbone), tokenizer_allowed()))
    before = answer(first, batch, t)
    second = stirred(Denoiser(backbone, WAYS[way](backbone), tokenizer_allowed()))
    assert torch.equal(answer(second, batch, t), answer(stirred(denoiser_of(architecture, way)), batch, t))
    assert torch.equal(answer(first, batch, t), before)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_pickled_network_is_the_same_network(way: str):
    denoiser = stirred(denoiser_of("bert", way))
    batch, t = sentences(denoiser.backbone), times(0.1, 0.5, 0.9)
    file = io.BytesIO()
    torch.save(denoiser, file)
    file.seek(0)
    opened = torch.load(file, weights_only=False)
    assert torch.equal(answer(opened, batch, t), answer(denoiser, batch, t))
    assert list(opened.state_dict()) == list(denoiser.state_dict())


def test_layers_without_a_time_vector_are_an_error():
    batch, t = sentences(backbone_of("bert")), times(0.1, 0.5, 0.9)
    backbone = backbone_of("bert")
    with pytest.raises(ValueError, match=r"layers of BertForMaskedLM took 0 of 2 time vectors, .*: make a network"):
        LayerwiseTime(backbone, SinusoidalTime(16))(backbone, batch.tokens, batch.attention_mask, t)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    fourier = FNetForMaskedLM(FNetConfig(**sizes, max_position_embeddings=24))  # has no attentions to return
    with pytest.raises(ValueError, match=r"took 0 of 2 time vectors, .*, or use PrefixTime or TimeAgnostic"):
        answer(Denoiser(fourier, WAYS[LAYERWISE[0]](fourier), tokenizer_allowed()), batch, t)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "deberta-v2", "mpnet"])
@torch.no_grad()
def test_threads_share_a_network(architecture: str, way: str):
    denoiser = stirred(denoiser_of(architecture, way))
    questions = [
        (sentences(denoiser.backbone, (9, 6, 4)), times(0.1, 0.5, 0.9)),
        (sentences(denoiser.backbone, (5, 12), seed=1), times(0.7, 0.2)),
    ]
    calls = [lambda question=question: answer(denoiser, *question) for question in questions]
    expected = [call() for call in calls]
    for actual, alone in zip(overlapping(denoiser.backbone.get_input_embeddings(), calls), expected, strict=True):
        assert torch.equal(actual, alone)


@torch.no_grad()
def test_threads_restore_the_choice_of_attention_kernels():
    """It is one setting of the whole process, and the thread that comes first leaves first."""
    denoiser = stirred(denoiser_of("bert", "agnostic"))
    batch, t, enabled = sentences(denoiser.backbone), times(0.1, 0.5, 0.9), torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    inside = []
    denoiser.backbone.base_model.register_forward_hook(lambda *_: inside.append(enabled()))
    overlapping(denoiser.backbone.get_input_embeddings(), [lambda: answer(denoiser, batch, t)] * 2)
    assert inside == [False, False]
    assert enabled()


COMPILED = [*(("bert", way) for way in WAYS), ("deberta-v2", LAYERWISE[0]), ("mpnet", LAYERWISE[0])]


@torch.no_grad()
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # the number of targets depends on the data
def compile_as_a_whole(architecture: str, way: str) -> None:
    torch.compiler.reset()
    counter, denoiser = CompileCounter(), stirred(denoiser_of(architecture, way))
    compiled = torch.compile(denoiser, backend=counter, fullgraph=True)
    for seed, t in enumerate([times(0.1, 0.5, 0.9), times(0.2, 0.3, 0.4), times(0.8, 0.8, 0.1)]):
        batch = sentences(denoiser.backbone, seed=seed)
        torch.testing.assert_close(answer(compiled, batch, t), answer(denoiser, batch, t))
    assert counter.frame_count == 1, (architecture, way, counter.frame_count)


@pytest.mark.slow
def test_a_network_compiles_once_and_as_a_whole():
    """In a process of its own, because the compiler cannot trace the shape checks that tests put into all functions."""
    code = "import test_time_conditioning as test\nfor each in test.COMPILED: test.compile_as_a_whole(*each)"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts compilations."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch.compiler.reset()
    yield CompileCounter()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["agnostic", *LAYERWISE])
@torch.no_grad()
def test_one_compiled_layer_serves_all(way: str, compiler: CompileCounter):
    """Training compiles layer by layer: what differs between layers must stay outside."""
    denoiser = stirred(denoiser_of("bert", way))
    batch, t = sentences(denoiser.backbone), times(0.1, 0.5, 0.9)
    expected = answer(denoiser, batch, t)
    for layer in denoiser.backbone.bert.encoder.layer:
        layer.compile(backend=compiler, dynamic=True)
    torch.testing.assert_close(answer(denoiser, batch, t), expected)
    assert compiler.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_compiled_networks_of_one_architecture_do_not_mix(compiler: CompileCounter):
    """Compiled code is shared by all BERTs: what was compiled for one conditioning must not run for another."""
    backbone = torch.compile(backbone_of("bert"), backend="eager")
    batch, t = sentences(backbone), times(0.1, 0.5, 0.9)
    backbone(input_ids=batch.tokens, attention_mask=batch.attention_mask.long(), return_dict=True)
    for way in ("agnostic", "layerwise-sinusoidal"):
        denoiser = stirred(denoiser_of("bert", way))
        compiled = torch.compile(denoiser, backend="eager")
        torch.testing.assert_close(answer(compiled, batch, t), answer(denoiser, batch, t))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_independent(way: str):
    denoiser = stirred(denoiser_of("bert", way))
    batch, t = sentences(denoiser.backbone), times(0.1, 0.5, 0.9)
    before, twin = answer(denoiser, batch, t), copy.deepcopy(denoiser)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(answer(denoiser, batch, t), before)
    assert torch.equal(answer(twin, batch, t), before)


@pytest.mark.parametrize("way", WAYS)
def test_the_state_dict_holds_every_parameter_once(way: str):
    denoiser = denoiser_of("bert", way)
    state = denoiser.state_dict()
    expected = {f"backbone.{name}" for name in denoiser.backbone.state_dict()}
    expected |= {f"conditioning.{name}" for name in denoiser.conditioning.state_dict()}
    assert set(state) == expected
    own = {weight.data_ptr() for weight in denoiser.conditioning.parameters()}
    assert len(own) == len(denoiser.conditioning.state_dict())
    assert own.isdisjoint(weight.data_ptr() for weight in denoiser.backbone.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_a_half_precision_backbone_returns_float32(way: str):
    denoiser = stirred(denoiser_of("bert", way))
    batch, t = sentences(denoiser.backbone), times(0.1, 0.5, 0.9)
    exact = answer(denoiser, batch, t)
    denoiser.backbone.bfloat16()
    rounded = answer(denoiser, batch, t)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.exp(), exact.exp(), atol=0.05, rtol=0)


@pytest.mark.parametrize("way", LAYERWISE)
@pytest.mark.parametrize("architecture", UNSHARED)
def test_time_features_get_gradients(architecture: str, way: str):
    """Through projections that are zero no gradient passes; once they are not, it must reach every weight of e(t)."""
    denoiser = stirred(denoiser_of(architecture, way))
    loss(denoiser, sentences(denoiser.backbone), times(0.0, 0.31, 1.0)).backward()
    features = denoiser.conditioning.features
    gradients = {name: parameter.grad for name, parameter in features.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 1e-5 for gradient in gradients.values()), gradients
    if isinstance(features, LearnedTime):
        learning = features.table.weight.grad.abs().amax(dim=1) > 0
        assert learning.nonzero().flatten().tolist() == [0, 3, NUM_STEPS]


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "way"), TIMED)
def test_padding_changes_nothing_under_any_time(architecture: str, way: str):
    """Time is added to padding, too: it must stay unseen, or a row's answer would depend on its neighbors."""
    denoiser = stirred(denoiser_of(architecture, way))
    batch, t = sentences(denoiser.backbone, (12, 6, 4)), times(0.1, 0.5, 0.9)
    together = answer(denoiser, batch, t).split(batch.editable.sum(dim=1).tolist())
    for row, expected in enumerate(together):
        alone = answer(denoiser, batch.select(torch.tensor([row])), t[row : row + 1])
        torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)
