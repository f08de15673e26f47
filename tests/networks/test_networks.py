"""A masked network is the bare model at target positions, for every architecture; models open whole or not at all."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import (
    ARCHITECTURES,
    NUM_SPECIAL,
    NUM_TOKENIZER_IDS,
    VOCAB_SIZE,
    backbone_of,
    bare_log_probs,
    sentences,
    tokenizer_allowed,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    FNetConfig,
    GPT2Config,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks import base
from diffusionbert.networks.base import HEADS, Network, distribution, head_of
from diffusionbert.networks.loading import NewDecoder, load_causal_lm, load_masked_lm, require_reopenable
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, PrefixTime, SinusoidalTime, TimeAgnostic
from diffusionbert.storage import hub


def agnostic(architecture: str) -> Denoiser:
    return Denoiser(backbone_of(architecture), TimeAgnostic(), tokenizer_allowed()).eval()


def answer(denoiser: Denoiser, batch: Batch, targets: Tensor | None = None) -> Tensor:
    t = torch.full((len(batch.tokens),), 0.5, dtype=torch.float64)
    return denoiser(batch.tokens, batch.attention_mask, t, batch.editable if targets is None else targets)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_time_agnostic_denoiser_is_the_bare_model(architecture: str):
    denoiser = agnostic(architecture).double()
    batch = sentences(denoiser.backbone)
    # Any positions of any sequence may be targets, [CLS] and padding too.
    targets = torch.rand(batch.tokens.shape) < 0.5
    expected = bare_log_probs(denoiser.backbone, batch)[targets]
    torch.testing.assert_close(answer(denoiser, batch, targets)[:, :NUM_TOKENIZER_IDS], expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_output_is_a_distribution_over_allowed_tokens(architecture: str):
    denoiser = agnostic(architecture)
    log_p = answer(denoiser, sentences(denoiser.backbone))
    assert log_p.shape == (7 + 4 + 2, VOCAB_SIZE)
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(len(log_p)))
    assert torch.equal(log_p.isneginf().any(dim=0), log_p.isneginf().all(dim=0))
    assert log_p[0].isfinite().nonzero().flatten().tolist() == list(range(NUM_SPECIAL, NUM_TOKENIZER_IDS))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing(architecture: str, prefix: bool):
    backbone = backbone_of(architecture)
    denoiser = Denoiser(backbone, PrefixTime(backbone, 10) if prefix else TimeAgnostic(), tokenizer_allowed()).eval()
    short, long = sentences(backbone, (6,)), sentences(backbone, (6, 13))
    long.tokens[0, :6] = short.tokens[0]
    alone, padded = answer(denoiser, short), answer(denoiser, long)
    torch.testing.assert_close(padded[: len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_targets_there_is_no_output_and_no_gradient(architecture: str):
    denoiser = agnostic(architecture)
    batch = sentences(denoiser.backbone)
    log_p = answer(denoiser, batch, torch.zeros_like(batch.editable))
    assert log_p.shape == (0, VOCAB_SIZE)
    log_p.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in denoiser.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_head_runs_at_target_positions_only(architecture: str):
    denoiser = agnostic(architecture)
    batch, sizes = sentences(denoiser.backbone), []
    heads = [child for child in denoiser.backbone.children() if child is not denoiser.backbone.base_model]
    for head in heads:
        head.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:-1].numel()))
    answer(denoiser, batch)
    assert set(sizes) == {int(batch.num_tokens)}


@pytest.mark.parametrize(
    ("stored", "answered"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_probabilities_are_float32_or_better(architecture: str, stored: torch.dtype, answered: torch.dtype):
    denoiser = agnostic(architecture)
    denoiser.backbone.to(stored)
    log_p = answer(denoiser, sentences(denoiser.backbone))
    assert log_p.dtype == answered
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(len(log_p), dtype=answered))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_distribution_has_the_gradient_of_masked_logits(dtype: torch.dtype):
    allowed = torch.tensor([False, True, True, False, True])
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    log_p = distribution(ours * 1, allowed)
    expected = plain.float().masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
    torch.testing.assert_close(log_p, expected)
    for values in (log_p, expected):
        values[:, allowed][torch.arange(3), torch.tensor([0, 2, 1])].sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)
    assert ours.grad is not None
    assert bool((ours.grad[:, ~allowed] == 0).all())
    assert bool((ours.grad[:, allowed] != 0).all())


@torch.no_grad()
def test_a_distribution_takes_the_place_of_its_logits_in_parts(monkeypatch):
    allowed = torch.tensor([False, True, True, False, True])
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = torch.inf  # not allowed, so it does not matter
    expected = logits.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
    for values in (1, 12, 100):
        monkeypatch.setattr(base, "VALUES_IN_CACHE", values)
        given = logits.clone()
        found = distribution(given, allowed)
        assert torch.equal(found, expected)
        assert found.data_ptr() == given.data_ptr()  # nothing as large was allocated


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sequences_longer_than_the_limit_are_refused(architecture: str, prefix: bool):
    backbone = backbone_of(architecture)
    denoiser = Denoiser(backbone, PrefixTime(backbone, 10) if prefix else TimeAgnostic(), tokenizer_allowed()).eval()
    reserved = 2 if architecture in ("roberta", "xlm-roberta", "mpnet") else 0
    assert denoiser.max_length == 24 - reserved - prefix
    assert answer(denoiser, sentences(backbone, (denoiser.max_length,))).isfinite().any()
    longer = sentences(backbone, (denoiser.max_length + 1,))
    expected = rf"{denoiser.max_length + 1} positions, .* at most {denoiser.max_length}:"
    with pytest.raises(ValueError, match=expected):
        answer(denoiser, longer)
    with pytest.raises(ValueError, match=expected):
        denoiser.hidden_states(longer.tokens, longer.attention_mask)


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"modernbert", "new-modernbert", "deberta-v2"}))
def test_the_limit_is_where_the_bare_model_fails(architecture: str):
    """All but those whose positions are relative have one trained vector a position."""
    denoiser = agnostic(architecture)
    longer = sentences(denoiser.backbone, (denoiser.max_length + 1,))
    with pytest.raises((IndexError, RuntimeError)):
        bare_log_probs(denoiser.backbone, longer)


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "deberta-v2"])
def test_a_config_that_requests_tuples_changes_nothing(architecture: str):
    denoiser = agnostic(architecture)
    batch = sentences(denoiser.backbone)
    before = answer(denoiser, batch)
    denoiser.backbone.config.return_dict = False
    assert torch.equal(answer(denoiser, batch), before)


def test_a_set_of_tokens_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"up to id 50, but the network has 50 ids: use the tokenizer"):
        Denoiser(backbone_of("bert"), TimeAgnostic(), torch.ones(51, dtype=torch.bool))
    with pytest.raises(ValueError, match="`allowed` must mark at least one token, got none"):
        Denoiser(backbone_of("bert"), TimeAgnostic(), torch.zeros(50, dtype=torch.bool))


def test_a_denoiser_is_a_network():
    assert isinstance(agnostic("bert"), Network)


# Heads

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS = [
    "bert",
    "camembert",
    "distilbert",
    "ernie",
    "eurobert",
    "megatron-bert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
]
NARROW_ENCODERS = ["albert", "convbert", "electra", "roformer"]
DECODERS = [
    "bloom",
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
]
LANGUAGE_MODELS: list[tuple[str, Any, dict[str, Any]]] = [
    *((name, AutoModelForMaskedLM, SPECIAL) for name in ENCODERS),
    *((name, AutoModelForMaskedLM, {"embedding_size": 16}) for name in NARROW_ENCODERS),
    ("rembert", AutoModelForMaskedLM, {"input_embedding_size": 16, "output_embedding_size": 24}),
    *(
        (name, AutoModelForMaskedLM, {"legacy": legacy})
        for name in ("deberta", "deberta-v2")
        for legacy in (True, False)
    ),
    *((name, AutoModelForCausalLM, {**SPECIAL, "num_key_value_heads": 2, "head_dim": 16}) for name in DECODERS),
    ("gpt_neo", AutoModelForCausalLM, {**SPECIAL, "attention_types": [[["global"], 2]]}),
    ("opt", AutoModelForCausalLM, {**SPECIAL, "word_embed_proj_dim": 16}),
    ("modernbert-decoder", AutoModelForCausalLM, SPECIAL),
]


def language_model(model_type: str, auto: Any, settings: dict[str, Any]) -> PreTrainedModel:
    """A model without any parameter that is 0 or 1, so that no part of a head can be left out unnoticed."""
    model = auto.from_config(AutoConfig.for_model(model_type, **SIZES, **settings)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "auto", "settings"), LANGUAGE_MODELS)
@torch.no_grad()
def test_a_head_gives_the_models_own_logits(model_type: str, auto: Any, settings: dict[str, Any]):
    model = language_model(model_type, auto, settings)
    head, batch = head_of(model), sentences(backbone_of("bert"))
    assert head is not None
    inputs = {"input_ids": batch.tokens, "attention_mask": batch.attention_mask.long()}
    expected, hidden = model(**inputs).logits, model.base_model(**inputs).last_hidden_state
    assert torch.equal(head(model, hidden), expected)
    some = hidden.flatten(0, 1)[3:11][None]
    torch.testing.assert_close(head(model, some)[0], expected.flatten(0, 1)[3:11])


@pytest.mark.slow
def test_every_head_of_the_table_is_tested():
    tested = {type(language_model(*each)).__name__ for each in LANGUAGE_MODELS}
    assert tested == set(HEADS)


class CoolBert(BertForMaskedLM):
    """A user's own class, whose forward does something to its logits."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = super().forward(*inputs, **options)
        output.logits = output.logits / 2
        return output


@pytest.mark.parametrize("conditioning", ["agnostic", "prefix", "layerwise"])
@torch.no_grad()
def test_a_class_that_is_not_in_the_table_runs_as_a_whole(conditioning: str):
    backbone, plain = CoolBert(backbone_of("bert").config).eval(), backbone_of("bert")
    backbone.load_state_dict(plain.state_dict())
    assert head_of(backbone) is None

    def denoiser(backbone: PreTrainedModel) -> Denoiser:
        made = {
            "agnostic": TimeAgnostic,
            "prefix": lambda: PrefixTime(backbone, 10),
            "layerwise": lambda: LayerwiseTime(backbone, SinusoidalTime(16)),
        }[conditioning]()
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
        return Denoiser(backbone, made, tokenizer_allowed()).eval()

    batch = sentences(backbone)
    plain_logits = answer(denoiser(plain), batch)  # up to a constant
    torch.testing.assert_close(answer(denoiser(backbone), batch), (plain_logits / 2).log_softmax(-1))


@torch.no_grad()
def test_an_architecture_that_is_not_in_the_table_runs_as_a_whole():
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    denoiser = Denoiser(
        AutoModelForMaskedLM.from_config(FNetConfig(**sizes)), TimeAgnostic(), tokenizer_allowed()
    ).eval()
    assert head_of(denoiser.backbone) is None
    batch = sentences(denoiser.backbone, (9, 9))
    logits = denoiser.backbone(batch.tokens).logits[batch.editable][:, :NUM_TOKENIZER_IDS]
    expected = logits.masked_fill(~tokenizer_allowed(), -torch.inf).log_softmax(-1)
    torch.testing.assert_close(answer(denoiser, batch)[:, :NUM_TOKENIZER_IDS], expected)


# Hidden states


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_hidden_states_are_those_of_the_base_model(architecture: str):
    denoiser = agnostic(architecture)
    batch = sentences(denoiser.backbone)
    expected = denoiser.backbone.base_model(batch.tokens, attention_mask=batch.attention_mask.long()).last_hidden_state
    assert torch.equal(denoiser.hidden_states(batch.tokens, batch.attention_mask), expected)


@pytest.mark.parametrize("conditioning", ["prefix", "layerwise"])
@torch.no_grad()
def test_hidden_states_are_those_that_the_head_gets(conditioning: str):
    backbone = backbone_of("bert")
    made = PrefixTime(backbone, 10) if conditioning == "prefix" else LayerwiseTime(backbone, SinusoidalTime(16))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    denoiser, seen = Denoiser(backbone, made, tokenizer_allowed()).eval(), []
    backbone.cls.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    batch, t = sentences(backbone), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for time in (t, torch.zeros_like(t)):
        denoiser(batch.tokens, batch.attention_mask, time, batch.attention_mask)
    hidden = denoiser.hidden_states(batch.tokens, batch.attention_mask, t)
    assert hidden.shape == (3, 9, 32)
    assert torch.equal(hidden[batch.attention_mask], seen[0])
    assert torch.equal(denoiser.hidden_states(batch.tokens, batch.attention_mask)[batch.attention_mask], seen[1])
    assert not torch.equal(seen[0], seen[1])


# Opening models


def saved(model: nn.Module, folder: Path) -> Path:
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_whole_model_opens_silently_and_unchanged(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    backbone = backbone_of(architecture)
    saved(backbone, tmp_path)
    capfd.readouterr()
    opened = load_masked_lm(tmp_path)
    assert not caplog.records
    assert capfd.readouterr().err == ""
    batch = sentences(backbone)
    assert torch.equal(bare_log_probs(opened, batch), bare_log_probs(backbone, batch))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_encoder_gets_a_new_head_with_a_warning(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    backbone = backbone_of(architecture)
    saved(backbone.base_model, tmp_path)
    capfd.readouterr()
    opened = load_masked_lm(str(tmp_path))
    assert capfd.readouterr().err == ""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "it gets a randomly initialized one, to be trained: " in record.getMessage()
    named = record.getMessage().split(": ")[1].split(", ")
    in_encoder = f"{opened.base_model_prefix}."
    assert named
    assert not any(name.startswith(in_encoder) for name in named)
    for name, weight in opened.state_dict().items():
        if name.startswith(in_encoder):
            assert torch.equal(weight, backbone.state_dict()[name]), name
    assert answer(Denoiser(opened, TimeAgnostic(), tokenizer_allowed()), sentences(opened)).isfinite().any()


def test_an_encoder_that_lacks_weights_is_refused(tmp_path: Path):
    saved(backbone_of("bert"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    half = {name: weight for name, weight in weights.items() if "layer.1" not in name}
    assert len(half) < len(weights)
    save_file(half, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not a complete BertForMaskedLM: 16 weights .* bert\.encoder\.layer\.1\."):
        load_masked_lm(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    saved(backbone_of("bert"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 99}))
    with pytest.raises(ValueError, match=r"1 weights .* bert\.embeddings\.position_embeddings\.weight first"):
        load_masked_lm(tmp_path)


def test_half_precision_files_open_in_float32(tmp_path: Path):
    saved(backbone_of("bert").half(), tmp_path)
    assert load_masked_lm(tmp_path).dtype == torch.float32


def test_pickles_are_refused(tmp_path: Path):
    backbone = backbone_of("bert")
    backbone.config.save_pretrained(tmp_path)
    torch.save(backbone.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickles, .* never loaded: convert them to model\.safetensors"):
        load_masked_lm(tmp_path)


def test_a_folder_that_cannot_be_opened_gives_a_one_line_error(tmp_path: Path):
    empty, no_weights, broken = (tmp_path / name for name in ("empty", "no_weights", "broken"))
    for folder in (empty, broken):
        folder.mkdir()
    BertConfig().save_pretrained(no_weights)
    (broken / "config.json").write_text("{")
    expected = "no masked language model at .* expected a folder with config.json and model.safetensors, or a name"
    for given in (empty, no_weights, str(tmp_path / "missing"), "no-such-model", "nobody/no-such-model"):
        with pytest.raises(ValueError, match=expected) as caught:
            load_masked_lm(given)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"config\.json' is not valid JSON"):
        load_masked_lm(broken)


@pytest.mark.parametrize("fraction", [0, 1e-4, 0.5, 0.999])
def test_truncated_weights_are_reported_as_damaged(tmp_path: Path, fraction: float):
    saved(backbone_of("bert"), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(fraction * len(whole))])
    with pytest.raises(ValueError, match=r"model\.safetensors' is damaged \(.+\): copy the whole file again") as caught:
        load_masked_lm(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_name_is_requested_once_and_not_file_by_file(monkeypatch):
    """Without a connection, transformers would try for each file again and again, and say so."""
    targets = []

    def refused(name: str, **_: object) -> None:
        targets.append(name)
        raise ConnectionError("no connection")

    monkeypatch.setattr(hub, "snapshot_download", refused)
    for library in (AutoConfig, AutoTokenizer, AutoModelForMaskedLM):
        monkeypatch.setattr(library, "from_pretrained", lambda *_, **__: pytest.fail("it was asked for by name"))
    for opened in (load_masked_lm, Vocabulary.load):
        with pytest.raises(ValueError, match=r"at 'no/such'.*\(no connection\)"):
            opened("no/such")
    assert targets == ["no/such", "no/such"]


@pytest.mark.parametrize("load", [load_masked_lm, load_causal_lm])
def test_a_name_is_downloaded(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decoder = NewDecoder(1, 32, 2, 0.0).build(VOCAB_SIZE, 24, 0, causal=True)
    model = backbone_of("bert") if load is load_masked_lm else decoder
    saved(model, tmp_path)
    targets = []

    def downloaded(name: str, **options: object) -> str:
        targets.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", downloaded)
    options = {"revision": "v2", "token": "secret", "local_files_only": True}
    hub.fetch("some/model", hub.MODEL, **options)
    load("some/model")
    assert targets == [("some/model", {"allow_patterns": hub.MODEL, **given}) for given in (options, {})]


def test_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^no folder .*missing.*: give a model's folder, or its Hub name"):
        load_masked_lm(tmp_path / "missing")


@pytest.mark.parametrize(("config", "kind"), [(GPT2Config(), "gpt2"), (BartConfig(), "bart")])
def test_other_kinds_of_models_are_refused(config: GPT2Config | BartConfig, kind: str, tmp_path: Path):
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"the model type '{kind}', which is not a masked language model: use a BERT-like"
    ):
        load_masked_lm(tmp_path)


def test_opening_restores_the_logging_of_transformers(tmp_path: Path):
    saved(backbone_of("bert"), tmp_path)
    transformers_logging.set_verbosity(logging.WARNING)
    transformers_logging.enable_progress_bar()
    load_masked_lm(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        load_masked_lm(tmp_path / "missing")
    assert transformers_logging.get_verbosity() == logging.WARNING
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_backbone_of_a_denoiser_is_an_ordinary_checkpoint(architecture: str, tmp_path: Path):
    denoiser = agnostic(architecture)
    batch = sentences(denoiser.backbone)
    before = answer(denoiser, batch)
    saved(denoiser.backbone, tmp_path)
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(answer(Denoiser(opened, TimeAgnostic(), tokenizer_allowed()), batch), before)


class OwnConfig(BertConfig):
    model_type = "own-bert"


class OwnBert(BertForMaskedLM):
    config_class = OwnConfig


@pytest.fixture
def registered() -> Iterator[None]:
    AutoConfig.register("own-bert", OwnConfig)
    AutoModelForMaskedLM.register(OwnConfig, OwnBert)
    yield
    del CONFIG_MAPPING._extra_content["own-bert"], MODEL_FOR_MASKED_LM_MAPPING._extra_content[OwnConfig]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_transformers_open_again(architecture: str):
    require_reopenable(backbone_of(architecture))
    require_reopenable(NewDecoder(1, 32, 2, 0.0).build(VOCAB_SIZE, 24, 0, causal=True))


@pytest.mark.usefixtures("registered")
def test_a_registered_class_opens_again(tmp_path: Path):
    backbone = OwnBert(OwnConfig(**SIZES)).eval()
    require_reopenable(backbone)
    saved(backbone, tmp_path)
    opened = load_masked_lm(tmp_path)
    assert type(opened) is OwnBert
    batch = sentences(backbone)
    networks = [Denoiser(model, TimeAgnostic(), tokenizer_allowed()).eval() for model in (backbone, opened)]
    assert torch.equal(answer(networks[0], batch), answer(networks[1], batch))


def test_a_class_that_would_not_open_again_is_refused():
    expected = r"saved OwnBert could not .*call AutoConfig\.register\('own-bert', OwnConfig\) and AutoModelForMaskedLM"
    with pytest.raises(ValueError, match=expected) as caught:
        require_reopenable(OwnBert(OwnConfig(**SIZES)))
    assert "\n" not in str(caught.value)
    for model_class in (CoolBert, BertLMHeadModel):  # other classes with the config of a BERT
        with pytest.raises(
            ValueError, match=rf"saved {model_class.__name__} would be opened again as a BertForMaskedLM"
        ):
            require_reopenable(model_class(BertConfig(**SIZES)))
