"""The contract over all objectives: what training on many devices relies on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from backbones import MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, VOCAB_SIZE, backbone_of, tokenizer_allowed
from drawing import Drawing, drawing
from torch import nn

from diffusionbert.diffusion.absorbing import Absorbing, LearnedExponents
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import (
    Cosine,
    Linear,
    Mean,
    NoiseSchedule,
    Power,
    Spindle,
    Sqrt,
    TokenInformation,
    uniform_grid,
)
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.causal import CausalModel
from diffusionbert.networks.embedding import EmbeddingDenoiser
from diffusionbert.networks.loading import NewDecoder
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, PrefixTime, SinusoidalTime, TimeAgnostic
from diffusionbert.objectives.autoregressive import Autoregressive
from diffusionbert.objectives.base import Likelihood, Objective, TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime, LearnedSchedule
from diffusionbert.objectives.discrete_time import DiscreteTime, Quantity
from diffusionbert.objectives.gaussian import GaussianDiffusion
from diffusionbert.objectives.masked_lm import CMLM, BertMouth, MaskedLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic, OrderAgnosticGrid
from diffusionbert.objectives.sundae import Sundae
from diffusionbert.samplers import last_state
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.refinement import Refinement

GRID = uniform_grid(16)


def network(time: str = "agnostic") -> Denoiser:
    backbone = backbone_of("bert")
    conditioning = {
        "agnostic": lambda: TimeAgnostic(),
        "prefix": lambda: PrefixTime(backbone, 16),
        "layer-wise": lambda: LayerwiseTime(backbone, SinusoidalTime(16)),
    }[time]()
    return Denoiser(backbone, conditioning, tokenizer_allowed()).eval()


def information() -> TokenInformation:
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.long)
    counts[NUM_SPECIAL:NUM_TOKENIZER_IDS] = torch.arange(NUM_TOKENIZER_IDS - NUM_SPECIAL) ** 2
    return TokenInformation.from_counts(counts, allowed=allowed())


def absorbing(schedule) -> Absorbing:
    return Absorbing(schedule, MASK, information())


def uniform() -> Uniform:
    return Uniform(Linear(), allowed())


def learned() -> Absorbing:
    """Learned exponents that differ between tokens."""
    exponents = torch.linspace(0.8, 3.0, VOCAB_SIZE).double()
    return Absorbing(Power(), MASK, LearnedExponents(exponents))


def allowed() -> torch.Tensor:
    """The allowed tokens among all ids of the networks."""
    padded = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    padded[:NUM_TOKENIZER_IDS] = tokenizer_allowed()
    return padded


def vectors(process: Gaussian | None = None) -> EmbeddingDenoiser:
    return EmbeddingDenoiser(backbone_of("bert"), tokenizer_allowed(), 16, process).eval()


def decoder() -> CausalModel:
    backbone = NewDecoder(2, 32, 2, 0.0).build(VOCAB_SIZE, 24, 0, causal=True)
    return CausalModel(backbone, tokenizer_allowed()).eval()


Parts = tuple[Objective, nn.Module, Drawing]


def on_tokens(objective: Objective, process: Process | None = None, time: str = "agnostic") -> Parts:
    """An objective on tokens with ancestral sampling, by its own process if it has one."""
    process = process or getattr(objective, "process", None) or absorbing(Linear())
    return objective, network(time), drawing(Ancestral(), process, steps=4)


def on_vectors(schedule: NoiseSchedule, floor: float, *, tokens: bool = False) -> Parts:
    process = Gaussian(schedule, floor)
    targets = vectors(process if tokens else None)
    sampler = drawing(GaussianAncestral(), process, steps=4, word_vectors=targets)
    return GaussianDiffusion(process, GRID, 0.0 if tokens else None), targets, sampler


def paper() -> Objective:
    process = Absorbing(Spindle(0.3, Mean.SENTENCE), MASK, information(), reweighted=False)
    return DiscreteTime(process, GRID, Quantity.PAPER, hybrid=0.01)


TIMED: dict[str, Callable[[], Objective]] = {
    "diffusionbert": lambda: DiscreteTime(absorbing(Linear()), GRID),
    "diffusionbert, spindle": lambda: DiscreteTime(absorbing(Spindle(0.3)), GRID),
    "diffusionbert, sentence spindle": lambda: DiscreteTime(absorbing(Spindle(0.3, Mean.SENTENCE, 0.05)), GRID),
    "diffusionbert, as printed": paper,
    "d3pm": lambda: DiscreteTime(absorbing(Linear()), GRID, hybrid=0.01),
    "d3pm, uniform": lambda: DiscreteTime(uniform(), GRID, hybrid=0.01),
    "continuous time": lambda: ContinuousTime(absorbing(Linear())),
    "continuous time, spindle": lambda: ContinuousTime(absorbing(Spindle(0.3))),
    "complementary masks": lambda: DiscreteTime(absorbing(Linear()), GRID, complementary=True),
    "continuous time, complementary masks": lambda: ContinuousTime(absorbing(Linear()), complementary=True),
    "any order": lambda: OrderAgnostic(MASK),
}
"""Methods whose network may be time-conditioned."""

METHODS: dict[str, Callable[[], Parts]] = {
    **{name: lambda make=make: on_tokens(make()) for name, make in TIMED.items()},
    "grid in any order": lambda: on_tokens(OrderAgnosticGrid(Linear(), GRID, MASK)),
    "learned rates": lambda: on_tokens(LearnedSchedule(learned())),
    "masked lm": lambda: on_tokens(MaskedLM(MASK, allowed())),
    "bert-mouth": lambda: (
        BertMouth(MaskedLM(MASK, allowed()), MASK),
        network(),
        drawing(Gibbs(), absorbing(Linear()), steps=6),
    ),
    "cmlm": lambda: (
        CMLM(MASK),
        network(),
        drawing(MaskPredict(), absorbing(Linear()), steps=4),
    ),
    "sundae": lambda: (
        Sundae(allowed()),
        network(),
        drawing(Refinement(), steps=4, allowed_tokens=allowed()),
    ),
    "diffusion-lm, cosine": lambda: on_vectors(Cosine(), 1e-4),
    "diffusion-lm, sqrt": lambda: on_vectors(Sqrt(), 0.01),
    "diffusion-lm, tokens": lambda: on_vectors(Cosine(), 1e-4, tokens=True),
    "decoder": lambda: (Autoregressive(), decoder(), drawing(LeftToRight(), causal=True)),
}
"""Every method: its objective, a network that it can ask, and the way in which it writes."""
every_method = pytest.mark.parametrize("name", METHODS)


def method(name: str, time: str = "agnostic") -> TrainingModule:
    objective, targets, _ = parts(name, time)
    return TrainingModule(targets, objective)


def parts(name: str, time: str = "agnostic") -> Parts:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return METHODS[name]() if time == "agnostic" else on_tokens(TIMED[name](), time=time)


def batch(rows: int = 12, length: int = 10) -> Batch:
    """Sentences of a language that repeats one token, which is easy to learn."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_SPECIAL, 9, (rows, 1), generator=generator).repeat(1, length)
    tokens[:, 0] = 2
    editable = torch.ones(rows, length, dtype=torch.bool)
    editable[:, 0] = False
    return Noise(8).stratify(Batch.of(tokens, editable))


@pytest.mark.slow
@every_method
def test_noise_belongs_to_the_example_and_not_to_its_index_in_the_batch(name):
    """So that one process and eight draw the same noise."""
    tested, whole = method(name), batch()
    losses = tested.objective.loss(tested.network, whole, Noise(5, step=9))
    order = torch.randperm(12)
    for part in (order[:5], order[5:]):
        of_part = tested.objective.loss(tested.network, whole.select(part), Noise(5, step=9))
        torch.testing.assert_close(of_part, losses[part], atol=1e-4, rtol=1e-5)
    other = tested.objective.loss(tested.network, whole, Noise(5, step=10))
    assert torch.equal(other, losses) == (name == "decoder")  # which draws nothing


@pytest.mark.slow
@every_method
def test_the_losses_of_parts_add_up_to_that_of_the_batch(name):
    """Losses are divided by the tokens of the global batch, so that gradients of its parts add up."""
    tested, whole = method(name), batch()
    tested(whole, Noise(1), whole.num_tokens).backward()
    expected = [parameter.grad.clone() for parameter in tested.parameters() if parameter.grad is not None]
    tested.zero_grad()
    for rows in (torch.arange(0, 2), torch.arange(2, 12)):
        tested(whole.select(rows), Noise(1), whole.num_tokens).backward()
    summed = [parameter.grad for parameter in tested.parameters() if parameter.grad is not None]
    assert len(expected) > 20
    for part, together in zip(summed, expected, strict=True):
        torch.testing.assert_close(part, together, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "time"),
    [*((name, "agnostic") for name in METHODS), *((name, time) for name in TIMED for time in ("prefix", "layer-wise"))],
)
def test_every_objective_learns(name, time):
    """In 25 steps the loss of an easy language falls well below that of the untrained network."""
    tested, whole = method(name, time), batch(rows=32)
    optimizer = torch.optim.AdamW(tested.parameters(), lr=3e-3)

    def validation() -> float:
        with torch.no_grad():
            draws = [tested.objective.loss(tested.network, whole, Noise(99, step)).mean() for step in range(8)]
        return float(torch.stack(draws).mean())

    before = validation()
    for step in range(25):
        loss = tested(whole, Noise(0, step), whole.num_tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = validation()
    assert 0 <= after < 0.6 * before


@pytest.mark.slow
@every_method
def test_every_parameter_gets_a_gradient_even_without_editable_positions(name):
    """Distributed training waits for the gradients of all parameters on every process."""
    whole = batch()
    for given in (whole, replace(whole, editable=torch.zeros_like(whole.editable)).select(torch.tensor([0]))):
        tested = method(name)
        tested(given, Noise(1), 1.0).backward()
        trained = {weight: parameter for weight, parameter in tested.named_parameters() if parameter.requires_grad}
        assert len(trained) > 20
        assert not [weight for weight, parameter in trained.items() if parameter.grad is None]
        assert all(bool(parameter.grad.isfinite().all()) for parameter in trained.values())


@pytest.mark.slow
@every_method
def test_every_tensor_is_made_on_the_device_of_the_batch(name):
    """With another default device, a tensor made without a device would not fit."""
    objective, targets, sampler = parts(name)
    tested, whole, canvas = TrainingModule(targets, objective), batch(), ragged()
    with torch.device("meta"):
        assert bool(tested.loss(whole, Noise(1)).isfinite().all())
        if name != "sundae":
            assert bool(tested.nats(whole, Noise(1)).isfinite().all())
        assert last_of(targets, sampler, canvas, seed=0).device.type == "cpu"


def ragged(rows: int = 5) -> Batch:
    """Sequences of different lengths; in one a token is frozen, and one has no editable positions."""
    whole = batch(rows)
    length, position = torch.tensor([10, 6, 8, 3, 9])[:rows, None], torch.arange(10)
    attention_mask, editable = position < length, whole.editable & (position < length)
    editable[0, 4] = False
    editable[3] = False
    tokens = torch.where(attention_mask, torch.where(editable, MASK, whole.tokens), 0)
    return replace(
        whole,
        tokens=tokens,
        attention_mask=attention_mask,
        editable=editable,
        example=torch.tensor([17, 5, 2**40, 3, 8]),
    )


def last_of(targets: nn.Module, sampler: Drawing, canvas: Batch, seed: int) -> torch.Tensor:
    return last_state(sampler.sample(targets, canvas, seed)).tokens


@pytest.mark.slow
@every_method
def test_every_objective_samples_allowed_tokens_and_keeps_frozen_positions(name):
    (_, targets, sampler), canvas = parts(name), ragged()
    states = list(sampler.sample(targets, canvas, seed=0))
    for state in states:
        assert torch.equal(state.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    assert bool(tokenizer_allowed()[states[-1].tokens[canvas.editable]].all())
    assert states[-1].time.tolist() == [0.0] * 5
    assert states[-1].calls[3] == 0
    assert bool((states[-1].calls[[0, 1, 2, 4]] > 0).all())


@pytest.mark.slow
@every_method
def test_samples_of_a_batch_equal_those_of_its_sequences_and_are_reproducible(name):
    (_, targets, sampler), canvas = parts(name), ragged()
    together = last_of(targets, sampler, canvas, seed=3)
    assert torch.equal(last_of(targets, sampler, canvas, seed=3), together)
    assert not torch.equal(last_of(targets, sampler, canvas, seed=4), together)
    for row in (0, 3, 4):
        alone = canvas.select(torch.tensor([row]))
        assert torch.equal(last_of(targets, sampler, alone, seed=3)[0], together[row, : alone.tokens.shape[1]])


@pytest.mark.slow
@every_method
def test_the_tokens_at_editable_positions_of_a_canvas_do_not_matter(name):
    (_, targets, sampler), canvas = parts(name), ragged()
    other = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, 30))
    assert torch.equal(last_of(targets, sampler, other, seed=0), last_of(targets, sampler, canvas, seed=0))


@pytest.mark.slow
@every_method
def test_frozen_and_padded_positions_have_no_cost(name):
    tested, whole = method(name), batch(5)
    canvas = ragged()
    part = replace(canvas, tokens=torch.where(canvas.attention_mask, whole.tokens, 0))
    if name == "sundae":
        assert float(tested.loss(part, Noise(1)).detach()[3]) == 0
        return
    nats = sum(tested.nats(part, Noise(1, step)) for step in range(30))
    assert bool((nats[~part.editable] == 0).all())
    assert bool((nats.sum(dim=1)[[0, 1, 2, 4]] > 0).all())


@pytest.mark.slow
@every_method
def test_saved_and_loaded_parameters_give_the_same_results(name):
    tested, fresh, whole = method(name), method(name), batch()
    for parameter in tested.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    fresh.load_state_dict(tested.state_dict())
    assert torch.equal(fresh.loss(whole, Noise(2)), tested.loss(whole, Noise(2)))
    if name != "sundae":
        assert torch.equal(fresh.nats(whole, Noise(2)), tested.nats(whole, Noise(2)))


def test_an_objective_without_a_likelihood_refuses_nats():
    with pytest.raises(ValueError, match=r"no likelihood, nor a bound.*judge it by its samples"):
        method("sundae").nats(batch(), Noise(0))


def test_training_uses_the_loss_and_not_the_nats():
    """They differ by the hybrid term."""
    tested, whole = method("d3pm"), batch()
    loss, nats = (getattr(tested.objective, verb)(tested.network, whole, Noise(1)).sum() for verb in ("loss", "nats"))
    assert float(loss.detach()) > 1.001 * float(nats.detach())
    torch.testing.assert_close(tested(whole, Noise(1), whole.num_tokens), loss / whole.num_tokens)


def test_the_order_agnostic_objective_conditions_on_the_masked_fraction():
    told = {}

    def network(tokens, attention_mask, t, targets):
        told["time"], told["fraction"] = t, targets.sum(dim=1) / (tokens.shape[1] - 1)
        return torch.zeros(int(targets.sum()), VOCAB_SIZE).log_softmax(dim=-1)

    OrderAgnostic(MASK).nats(network, batch(), Noise(0))
    torch.testing.assert_close(told["time"], told["fraction"].double(), atol=1e-6, rtol=0)
    assert len(told["time"].unique()) > 3


def test_casting_the_module_leaves_its_grid_exact():
    tested, whole = method("diffusionbert, spindle"), batch()
    with torch.no_grad():
        full, half = tested.nats(whole, Noise(2)), tested.bfloat16().nats(whole, Noise(2))
    assert torch.equal(tested.objective.grid, GRID)
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.1)


def test_the_module_moves_between_devices():
    moved = TrainingModule(network(), ContinuousTime(absorbing(Spindle(0.3)))).to("meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}


def test_kinds_of_likelihood():
    kinds = {name: method(name).objective.likelihood for name in METHODS}
    assert kinds.pop("decoder") is Likelihood.EXACT
    assert kinds.pop("sundae") is Likelihood.NONE
    pseudo = {name for name, kind in kinds.items() if kind is Likelihood.PSEUDO}
    assert pseudo == {"diffusionbert, as printed", "masked lm", "bert-mouth", "cmlm"}
    assert set(kinds.values()) == {Likelihood.BOUND, Likelihood.PSEUDO}


@pytest.mark.slow
@every_method
def test_parameters_are_those_of_the_network_and_learned_exponents_alone(name):
    """No buffers of processes and grids may appear in a checkpoint."""
    names = {weight for weight in method(name).state_dict() if not weight.startswith("network.")}
    assert {weight.rpartition(".")[2] for weight in names} == ({"logits"} if name == "learned rates" else set())
    timed = method("diffusionbert, spindle", "layer-wise").state_dict()
    assert all(weight.startswith(("network.backbone.", "network.conditioning.")) for weight in timed)


def test_mixed_precision_keeps_the_divergence_in_full_precision():
    tested, whole = method("diffusionbert, spindle"), batch()
    full = tested(whole, Noise(1), whole.num_tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = tested(whole, Noise(1), whole.num_tokens)
    assert mixed.dtype == full.dtype == torch.float64
    torch.testing.assert_close(mixed, full, rtol=0.05, atol=0)
