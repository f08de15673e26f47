"""Every system by its name, as its configuration makes it: one toy language for all, whose entropy is known.

A sentence has a topic, one of six words, and each of its four words is the topic (4 times in 5) or the next word.
Its 90 sentences can be listed, so that a figure is a sum over all of them and scatters with its draws alone. For pairs
the source is the topic.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from backbones import CLS, MASK, SEP
from drawing import requested
from safetensors.torch import load_file, save_file
from shared import encoding_cache, shared
from tiny_models import MAX_LENGTH, corpus, pairs
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from diffusionbert.cli.main import main
from diffusionbert.cli.train import DiffusionOptions, Train, configure
from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Sqrt
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.inference.engine import load_engine
from diffusionbert.inference.generate import make_canvas
from diffusionbert.inference.tasks import Task
from diffusionbert.model import Model
from diffusionbert.networks.embedding import EmbeddingDenoiser
from diffusionbert.networks.loading import NewBert, NewDecoder, Pretrained
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig
from diffusionbert.objectives.gaussian import GaussianConfig, GaussianDiffusion
from diffusionbert.objectives.order_agnostic import OrderAgnostic
from diffusionbert.recipes import SYSTEMS, Start
from diffusionbert.samplers import Sampler, SamplingContext, last_state, sample
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.training.config import DataConfig, RunConfig

PAD, UNK, FIRST, NUM_WORDS, LENGTH, NEXT = 0, 1, 5, 6, 4, 0.2
SIZE = FIRST + NUM_WORDS
UNIFORM = math.log(NUM_WORDS)
"""Nats per token of a uniform distribution."""


# ---- the language ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Toy:
    """All possible sequences, with their probabilities and the entropy."""

    rows: Batch
    probabilities: Tensor
    nats: Tensor

    @property
    def entropy(self) -> float:
        return float(self.probabilities @ self.nats)

    def drawn(self, number: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        picked = torch.multinomial(self.probabilities, number, replacement=True, generator=generator)
        return replace(self.rows.select(picked), example=torch.arange(number))


@cache
def language(paired: bool) -> Toy:
    """`[CLS] sentence [SEP]`, or `[CLS] topic [SEP] sentence [SEP]` of which the topic is given."""
    chances: dict[tuple[int, ...], float] = {}
    for topic, turns in itertools.product(range(NUM_WORDS), itertools.product((0, 1), repeat=LENGTH)):
        words = tuple(FIRST + (topic + turn) % NUM_WORDS for turn in turns)
        key = (FIRST + topic, *words) if paired else words
        chances[key] = chances.get(key, 0.0) + NEXT ** sum(turns) * (1 - NEXT) ** (LENGTH - sum(turns)) / NUM_WORDS
    given = [[CLS, key[0], SEP] if paired else [CLS] for key in chances]
    tokens = torch.tensor([[*before, *key[-LENGTH:], SEP] for before, key in zip(given, chances, strict=True)])
    position = torch.arange(tokens.shape[1])
    editable = ((position >= len(given[0])) & (position < tokens.shape[1] - 1)).expand(tokens.shape)
    probabilities = torch.tensor(list(chances.values()), dtype=torch.float64)
    return Toy(Batch.of(tokens, editable), probabilities, -(probabilities * (NUM_WORDS if paired else 1)).log())


def test_the_toy_language_has_the_stated_entropy():
    alone, paired = language(False), language(True)
    assert (len(alone.probabilities), len(paired.probabilities)) == (90, 96)
    for toy in (alone, paired):
        assert float(toy.probabilities.sum()) == pytest.approx(1)
        assert bool((toy.rows.editable.sum(dim=1) == LENGTH).all())
    assert paired.entropy == pytest.approx(-LENGTH * (0.2 * math.log(0.2) + 0.8 * math.log(0.8)))
    assert paired.entropy < alone.entropy < paired.entropy + UNIFORM


def statistics() -> TokenStatistics:
    counts = torch.zeros(SIZE, dtype=torch.long)
    counts[FIRST:] = 1000 * torch.arange(1, NUM_WORDS + 1)  # not the language's own: schedules by token are to differ
    return TokenStatistics(MASK, PAD, torch.arange(SIZE) >= FIRST, (UNK,), counts)


# ---- the systems ----------------------------------------------------------------------------------------------------

BASE = RunConfig(
    DataConfig("toy", max_length=8),
    NewBert(layers=1, width=32, heads=2, dropout=0.0),
    objective=DiscreteTimeConfig(num_steps=8),
)


def starts() -> dict[Start, str]:
    """Folders of networks to start from; their weights are random, but they are opened as pretrained ones."""
    output = shared("starts", _write_starts)
    return {start: str(output / start.value) for start in (Start.MASKED, Start.DECODER)}


def _write_starts(output: Path) -> None:
    config = BertConfig(
        vocab_size=SIZE,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=9,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = NewDecoder(1, 32, 2, 0.0).build(SIZE, 9, PAD, causal=True)
        masked = BertForMaskedLM(config)
    for start, network in ((Start.MASKED, masked), (Start.DECODER, decoder)):
        network.save_pretrained(output / start.value)


def config_of(name: str) -> RunConfig:
    start = SYSTEMS[name].start
    base = BASE if start is Start.SCRATCH else replace(BASE, backbone=Pretrained(starts()[start]))
    experiment = SYSTEMS[name].configure(base)
    if isinstance(experiment.objective, GaussianConfig):  # six words need no 128 axes
        return replace(experiment, objective=replace(experiment.objective, width=8))
    return experiment


def built(name: str) -> TrainingModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return config_of(name).make_module(statistics())


def sampler_of(name: str, module: TrainingModule) -> tuple[Sampler, SamplingContext]:
    config, request = config_of(name), SYSTEMS[name].sampling
    objective = config.objective
    process = module.objective.process if objective.learns_exponents else objective.process(statistics())
    context = SamplingContext(
        mask_id=MASK,
        process=process,
        config=replace(request.config, steps=16, top_k=None),
        allowed_tokens=statistics().allowed,
        forbidden=statistics().never_sampled,
        time_agnostic=config.time is TimeEmbedding.NONE,
        word_vectors=module.network if isinstance(process, Gaussian) else None,
        causal=objective.is_causal,
    )
    return objective.choose_sampler(request.sampler).resolve(context), context


def toy_of(name: str) -> Toy:
    return language(SYSTEMS[name].needs_pairs)


def figure(method: TrainingModule, toy: Toy, *, of: str, rounds: int = 8) -> tuple[float, float]:
    """Nats per token over all sentences of the language, and their standard error over independent rounds of draws."""
    strata = torch.arange(9, dtype=torch.float64) / 8
    rows = toy.rows.select(torch.arange(len(toy.probabilities)).repeat(8))
    slices = torch.stack([strata[:-1], strata[1:]], dim=1).repeat_interleave(len(toy.probabilities), dim=0)
    rows = replace(rows, strata=slices, example=torch.arange(len(slices)))
    found = []
    for number in range(rounds):
        with torch.no_grad():
            values = getattr(method, of)(rows, Noise(77, number)).reshape(len(slices), -1).sum(dim=1)
        found.append(float(toy.probabilities @ values.double().reshape(8, -1).mean(dim=0)) / LENGTH)
    estimates = torch.tensor(found, dtype=torch.float64)
    return float(estimates.mean()), float(estimates.std() / math.sqrt(rounds))


def trained(name: str) -> tuple[TrainingModule, float]:
    """The system after a short training, and its loss before."""
    folder = shared(f"system-{name}", lambda output: _train(name, output))
    method, stored = built(name), load_file(folder / "trained.safetensors")
    before = float(stored.pop("loss before"))
    method.load_state_dict(stored)
    return method.eval(), before


def _train(name: str, output: Path) -> None:
    method, toy = built(name), toy_of(name)
    before, _ = figure(method.eval(), toy, of="loss", rounds=2)
    steps = 150 if isinstance(SYSTEMS[name].objective, GaussianConfig) else 120
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    method.train()
    for step in range(steps):
        x0 = Noise(step).stratify(toy.drawn(64, step))
        loss = method(x0, Noise(1, step), x0.num_tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
        decay.step()
    tensors = {key: tensor.clone() for key, tensor in method.state_dict().items()}  # tied ones are stored twice
    save_file(tensors | {"loss before": torch.tensor(before)}, output / "trained.safetensors")


every_system = pytest.mark.parametrize("name", SYSTEMS)


@pytest.mark.slow
@every_system
def test_every_system_learns_and_no_likelihood_is_below_the_entropy(name):
    method, before = trained(name)
    toy, kind = toy_of(name), method.objective.likelihood
    if kind in (Likelihood.EXACT, Likelihood.BOUND):
        nats, error = figure(method, toy, of="nats", rounds=12)
        assert nats + 3 * error >= toy.entropy / LENGTH
        assert nats < 0.9 * UNIFORM
        assert error < 0.1 * nats
    after, _ = figure(method, toy, of="loss", rounds=4)
    assert after < 0.85 * before


@pytest.mark.slow
@every_system
def test_every_system_generates_the_language(name):
    """A uniform network would generate a sentence of it in 1 of 14 cases; given a topic, in 1 of 81."""
    method, _ = trained(name)
    toy = toy_of(name)
    given = toy.drawn(100, seed=5)
    canvas = replace(given, tokens=given.tokens.masked_fill(given.editable, MASK))
    last = last_state(sample(*sampler_of(name, method), method.network, canvas, seed=0))
    assert bool(statistics().allowed[last.tokens[given.editable]].all())
    assert torch.equal(last.tokens[~given.editable], given.tokens[~given.editable])
    known = {tuple(row) for row in toy.rows.tokens.tolist()}
    assert sum(tuple(row) in known for row in last.tokens.tolist()) > 20


def test_diffuseq_has_a_clean_source_at_every_step_of_training_and_sampling():
    method, given = built("diffuseq"), language(True).drawn(6, seed=0)
    clean = method.network.embed(given.tokens).detach()
    seen = []
    handle = method.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    method.loss(given, Noise(0))
    method.nats(given, Noise(0))
    last_state(sample(*sampler_of("diffuseq", method), method.network, given, seed=0))
    handle.remove()
    assert len(seen) == 2 + 16
    for x_t in seen:
        assert torch.equal(x_t[~given.editable], clean[~given.editable])
        assert not torch.allclose(x_t[given.editable], clean[given.editable])


# ---- systems as data ------------------------------------------------------------------------------------------------


def test_kinds_of_likelihood():
    kinds = {name: built(name).objective.likelihood for name in SYSTEMS}
    assert {name for name, kind in kinds.items() if kind is Likelihood.EXACT} == {"decoder", "decoder-pretrained"}
    assert {name for name, kind in kinds.items() if kind is Likelihood.NONE} == {"sundae"}
    pseudo = {"diffusionbert-spindle-paper", "d3pm-spindle-paper", "bert-mouth", "cmlm"}
    assert {name for name, kind in kinds.items() if kind is Likelihood.PSEUDO} == pseudo


def classes(name: str) -> tuple[type, ...]:
    method = built(name)
    process, (sampler, _) = getattr(method.objective, "process", None), sampler_of(name, method)
    return type(method.objective), type(process), type(method.network), type(sampler)


def test_three_systems_differ_by_settings_only():
    """They consist of classes that other systems use as well."""
    assert classes("multinomial") == (DiscreteTime, Uniform, Denoiser, Ancestral) == classes("d3pm-uniform")
    assert built("multinomial").objective.hybrid == 0 < built("d3pm-uniform").objective.hybrid
    assert classes("oa-ardm") == (OrderAgnostic, type(None), Denoiser, FirstHitting)
    assert classes("oa-ardm")[2:] == classes("mdlm")[2:]
    _, context = sampler_of("oa-ardm", built("oa-ardm"))
    assert isinstance(context.process, Absorbing)
    assert classes("diffuseq") == (GaussianDiffusion, Gaussian, EmbeddingDenoiser, GaussianAncestral)
    assert classes("diffuseq") == classes("diffusion-lm")
    assert SYSTEMS["diffuseq"].objective == SYSTEMS["diffusion-lm-sqrt"].objective
    assert [name for name, system in SYSTEMS.items() if system.needs_pairs] == ["diffuseq"]


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.start is not Start.SCRATCH])
def test_a_system_that_needs_a_start_is_refused_without_one(name):
    with pytest.raises(ValueError, match=r"starts from a (masked|causal) language model; give one by --start"):
        SYSTEMS[name].configure(BASE)


@every_system
def test_a_system_keeps_the_size_and_the_data_of_its_base(name):
    config = config_of(name)
    assert config.data == BASE.data
    assert config.training == BASE.training
    assert RunConfig.from_json(config.to_json()) == config
    if isinstance(config.objective, DiscreteTimeConfig):
        assert config.objective.num_steps == 8
    if SYSTEMS[name].start is Start.SCRATCH:
        size = (config.backbone.layers, config.backbone.width, config.backbone.heads)
        assert size == (1, 32, 2)
        assert type(config.backbone) is (NewDecoder if name == "decoder" else NewBert)


def test_decoders_and_encoders_are_not_confused():
    with pytest.raises(ValueError, match="needs a causal language model, got a new BERT"):
        replace(config_of("decoder"), backbone=NewBert()).make_module(statistics())
    with pytest.raises(ValueError, match="needs a masked language model, got a new GPT-2"):
        replace(config_of("mdlm"), backbone=NewDecoder()).make_module(statistics())
    with pytest.raises(ValueError, match="the objective sundae is time-agnostic"):
        replace(config_of("sundae"), time=TimeEmbedding.LAYERS).make_module(statistics())


WORDS = {
    "diffusionbert-lte": ("linear", "LTE"),
    "diffusionbert-pte": ("linear", "PTE"),
    "diffusionbert": ("linear", "TAD"),
    "diffusionbert-spindle": ("spindle (λ = 0.3, corpus mean), strict", "TAD"),
    "diffusionbert-spindle-sentence": ("spindle (λ = 0.3, sentence mean, floor 0.05), strict", "TAD"),
    "diffusionbert-spindle-paper": ("spindle (λ = 0.3, sentence mean), paper", "TAD"),
    "d3pm": ("linear", "LTE"),
    "d3pm-uniform": ("linear, uniform noise", "LTE"),
    "diffusion-lm": ("cosine", "input"),
    "diffusion-lm-sqrt": ("sqrt", "input"),
    "diffusion-lm-tokens": ("cosine", "input"),
    "genmd4": ("learned", "TAD"),
    "mdlm": ("linear", "TAD"),
    "bert-mouth": ("–", "–"),
    "sundae": ("–", "–"),
    "decoder": ("–", "–"),
}


@pytest.mark.parametrize(("name", "words"), WORDS.items())
def test_tables_name_schedules_and_times_as_the_paper_does(name, words):
    config = config_of(name)
    assert (config.objective.schedule_label, config.objective.time_label(config.time)) == words


# ---- from the command line ------------------------------------------------------------------------------------------

SMALL = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=512", f"--max-length={2 * MAX_LENGTH}"]
QUICK = ["--steps=3", "--validate-every=3", "--save-every=3", "--batch-tokens=512"]


@pytest.mark.slow
def test_diffuseq_trains_on_pairs_and_answers_a_source(tmp_path, capsys):
    output, cache = tmp_path / "run", f"--cache={encoding_cache()}"
    options = [*SMALL, *QUICK, "--diffusion-steps=20", f"--output={output}", cache]
    main(["train", "--system=diffuseq", f"--data={pairs()}", *options])
    source = "the old king saw the city of paris today ."
    capsys.readouterr()
    main(["generate", f"--model={output}", "--source", source, "-n", "3", "--length", "5", "--steps", "8"])
    written = capsys.readouterr().out.splitlines()
    assert len(written) == 3
    assert not any("[" in text for text in written)
    engine = load_engine(output, "cpu")
    assert engine.paired
    task, sampling = Task(2, length=5, source=source), requested(steps=8)
    assert engine.config.objective.num_steps == 20
    row = engine.vocabulary.encode([source])[0]
    canvas = make_canvas(engine, task, sampling)
    assert canvas.tokens[0, : len(row)].tolist() == row
    for state in sample(*engine.sampler(sampling), engine.network, canvas, seed=0):
        assert bool((state.tokens[:, : len(row)] == torch.tensor(row)).all())
    with pytest.raises(ValueError, match="generates from a source only; give `source`"):
        Model(engine).generate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    {
        "--system=nonsense": "unknown system 'nonsense'; known: diffusionbert-lte, ",
        "--system=diffusionbert": "starts from a masked language model; give one by --start",
        "--system=sundae --schedule=spindle": "--schedule spindle is not for the objective sundae",
        "--system=decoder --diffusion-steps=4": "--diffusion-steps 4 is not for the objective autoregressive",
        "--system=diffusion-lm --diffusion-steps=-3": "`num_steps` must be 1 or more (--diffusion-steps), got -3",
        "--system=sundae --time=layers": "is time-agnostic, got time 'layers'; leave out --time",
        "--system=diffuseq": "pairs",
    }.items(),
)
def test_unsupported_options_of_a_system_are_refused_in_one_line(options, message, tmp_path, capsys):
    common = f"--data={corpus()}", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}"
    with pytest.raises(SystemExit) as caught:
        main(["train", *common, *SMALL, *QUICK, *options.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run" / "run.json").exists()


def test_word_vectors_take_a_schedule_and_its_floor(tmp_path):
    named = {"objective": "gaussian:floor=0.01", "schedule": "sqrt", "diffusion_steps": 50}
    objective = configure(
        Train(tmp_path, str(corpus()), system="diffusion-lm", diffusion=DiffusionOptions(**named))
    ).objective
    assert objective == GaussianConfig(Sqrt(), 50, 0.01)
