"""The contract, over all methods: what training on many devices relies on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backbones import MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, VOCAB_SIZE, backbone_of, writable

from diffusionbert.conditioning import LayerwiseTime, PrefixTime, SinusoidalTime, TimeAgnostic
from diffusionbert.method import Likelihood, Method, Objective
from diffusionbert.methods.any_order import AnyOrder
from diffusionbert.methods.continuous_time import ContinuousTime
from diffusionbert.methods.discrete import DiscreteTime, Quantity
from diffusionbert.networks import Denoiser
from diffusionbert.noise import Noise
from diffusionbert.processes import Absorbing, Uniform
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.schedules import Linear, Mean, Spindle, TokenInformation, uniform_grid
from diffusionbert.shapes import Batch

GRID = uniform_grid(16)


def network(time: str = "agnostic") -> Denoiser:
    backbone = backbone_of("bert")
    conditioning = {
        "agnostic": lambda: TimeAgnostic(),
        "prefix": lambda: PrefixTime(backbone, 16),
        "layer-wise": lambda: LayerwiseTime(backbone, SinusoidalTime(16)),
    }[time]()
    return Denoiser(backbone, conditioning, writable()).eval()


def information() -> TokenInformation:
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.long)
    counts[NUM_SPECIAL:NUM_TOKENIZER_IDS] = torch.arange(NUM_TOKENIZER_IDS - NUM_SPECIAL) ** 2
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[:NUM_TOKENIZER_IDS] = writable()
    return TokenInformation.from_counts(counts, writable=known)


def absorbing(schedule) -> Absorbing:
    return Absorbing(schedule, MASK, information())


def uniform() -> Uniform:
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[:NUM_TOKENIZER_IDS] = writable()
    return Uniform(Linear(), allowed)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "diffusionbert": lambda: DiscreteTime(absorbing(Linear()), GRID),
    "diffusionbert, spindle": lambda: DiscreteTime(absorbing(Spindle(0.3)), GRID),
    "diffusionbert, sentence spindle": lambda: DiscreteTime(absorbing(Spindle(0.3, Mean.SENTENCE, 0.05)), GRID),
    "diffusionbert, as printed": lambda: DiscreteTime(
        Absorbing(Spindle(0.3, Mean.SENTENCE), MASK, information(), reweighted=False), GRID, Quantity.PAPER, hybrid=0.01
    ),
    "d3pm": lambda: DiscreteTime(absorbing(Linear()), GRID, hybrid=0.01),
    "d3pm, uniform": lambda: DiscreteTime(uniform(), GRID, hybrid=0.01),
    "continuous time": lambda: ContinuousTime(absorbing(Linear())),
    "continuous time, spindle": lambda: ContinuousTime(absorbing(Spindle(0.3))),
    "any order": lambda: AnyOrder(MASK),
}


def method(name: str, time: str = "agnostic") -> Method:
    objective = OBJECTIVES[name]()
    process = getattr(objective, "process", absorbing(Linear()))
    return Method(network(time), objective, Ancestral(process, GRID))


def batch(rows: int = 12, length: int = 10) -> Batch:
    """Sentences of a language that repeats one word: easy to learn, never seen by the random network."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_SPECIAL, 9, (rows, 1), generator=generator).repeat(1, length)
    tokens[:, 0] = 2
    editable = torch.ones(rows, length, dtype=torch.bool)
    editable[:, 0] = False
    return Noise(8).stratify(Batch.of(tokens, editable))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_noise_belongs_to_the_example_and_not_to_its_place_in_the_batch(name):
    """So that one process and eight draw the same, whatever the split."""
    tested, whole = method(name), batch()
    losses = tested.objective.loss(tested.network, whole, Noise(5, step=9))
    order = torch.randperm(12)
    for part in (order[:5], order[5:]):
        of_part = tested.objective.loss(tested.network, whole.rows(part), Noise(5, step=9))
        torch.testing.assert_close(of_part, losses[part], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(tested.objective.loss(tested.network, whole, Noise(5, step=10)), losses)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_parts_of_a_batch_add_up_to_the_whole(name):
    """Losses are divided by the tokens of the global batch, so gradients of its parts simply add up."""
    tested, whole = method(name), batch()
    tested(whole, Noise(1), whole.num_tokens).backward()
    expected = [parameter.grad.clone() for parameter in tested.parameters() if parameter.grad is not None]
    tested.zero_grad()
    for rows in (torch.arange(0, 2), torch.arange(2, 12)):
        tested(whole.rows(rows), Noise(1), whole.num_tokens).backward()
    summed = [parameter.grad for parameter in tested.parameters() if parameter.grad is not None]
    assert len(expected) > 20
    for part, together in zip(summed, expected, strict=True):
        torch.testing.assert_close(part, together, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("time", ["agnostic", "prefix", "layer-wise"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_method_learns(name, time):
    """In twenty-five steps the loss of an easy language falls well below the untrained network's."""
    tested, whole = method(name, time), batch(rows=32)
    optimiser = torch.optim.AdamW(tested.parameters(), lr=3e-3)

    def validation() -> float:
        with torch.no_grad():
            draws = [tested.objective.loss(tested.network, whole, Noise(99, step)).mean() for step in range(8)]
        return float(torch.stack(draws).mean())

    before = validation()
    for step in range(25):
        loss = tested(whole, Noise(0, step), whole.num_tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = validation()
    assert 0 <= after < 0.6 * before


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_method_samples_real_words_and_keeps_what_is_frozen(name):
    tested, canvas = method(name), batch(rows=4)
    *_, last = tested.sample(canvas, seed=0)
    assert torch.equal(last.tokens[:, 0], canvas.tokens[:, 0])
    assert bool(writable()[last.tokens[:, 1:]].all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_saved_and_loaded_weights_give_the_same_nats(name):
    tested, fresh, whole = method(name), method(name), batch()
    for parameter in tested.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    fresh.load_state_dict(tested.state_dict())
    assert torch.equal(fresh.nats(whole, Noise(2)), tested.nats(whole, Noise(2)))


def test_training_uses_the_loss_and_not_the_nats():
    """They differ by the hybrid term."""
    tested, whole = method("d3pm"), batch()
    loss, nats = (getattr(tested.objective, verb)(tested.network, whole, Noise(1)).sum() for verb in ("loss", "nats"))
    assert float(loss.detach()) > 1.001 * float(nats.detach())
    torch.testing.assert_close(tested(whole, Noise(1), whole.num_tokens), loss / whole.num_tokens)


def test_any_order_tells_the_network_the_share_that_is_hidden():
    told = {}

    def network(tokens, attend, t, asked):
        told["time"], told["share"] = t, asked.sum(dim=1) / (tokens.shape[1] - 1)
        return torch.zeros(int(asked.sum()), VOCAB_SIZE).log_softmax(dim=-1)

    AnyOrder(MASK).nats(network, batch(), Noise(0))
    torch.testing.assert_close(told["time"], told["share"].double(), atol=1e-6, rtol=0)
    assert len(told["time"].unique()) > 3


def test_casting_the_method_leaves_its_grid_exact():
    tested, whole = method("diffusionbert, spindle"), batch()
    with torch.no_grad():
        full, half = tested.nats(whole, Noise(2)), tested.bfloat16().nats(whole, Noise(2))
    assert torch.equal(tested.objective.grid, GRID)
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.1)


def test_the_whole_method_moves_between_devices():
    moved = Method(network(), AnyOrder(MASK), Ancestral(absorbing(Spindle(0.3)), GRID)).to("meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}


def test_kinds_of_likelihood():
    kinds = {name: make().likelihood for name, make in OBJECTIVES.items()}
    assert kinds.pop("diffusionbert, as printed") is Likelihood.PSEUDO
    assert set(kinds.values()) == {Likelihood.BOUND}


def test_weights_are_the_networks_alone():
    """Processes and grids are settings: no buffer of theirs may appear in a checkpoint."""
    names = method("diffusionbert, spindle", "layer-wise").state_dict()
    assert all(name.startswith(("network.backbone.", "network.conditioning.")) for name in names)


def test_mixed_precision_keeps_the_divergence_in_full_precision():
    tested, whole = method("diffusionbert, spindle"), batch()
    full = tested(whole, Noise(1), whole.num_tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = tested(whole, Noise(1), whole.num_tokens)
    assert mixed.dtype == full.dtype == torch.float64
    torch.testing.assert_close(mixed, full, rtol=0.05, atol=0)
