"""The decoder: its outputs are those of the bare model, its nats are exact, and samples follow its distribution."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from backbones import CLS, MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, SEP, VOCAB_SIZE, overlapping, tokenizer_allowed
from drawing import Drawing, drawing
from languages import Language
from scipy import stats
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CohereConfig,
    Gemma2Config,
    GPT2Model,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
)

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.networks.causal import (
    CausalModel,
    CausalNetwork,
    KeyValues,
)
from diffusionbert.networks.loading import NewDecoder, NewModernBertDecoder, extend_vocabulary, load_causal_lm
from diffusionbert.objectives.autoregressive import Autoregressive
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.samplers.left_to_right import LeftToRight

POSITIONS = 24
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
DECODERS = {
    "gpt2": lambda: NewDecoder(2, 32, 4, 0.0).build(VOCAB_SIZE, POSITIONS, 0, causal=True),
    "modernbert-decoder": lambda: NewModernBertDecoder(2, 32, 4, 0.0).build(VOCAB_SIZE, POSITIONS, 0, causal=True),
    # Rotated positions, and two heads that share their keys.
    "llama": lambda: AutoModelForCausalLM.from_config(
        LlamaConfig(**COMMON, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=False)
    ),
    # Positions that begin at 2, and words that are narrower than layers.
    "opt": lambda: AutoModelForCausalLM.from_config(
        OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0)
    ),
}
KINDS = list(DECODERS)
# Decoders that cap or scale their logits.
OTHERS = {
    "gemma2": Gemma2Config(
        **COMMON, intermediate_size=48, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0
    ),
    "cohere": CohereConfig(**COMMON, intermediate_size=48, num_key_value_heads=2, logit_scale=0.3),
    "granite": GraniteConfig(**COMMON, intermediate_size=48, num_key_value_heads=2, logits_scaling=3.0),
}
DECODERS |= {name: partial(AutoModelForCausalLM.from_config, config) for name, config in OTHERS.items()}


def decoder_of(kind: str) -> PreTrainedModel:
    """Parameters far larger than a real initialization, so that every input changes the output measurably."""
    backbone = DECODERS[kind]().eval()
    for parameter in backbone.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return backbone


def model_of(kind: str = "gpt2") -> CausalModel:
    return CausalModel(decoder_of(kind), tokenizer_allowed()).eval()


def sentences(lengths: tuple[int, ...] = (9, 6, 4), seed: int = 0) -> Batch:
    """Sequences `[CLS] … [SEP]` of these lengths, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths))
    tokens = torch.randint(NUM_SPECIAL, NUM_TOKENIZER_IDS, size, generator=generator)
    position, length = torch.arange(size[1]), torch.tensor(lengths)[:, None]
    tokens[:, 0] = CLS
    tokens[position == length - 1] = SEP
    tokens[position >= length] = 0
    return Batch.of(tokens, (position > 0) & (position < length - 1), attention_mask=position < length)


def bare_log_probs(backbone: PreTrainedModel, batch: Batch) -> Tensor:
    """The bare model's distribution of the token after each position, with a mask over padding."""
    logits = backbone(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
    padded = nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS))
    return logits.masked_fill(~padded, -torch.inf).log_softmax(-1)


# The network


@pytest.mark.parametrize("kind", DECODERS)
def test_predictions_are_those_of_the_bare_model_at_the_position_before(kind):
    model, batch = model_of(kind).double(), sentences()
    targets = batch.attention_mask & (torch.rand(batch.tokens.shape) < 0.6)
    targets[:, 0] = False
    assert 5 < int(targets.sum()) < 15
    expected = bare_log_probs(model.backbone, batch)[:, :-1][targets[:, 1:]]
    torch.testing.assert_close(model(batch.tokens, batch.attention_mask, targets), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_causal_without_a_mask(kind, monkeypatch):
    """The fused kernel needs it; otherwise a mask of L × L positions would be made for every sequence with padding."""
    model, batch, seen = model_of(kind), sentences(), []
    real = nn.functional.scaled_dot_product_attention

    def spy(*inputs, attn_mask=None, is_causal=False, **options):
        seen.append((attn_mask, is_causal))
        return real(*inputs, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    model(batch.tokens, batch.attention_mask, batch.editable)
    assert seen == [(None, True)] * 2
    seen.clear()
    cache = None
    for _ in range(3):
        _, cache = model.read(batch.tokens[:, :1], cache)
    assert [mask for mask, _ in seen] == [None] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_runs_at_target_positions_only(kind):
    model, batch, sizes = model_of(kind), sentences(), []
    head = model.backbone.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape[:-1])))
    model(batch.tokens, batch.attention_mask, batch.editable)
    model.read(batch.tokens[:, :4], None)
    assert sizes == [(1, 7 + 4 + 2), (1, 3)]
    assert model.backbone.get_output_embeddings() is head


def test_scoring_keeps_no_keys_and_values():
    model, batch, kept = model_of(), sentences(), []
    model.backbone.base_model.register_forward_hook(lambda module, inputs, output: kept.append(output.past_key_values))
    model(batch.tokens, batch.attention_mask, batch.editable)
    model.read(batch.tokens, None)
    assert [cache is None for cache in kept] == [True, False]


def test_the_output_is_a_distribution_over_allowed_tokens_in_float32_or_better():
    model, batch = model_of(), sentences()
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        log_p = model.to(dtype)(batch.tokens, batch.attention_mask, batch.editable)
        assert log_p.dtype == expected
        torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(13, dtype=expected))
        assert log_p[0].isfinite().nonzero().flatten().tolist() == list(range(NUM_SPECIAL, NUM_TOKENIZER_IDS))


@pytest.mark.parametrize("kind", DECODERS)
def test_reading_in_parts_equals_reading_at_once(kind):
    """With a cache and without, and with a cache of some sequences; reading never changes a cache."""
    model = model_of(kind).double()
    batch = sentences((9, 9, 9, 9))
    targets = torch.ones_like(batch.editable)
    targets[:, 0] = False
    at_once = model(batch.tokens, batch.attention_mask, targets).view(4, 8, VOCAB_SIZE)
    cache, rows = None, torch.arange(4)
    for start, end in ((0, 1), (1, 2), (2, 5), (5, 6), (6, 8)):
        before = cache
        for _ in range(2):
            following, cache = model.read(batch.tokens[rows, start:end], before)
            torch.testing.assert_close(following, at_once[rows, end - 1], atol=1e-11, rtol=0)
        if end in (2, 5):
            cache = cache.select(torch.arange(1, len(rows)).flip(0))
            rows = rows[1:].flip(0)
    assert rows.tolist() == [1, 2]


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_threads_share_a_decoder(kind):
    model = model_of(kind)
    questions = [sentences((9, 6, 4)), sentences((5, 12), seed=1)]
    calls = [partial(model, batch.tokens, batch.attention_mask, batch.editable) for batch in questions]
    calls += [partial(lambda tokens: model.read(tokens, None)[0], batch.tokens[:, :4]) for batch in questions]
    expected = [call() for call in calls]
    for actual, alone in zip(overlapping(model.backbone.get_input_embeddings(), calls), expected, strict=True):
        assert torch.equal(actual, alone)


def test_inputs_that_a_decoder_cannot_predict_are_refused():
    model, batch = model_of(), sentences()
    with pytest.raises(ValueError, match=r"first position of a sequence is a target.*begin sequences with a token"):
        model(batch.tokens, batch.attention_mask, batch.attention_mask)
    with pytest.raises(ValueError, match=r"padding comes before text.*pad sequences at the end"):
        model(batch.tokens, batch.attention_mask.flip(1), batch.editable)
    long = sentences((POSITIONS + 1,))
    with pytest.raises(
        ValueError, match=f"sequences have 25 positions, but this network reads at most {POSITIONS}: cut"
    ):
        model(long.tokens, long.attention_mask, long.editable)
    _, cache = model.read(long.tokens[:, :POSITIONS], None)
    with pytest.raises(ValueError, match=f"sequences have 25 positions, but this network reads at most {POSITIONS}"):
        model.read(long.tokens[:, POSITIONS:], cache)
    with pytest.raises(ValueError, match="`tokens` must have at least one token per sequence, got none"):
        model.read(long.tokens[:, :0], None)
    with pytest.raises(ValueError, match="GPT2Model has no output head"):
        CausalModel(GPT2Model(model.backbone.config), tokenizer_allowed())


def test_a_new_decoder_has_the_size_of_a_bert_and_tied_embeddings():
    decoder = NewDecoder(3, 32, 4, 0.1).build(VOCAB_SIZE, POSITIONS, 0, causal=True)
    bert = BertModel(BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128))
    assert sum(map(torch.numel, decoder.transformer.h.parameters())) == sum(map(torch.numel, bert.encoder.parameters()))
    assert decoder.get_output_embeddings().weight is decoder.get_input_embeddings().weight
    assert {module.p for module in decoder.modules() if isinstance(module, nn.Dropout)} == {0.1}
    config = decoder.config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, None, None)
    model = CausalModel(decoder, tokenizer_allowed())
    assert model.max_length == POSITIONS
    assert model.backbone is decoder
    assert len(model.allowed) == VOCAB_SIZE
    assert isinstance(model, CausalNetwork)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_for_new_ids_leave_the_others_unchanged(kind):
    backbone, batch = decoder_of(kind), sentences()
    expected = CausalModel(backbone, tokenizer_allowed())(batch.tokens, batch.attention_mask, batch.editable)
    assert extend_vocabulary(backbone, VOCAB_SIZE - 1).config.vocab_size == VOCAB_SIZE
    model = CausalModel(extend_vocabulary(backbone, VOCAB_SIZE + 2), tokenizer_allowed())
    found = model(batch.tokens, batch.attention_mask, batch.editable)
    assert found.shape[1] == VOCAB_SIZE + 2
    torch.testing.assert_close(found[:, :VOCAB_SIZE], expected)
    assert bool(found[:, VOCAB_SIZE:].isneginf().all())


def test_its_folder_is_an_ordinary_checkpoint(tmp_path):
    model, batch = model_of(), sentences()
    model.backbone.save_pretrained(tmp_path)
    opened = CausalModel(load_causal_lm(tmp_path), tokenizer_allowed()).eval()
    assert torch.equal(opened(*parts(batch)), model(*parts(batch)))


def parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.tokens, batch.attention_mask, batch.editable


# The likelihood

WORDS, LENGTH = 3, 3
BEGIN, END = WORDS + 1, WORDS + 2
LANGUAGE = Language.random(WORDS, LENGTH)


def of_language() -> CausalModel:
    """A decoder over the tokens 0, 1, 2; 3 is the mask."""
    decoder = NewDecoder(1, 16, 2, 0.0).build(WORDS + 3, 8, END, causal=True)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.7)
    return CausalModel(decoder, torch.arange(WORDS + 3) < WORDS).double().eval()


def framed(inner: Tensor, editable: Tensor | None = None) -> Batch:
    """Sequences `[BEGIN] tokens [END]`."""
    tokens = nn.functional.pad(nn.functional.pad(inner, (1, 0), value=BEGIN), (0, 1), value=END)
    positions = torch.ones_like(inner, dtype=torch.bool) if editable is None else editable.expand_as(inner)
    return Batch.of(tokens, nn.functional.pad(positions, (1, 1)))


def nats_of(model: CausalModel, batch: Batch) -> Tensor:
    return Autoregressive().nats(model, batch, Noise(0)).detach()


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_probabilities_of_all_sentences_of_a_length_sum_to_1(length):
    every = torch.tensor(list(itertools.product(range(WORDS), repeat=length)))
    total = nats_of(of_language(), framed(every)).sum(dim=1).neg().exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 2]])
def test_the_probabilities_of_all_sentences_with_the_same_frozen_tokens_sum_to_1(frozen):
    editable = torch.ones(LENGTH, dtype=torch.bool)
    editable[frozen] = False
    every = LANGUAGE.sentences[(LANGUAGE.sentences[:, frozen] == 1).all(dim=1)]
    nats = nats_of(of_language(), framed(every, editable))
    assert float(nats.sum(dim=1).neg().exp().sum()) == pytest.approx(1, abs=1e-9)
    assert not nats[:, 1:-1][:, frozen].any()


def test_nats_are_those_of_the_chain_rule():
    """Each prefix by itself through the bare model, so that nothing after it can be seen."""
    model, batch = of_language(), framed(LANGUAGE.sentences[:7])
    nats = nats_of(model, batch)
    assert nats.dtype == torch.float64
    for row, position in itertools.product(range(7), range(1, LENGTH + 1)):
        logits = model.backbone(batch.tokens[row : row + 1, :position]).logits[0, -1, :WORDS].detach()
        assert float(nats[row, position]) == pytest.approx(-float(logits.log_softmax(0)[batch.tokens[row, position]]))
    assert not nats[:, [0, -1]].any()


def test_nats_do_not_depend_on_the_noise():
    model, batch, objective = of_language(), framed(LANGUAGE.sentences), Autoregressive()
    assert objective.likelihood is Likelihood.EXACT
    nats = objective.nats(model, batch, Noise(0))
    elsewhere = Noise(3).stratify(replace(batch, example=batch.example + 100))
    assert torch.equal(objective.nats(model, elsewhere, Noise(7, step=9)), nats)
    assert torch.equal(objective.loss(model, batch, Noise(2)), nats.sum(dim=1))


# The method


def method_of() -> TrainingModule:
    return TrainingModule(model_of(), Autoregressive())


def test_the_losses_of_parts_add_up_to_that_of_the_batch():
    """Other sequences in the batch, and the padding they cause, do not matter."""
    tested, whole = method_of(), sentences((9, 4, 6, 3, 7))
    tested(whole, Noise(1), whole.num_tokens).backward()
    expected = [parameter.grad.clone() for parameter in tested.parameters()]
    losses = tested.objective.loss(tested.network, whole, Noise(1))
    tested.zero_grad()
    for rows in (torch.tensor([3, 1]), torch.tensor([4, 0, 2])):
        tested(whole.select(rows), Noise(1), whole.num_tokens).backward()
        part = tested.objective.loss(tested.network, whole.select(rows), Noise(1))
        torch.testing.assert_close(part, losses[rows], atol=1e-4, rtol=1e-5)
    for part, together in zip((parameter.grad for parameter in tested.parameters()), expected, strict=True):
        torch.testing.assert_close(part, together, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_it_learns_a_language_down_to_its_entropy_and_no_further():
    model = CausalModel(
        NewDecoder(2, 32, 2, 0.0).build(WORDS + 3, 8, END, causal=True), torch.arange(WORDS + 3) < WORDS
    )
    objective, batch = Autoregressive(), framed(LANGUAGE.sentences)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)

    def figure() -> Tensor:
        return (LANGUAGE.probabilities * objective.loss(model, batch, Noise(0))).sum()

    for _ in range(100):
        optimizer.zero_grad()
        loss = figure()
        assert float(loss.detach()) >= LANGUAGE.entropy
        loss.backward()
        optimizer.step()
    assert LANGUAGE.entropy <= float(figure().detach()) < LANGUAGE.entropy + 0.02
    assert LANGUAGE.entropy + 0.5 < LENGTH * math.log(WORDS)


def test_saved_and_loaded_parameters_give_the_same_nats():
    tested, whole = method_of(), sentences()
    fresh = TrainingModule(CausalModel(DECODERS["gpt2"]().eval(), tokenizer_allowed()), Autoregressive())
    assert not torch.equal(fresh.nats(whole, Noise(2)), tested.nats(whole, Noise(2)))
    fresh.load_state_dict(tested.state_dict())
    assert torch.equal(fresh.nats(whole, Noise(2)), tested.nats(whole, Noise(2)))
    assert all(name.startswith("network.backbone.") for name in tested.state_dict())


def test_mixed_precision_keeps_the_nats_in_full_precision():
    tested, whole = method_of(), sentences()
    full = tested(whole, Noise(1), whole.num_tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = tested(whole, Noise(1), whole.num_tokens)
    assert mixed.dtype == full.dtype == torch.float64
    torch.testing.assert_close(mixed, full, rtol=0.05, atol=0)


# Writing

MANY = 6000


def left_to_right(**settings: Any) -> Drawing:
    return drawing(LeftToRight(), causal=True, **settings)


def agrees(written: Tensor, candidates: Tensor, probability: Tensor) -> bool:
    """Whether these sequences follow a distribution over candidates."""
    is_candidate = (written[:, None] == candidates[None]).all(dim=2)
    assert bool(is_candidate.any(dim=1).all())
    counts, expected = is_candidate.sum(dim=0), probability * len(written)
    return bool(stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [[], [0], [1], [0, 1], [2]])
def test_samples_follow_the_probabilities(frozen):
    model, editable = of_language(), torch.ones(LENGTH, dtype=torch.bool)
    editable[frozen] = False
    every = LANGUAGE.sentences[(LANGUAGE.sentences[:, frozen] == 1).all(dim=1)]
    canvas = framed(torch.full((MANY, LENGTH), 1), editable)
    *_, last = left_to_right(mask_id=LANGUAGE.mask_id).sample(model, canvas, seed=1)
    assert torch.equal(last.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    probability = nats_of(model, framed(every, editable)).sum(dim=1).neg().exp()
    assert agrees(last.tokens[:, 1:-1], every, probability)


@pytest.mark.parametrize("warper", [LogitsWarper(temperature=0.4), LogitsWarper(top_k=2), LogitsWarper(forbidden=(1,))])
def test_each_token_is_drawn_from_the_warped_distribution(warper):
    model, batch = of_language(), framed(LANGUAGE.sentences)
    log_p = warper(model(*parts(batch)).detach())
    chosen = log_p.gather(1, batch.tokens[batch.editable][:, None]).view(len(LANGUAGE.sentences), LENGTH)
    probability = chosen.sum(dim=1).exp()
    assert float(probability.sum()) == pytest.approx(1)
    possible = probability > 0
    canvas = framed(torch.zeros(MANY, LENGTH, dtype=torch.long))
    *_, last = left_to_right(mask_id=LANGUAGE.mask_id, warper=warper).sample(model, canvas, seed=1)
    assert agrees(last.tokens[:, 1:-1], LANGUAGE.sentences[possible], probability[possible])


def canvas_of(seed: int = 0) -> Batch:
    """Sequences of many lengths: fully editable, after a prompt, with frozen tokens, without editable positions."""
    canvas = sentences((9, 6, 4, 9, 8, 5), seed)
    editable = canvas.editable.clone()
    editable[3, :4] = False
    editable[4, [2, 3, 6]] = False
    editable[5] = False
    return replace(canvas, editable=editable, example=torch.tensor([40, 7, 8, 1000, 3, 5]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_sequences_one_by_one(kind):
    model, canvas = model_of(kind).double(), canvas_of()
    *_, last = left_to_right().sample(model, canvas, seed=4)
    for row in range(len(canvas.tokens)):
        alone = canvas.select(torch.tensor([row]))
        *_, end = left_to_right().sample(model, alone, seed=4)
        assert torch.equal(end.tokens[0], last.tokens[row, : end.tokens.shape[1]])
        assert (float(end.time), int(end.calls)) == (float(last.time[row]), int(last.calls[row]))


def test_samples_have_allowed_tokens_and_keep_frozen_positions():
    model, canvas = model_of(), canvas_of()
    *_, last = left_to_right().sample(model, canvas, seed=0)
    assert torch.equal(last.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    assert bool(tokenizer_allowed()[last.tokens[canvas.editable]].all())
    *_, again = left_to_right().sample(model, canvas, seed=0)
    *_, other = left_to_right().sample(model, canvas, seed=1)
    assert torch.equal(again.tokens, last.tokens)
    assert not torch.equal(other.tokens, last.tokens)


def test_tokens_appear_one_by_one_from_left_to_right():
    model, canvas = model_of(), canvas_of()
    states = list(left_to_right().sample(model, canvas, seed=0))
    count = canvas.editable.sum(dim=1)
    assert count.tolist() == [7, 4, 2, 4, 3, 0]
    for state, limit in zip(states, range(1, 9), strict=True):
        masked = canvas.editable & (torch.arange(9) >= limit)
        assert torch.equal(state.tokens == MASK, masked)
        assert torch.equal(state.time, masked.sum(dim=1) / count.clamp(min=1).double())
        assert torch.equal(state.calls, count - masked.sum(dim=1))
    nothing = replace(canvas, editable=torch.zeros_like(canvas.editable))
    [state] = left_to_right().sample(model, nothing, seed=0)
    assert torch.equal(state.tokens, canvas.tokens)
    assert not state.time.any()


class Watched:
    """A network that records how many sequences and positions it reads."""

    def __init__(self, model: CausalModel):
        self.model, self.sizes = model, []

    def __call__(self, tokens: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("writing needs no pass over whole rows")

    def read(self, tokens: Tensor, cache: KeyValues | None) -> tuple[Tensor, KeyValues]:
        self.sizes.append(tuple(tokens.shape))
        return self.model.read(tokens, cache)


def test_each_position_is_read_once_and_none_after_the_last_editable_one():
    watched, canvas = Watched(model_of()), canvas_of()
    for row, widths in ((0, [1] * 7), (3, [4, 1, 1, 1]), (4, [1, 3, 1]), (5, [])):
        watched.sizes.clear()
        list(left_to_right().sample(watched, canvas.select(torch.tensor([row])), seed=0))
        assert watched.sizes == [(1, width) for width in widths]
    watched.sizes.clear()
    list(left_to_right().sample(watched, canvas, seed=0))
    assert watched.sizes == [(rows, 1) for rows in (5, 5, 4, 4, 3, 2, 2)]  # rows that are written are let go


def test_greedy_decoding_takes_the_most_probable_token_each_time():
    """With top_k = 1, whatever the tokens of the canvas are."""
    model, canvas = model_of(), canvas_of()
    *_, last = left_to_right(warper=LogitsWarper(top_k=1)).sample(model, canvas, seed=0)
    log_p = model(last.tokens, canvas.attention_mask, canvas.editable)
    assert torch.equal(log_p.argmax(dim=1), last.tokens[canvas.editable])
    scrambled = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, 11))
    *_, again = left_to_right(warper=LogitsWarper(top_k=1)).sample(model, scrambled, seed=9)
    assert torch.equal(again.tokens, last.tokens)


def test_a_sequence_that_is_editable_from_the_first_position_is_refused():
    batch = sentences()
    with pytest.raises(ValueError, match=r"first position of a sequence is editable.*let sequences begin with a token"):
        list(left_to_right().sample(model_of(), replace(batch, editable=batch.attention_mask), seed=0))
