"""Masked language modeling: which positions are selected, what becomes of their tokens, and the scale of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.objectives.base import Likelihood
from diffusionbert.objectives.masked_lm import MaskedLM

VOCABULARY, SPECIAL, CLS, SEP, MASK = 105, 5, 2, 3, 4
NUM_WORDS = VOCABULARY - SPECIAL


def allowed() -> Tensor:
    return torch.arange(VOCABULARY) >= SPECIAL


def sentences(rows: int = 2000, length: int = 50) -> Batch:
    """`[CLS] prompt tokens … [SEP]`, a third of the sequences padded."""
    tokens = torch.randint(SPECIAL, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    attention_mask[::3, length // 2 :] = False
    tokens[:, 0] = CLS
    tokens[:, -1] = SEP
    tokens[~attention_mask] = 0
    editable = attention_mask.clone()
    editable[:, :4] = False
    editable[:, -1] = False
    return Batch.of(tokens, editable, attention_mask)


@dataclass
class Uniform:
    """Gives all tokens the same probability, and records its inputs."""

    targets: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.targets = {"tokens": tokens, "attention_mask": attention_mask, "t": t, "positions": targets}
        log_f = torch.full((int(targets.sum()), VOCABULARY), -math.log(NUM_WORDS), dtype=torch.float64)
        return log_f.masked_fill(~allowed(), -torch.inf)


@pytest.mark.parametrize("rate", [0.15, 0.4])
@pytest.mark.parametrize("verb", ["loss", "nats"])
def test_the_rate_is_the_fraction_of_editable_positions_that_are_selected(rate, verb):
    batch, network = sentences(), Uniform()
    getattr(MaskedLM(MASK, allowed(), rate), verb)(network, batch, Noise(0))
    chosen = network.targets["positions"]
    assert not bool((chosen & ~batch.editable).any())
    count = int(batch.num_tokens)
    error = math.sqrt(rate * (1 - rate) / count)
    assert float(chosen.sum()) / count == pytest.approx(rate, abs=4 * error)
    assert torch.equal(network.targets["t"], torch.full((len(batch.tokens),), rate, dtype=torch.float64))
    assert torch.equal(network.targets["attention_mask"], batch.attention_mask)


def test_of_the_selected_tokens_80_percent_are_masked_10_replaced_10_kept():
    batch, network = sentences(), Uniform()
    MaskedLM(MASK, allowed()).loss(network, batch, Noise(0))
    seen, chosen = network.targets["tokens"], network.targets["positions"]
    assert torch.equal(seen[~chosen], batch.tokens[~chosen])
    before, after = batch.tokens[chosen], seen[chosen]
    assert len(before) > 9000
    error = 4 * math.sqrt(0.8 * 0.2 / len(before))
    masked, kept = after == MASK, after == before
    assert float(masked.double().mean()) == pytest.approx(0.8, abs=error)
    # One in a hundred words that are replaced is replaced by itself.
    assert float(kept.double().mean()) == pytest.approx(0.1 + 0.1 / NUM_WORDS, abs=error)
    replaced = after[~masked & ~kept]
    assert float(len(replaced)) / len(before) == pytest.approx(0.1 * (1 - 1 / NUM_WORDS), abs=error)
    assert bool(allowed()[replaced].all())
    # All words replace, about equally often: χ² with 99 degrees of freedom stays below 160 with odds of 1e-4.
    counts = torch.bincount(replaced - SPECIAL, minlength=NUM_WORDS).double()
    expected = len(replaced) / NUM_WORDS
    assert float(((counts - expected) ** 2 / expected).sum()) < 160


def test_nats_mask_all_selected_positions():
    batch, network = sentences(), Uniform()
    MaskedLM(MASK, allowed()).nats(network, batch, Noise(0))
    seen, chosen = network.targets["tokens"], network.targets["positions"]
    assert bool((seen[chosen] == MASK).all())
    assert torch.equal(seen[~chosen], batch.tokens[~chosen])


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("verb", ["loss", "nats"])
def test_a_uniform_network_costs_the_logarithm_of_the_vocabulary_per_token(rate, verb):
    """At any rate, so that losses of different rates and lengths can be compared."""
    batch = sentences()
    values = getattr(MaskedLM(MASK, allowed(), rate), verb)(Uniform(), batch, Noise(0))
    values = values.sum(dim=1) if verb == "nats" else values
    count = batch.editable.sum(dim=1)
    error = 4 * math.log(NUM_WORDS) * math.sqrt((1 - rate) / rate / int(count.sum()))
    assert float(values.sum() / count.sum()) == pytest.approx(math.log(NUM_WORDS), abs=error)
    for length in count.unique():
        rows = count == length
        error = 4 * math.log(NUM_WORDS) * math.sqrt((1 - rate) / rate / int(count[rows].sum()))
        assert float(values[rows].mean() / length) == pytest.approx(math.log(NUM_WORDS), abs=error)


def test_only_selected_tokens_have_a_cost():
    """Each its own: a token that is certain costs nothing."""
    batch, network = sentences(rows=50), Uniform()
    objective = MaskedLM(MASK, allowed())

    def skewed(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        network(tokens, attention_mask, t, targets)
        return torch.arange(VOCABULARY).double().expand(int(targets.sum()), -1)

    values = objective.loss(skewed, batch, Noise(0))
    chosen = network.targets["positions"]
    expected = -(batch.tokens * chosen).sum(dim=1).double() / 0.15
    torch.testing.assert_close(values, expected)


def test_a_sequence_without_editable_positions_has_no_cost():
    batch = sentences(rows=4)
    batch.editable[1] = False
    for verb in ("loss", "nats"):
        values = getattr(MaskedLM(MASK, allowed(), 0.5), verb)(Uniform(), batch, Noise(0)).reshape(4, -1).sum(dim=1)
        assert float(values[1]) == 0
        assert bool((values[[0, 2, 3]] > 0).all())


def test_noise_belongs_to_the_example_and_the_step():
    batch, objective, network = sentences(rows=8), MaskedLM(MASK, allowed()), Uniform()
    objective.loss(network, batch, Noise(0, 1))
    first = network.targets
    objective.loss(network, batch.select(torch.tensor([5, 2])), Noise(0, 1))
    length = network.targets["tokens"].shape[1]
    assert torch.equal(network.targets["tokens"], first["tokens"][[5, 2], :length])
    objective.loss(network, batch, Noise(0, 2))
    assert not torch.equal(network.targets["tokens"], first["tokens"])


def test_its_likelihood_is_pseudo():
    assert MaskedLM(MASK, allowed()).likelihood is Likelihood.PSEUDO


def test_its_allowed_tokens_are_a_buffer_and_no_parameter():
    objective = MaskedLM(MASK, allowed())
    assert not objective.state_dict()
    assert objective.to("meta").allowed_ids.device.type == "meta"
    assert objective.bfloat16().allowed_ids.dtype == torch.int64


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 15.0, math.nan])
def test_rates_out_of_range_are_refused(rate):
    with pytest.raises(ValueError, match=rf"\(0, 1\), got {rate}; BERT's is 0.15"):
        MaskedLM(MASK, allowed(), rate)
