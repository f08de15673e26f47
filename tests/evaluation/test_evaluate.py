"""`evaluate` on a tiny run: every key, the same numbers again, figures that others find, files that read back equal."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import shutil
import sys
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawing import requested
from shared import encoding_cache, shared
from tiny_models import plain_bert
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import diffusionbert as db
from diffusionbert.cli.main import main
from diffusionbert.data.canvas import Sentences
from diffusionbert.data.corpus import AS_IT_IS, Cleaning, detokenize, parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle
from diffusionbert.diffusion.shapes import per_position
from diffusionbert.diffusion.tokens import TokenStatistics, log_prob_of
from diffusionbert.evaluation.conventions import Convention, ConventionScale, PackedSequences, conventions
from diffusionbert.evaluation.dataset import Trained, default_split, read_evaluation_set, sha256_of
from diffusionbert.evaluation.evaluate import (
    Plan,
    compare_texts,
    evaluate,
)
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import (
    PerSample,
    bleu4,
    distinct_n,
    repetition,
    self_bleu4,
    token_entropy,
)
from diffusionbert.evaluation.result import EvaluationResult, Weights, mean_with_interval
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.generate import generate
from diffusionbert.inference.score import ScoreSettings, estimate_nats, score
from diffusionbert.inference.tasks import Task
from diffusionbert.likelihood.estimate import EstimationBudget, length_nats
from diffusionbert.likelihood.orders import Order, RandomOrders
from diffusionbert.likelihood.scores import (
    Estimate,
    Length,
    LikelihoodRates,
    PointEstimate,
    Protocol,
    Scores,
    paired_bootstrap,
)
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    CONTINUOUS,
    GRID,
    NO_LIKELIHOOD,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    ScoringQuantities,
    TimeGrid,
)
from diffusionbert.objectives.continuous_time import ContinuousTime, ContinuousTimeConfig
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig, Quantity
from diffusionbert.objectives.masked_lm import MaskedLMConfig
from diffusionbert.objectives.order_agnostic import OrderAgnostic, OrderAgnosticConfig, OrderAgnosticGrid
from diffusionbert.storage.files import code_version, load_tensors, read_json, save_tensors
from diffusionbert.storage.schema import Component, to_json
from diffusionbert.training.config import DataConfig
from diffusionbert.training.run_folder import RunFolder

SMALL = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=600", "--max-length=48"]
QUICK = ["--steps=4", "--validate-every=4", "--save-every=4", "--batch-tokens=512"]
FEW = ["--sentences=6", "--samples=4", "--length=12", "--max-draws=8"]
HELD_OUT = parse_corpus("pydoc", Split.VALIDATION, cleaning=Cleaning(lower=True))


@pytest.fixture(scope="module")
def run(judge) -> Path:
    """A run of four steps with everything evaluated at once, as the commands leave it."""

    def make(output: Path) -> None:
        run = output / "tiny"
        main(["train", "--data=pydoc", f"--output={run}", f"--cache={encoding_cache()}", *QUICK, *SMALL])
        main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, "--conventions", f"--judge={judge}"])

    return shared("evaluated-run", make) / "tiny"


@pytest.fixture(scope="module")
def engine(run) -> Engine:
    return load_engine(run, "cpu")


@pytest.fixture(scope="module")
def evaluation_set(engine):
    return read_evaluation_set(HELD_OUT, "pydoc", engine.vocabulary, 46, 6)


@pytest.fixture(scope="module")
def judge() -> Path:
    """A causal model of five words, with random weights."""
    return shared("judge", _write_judge)


def _write_judge(folder: Path) -> None:
    words = {word: index for index, word in enumerate(["<end>", "the", "of", "a", "is"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=128, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)


@pytest.fixture(scope="module")
def evaluated(run) -> EvaluationResult:
    return EvaluationResult.load(run)


def quick(**changes) -> Plan:
    plan = Plan(requested(steps=8, top_k=30), samples=3, length=6, budget=EstimationBudget(None, 4, strata=2))
    return replace(plan, **changes)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_alone_is_printed_with_every_key_and_is_reproducible(run, capsys, tmp_path):
    found = []
    for number in range(2):
        main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, "--json", f"--output={tmp_path / str(number)}"])
        printed = capsys.readouterr()
        assert not printed.err
        found.append(json.loads(printed.out))
    keys = "format name model weights code data seed likelihoods generation conventions notes"
    assert list(found[0]) == keys.split()
    for report in found:
        speed = report["generation"].pop("speed")
        assert set(speed) == {"seconds_per_sample", "tokens_per_second", "calls_per_sample", "device", "batch"}
        assert speed["seconds_per_sample"] * speed["tokens_per_second"] == pytest.approx(12)
        assert 1 <= speed["calls_per_sample"] <= 12
        assert speed["batch"] == 8
    assert found[0] == found[1]
    own = found[0]["likelihoods"]["continuous"]
    card = own["protocol"]
    assert (card["length"], card["special_tokens"], card["packed"]) == ("given", False, False)
    assert (card["num_draws"], card["strata"], card["precision"]) == (8, 4, 0.005)
    assert own["kind"] == "bound"


@pytest.mark.slow
def test_a_saved_result_loads_unchanged(evaluated, run, tmp_path):
    evaluated.save(tmp_path)
    again = EvaluationResult.load(tmp_path)
    for field in fields(EvaluationResult):
        before, after = getattr(evaluated, field.name), getattr(again, field.name)
        if field.name not in ("scores", "bleu4", "self_bleu4"):
            assert after == before
    for path in (run / "evaluation").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_the_summary_agrees_with_the_scores(evaluated):
    scores, own = evaluated.primary_scores, evaluated.primary
    assert scores is not None
    assert list(evaluated.scores) == ["continuous", "grid"] == list(evaluated.likelihoods)
    assert own == evaluated.likelihoods["continuous"]
    assert own.rates == LikelihoodRates.of(scores.rates(seed=0))
    assert evaluated.likelihoods["grid"].rates == LikelihoodRates.of(evaluated.scores["grid"].rates())
    assert scores.num_rounds == 2
    assert float(scores.spread.draws) == pytest.approx(own.standard_error.draws**2)
    assert paired_bootstrap(scores, scores).value == 0


@pytest.mark.slow
def test_the_result_describes_the_model_and_its_likelihoods(evaluated, engine):
    about = evaluated.model
    assert (about.objective.name, about.schedule.name, about.diffusion_steps) == ("discrete-time", "linear", 128)
    assert (about.time_conditioning, about.backbone, about.start) == ("none", "bert", "scratch")
    assert (about.parameters, about.seed, about.training_steps) == (engine.num_parameters, 0, 4)
    best = RunFolder(Path(engine.name)).read_pointer("best")
    assert about.tokens_seen == read_json(best / "state.json")["state"]["tokens"] > 0
    assert evaluated.code == code_version()
    assert evaluated.seed == 0
    continuous, grid = (evaluated.likelihoods[name].protocol.definition for name in ("continuous", "grid"))
    assert continuous == LikelihoodDefinition("strict", TimeGrid(), Estimator.ORDER_AGNOSTIC)
    assert (grid.quantity, grid.time, grid.schedule) == ("strict", TimeGrid(128), Component("linear"))


def test_a_plain_masked_model_has_no_training_settings(tmp_path, capsys):
    data = tmp_path / "a.txt"
    data.write_text("the king saw a river .\nthe king saw the sea .\n")
    few = ["--samples=2", "--length=4", "--steps=2", "--max-draws=2", "--json"]
    main(["evaluate", f"--model={plain_bert()}", f"--data={data}", *few])
    about = json.loads(capsys.readouterr().out)["model"]
    assert [about[name] for name in ("start", "seed", "training_steps", "tokens_seen")] == [None] * 4
    assert about["backbone"] == "bert"


def test_bleu_is_computed_from_the_samples_in_the_file(evaluated, run, engine):
    lines = (run / "evaluation" / "samples.txt").read_text(encoding="utf-8").splitlines()
    first, second = lines[:4], lines[4:]
    assert (list(evaluated.samples), list(evaluated.more_samples)) == (first, second)
    assert len(second) == 4
    assert not set(first) & set(second)
    sentences = [*parse_corpus("pydoc", Split.VALIDATION, cleaning=Cleaning(lower=True))]
    references = [engine.vocabulary.decode(row) for row in engine.vocabulary.encode(sentences)]
    quality, others = bleu4(first, references), self_bleu4(second)
    own = evaluated.generation.samples
    assert (own.bleu4.value, own.self_bleu4.value) == (quality.mean, others.mean)
    assert own.bleu4 == mean_with_interval(quality)
    assert evaluated.bleu4.values.tolist() == quality.values.tolist()
    assert evaluated.self_bleu4.values.tolist() == others.values.tolist()
    assert own.distinct[1] == distinct_n(first, 2)
    assert own.repeated_4grams == repetition(first).fraction.mean
    assert own.entropy_pooled == token_entropy(first).pooled
    assert own.entropy_per_text == token_entropy(first).within.mean
    assert first == [made.text for made in generate(engine, Task(4, 12, seed=0), requested(top_k=30))]


def test_samples_and_references_are_normalized_alike(engine, tmp_path):
    """In lower case, after the tokenizer, and each set with its own."""
    lines = ["It 's the value of the object , not changed .", "An object is a value of the other object ."]
    corpus = read_evaluation_set(corpus_of(tmp_path / "a.txt", lines), "a", engine.vocabulary, 46)
    assert corpus.decoded != corpus.texts
    first, second = corpus.decoded[0].upper(), corpus.decoded[1]
    bleu, self_bleu, own, real = compare_texts([first, first], [second, f"{second} and more"], corpus, [0, 1])
    assert bleu.values.tolist() == [1.0, 1.0]
    assert self_bleu.values.tolist() == self_bleu4([second.lower(), f"{second} and more".lower()]).values.tolist()
    assert self_bleu.values.max() < 1
    assert (own.bleu4.value, own.self_bleu4.value) == (bleu.mean, self_bleu.mean)
    decoded = [text.lower() for text in corpus.decoded]
    assert real.bleu4.value == self_bleu4(decoded).mean


def test_real_sentences_are_reported_with_the_samples(engine, evaluation_set):
    found = evaluate(engine, evaluation_set, quick())
    numbers = evaluation_set.some(3)
    real = [evaluation_set.decoded[number].lower() for number in numbers]
    others = [
        [text.lower() for index, text in enumerate(evaluation_set.decoded) if index != number] for number in numbers
    ]
    expected = [bleu4([text], rest).mean for text, rest in zip(real, others, strict=True)]
    own = found.generation.real
    assert own.bleu4.value == pytest.approx(np.mean(expected))
    assert own.self_bleu4.value == self_bleu4(real).mean
    assert own.number == 3
    assert own.distinct[0] == distinct_n(real, 1)


def test_hashes_are_computed_from_files_and_texts(evaluated, run, engine):
    file = run / "model" / "model.safetensors"
    own = hashlib.sha256(file.read_bytes()).hexdigest()
    data = evaluated.data
    assert evaluated.weights.files["model.safetensors"] == own
    assert Weights.of(engine.folder) == evaluated.weights
    assert evaluated.primary.protocol.weights == evaluated.weights.sha256
    sentences = [*parse_corpus("pydoc", Split.VALIDATION, cleaning=Cleaning(lower=True))]
    scored = [sentences[number] for number in evaluated.primary_scores.example.tolist()]
    assert data.sha256 == hashlib.sha256("".join(f"{text}\n" for text in scored).encode()).hexdigest()
    assert evaluated.primary.protocol.data == data.sha256
    assert data.corpus_sha256 == sha256_of(sentences)
    assert (data.split, data.num_sentences) == (Split.VALIDATION, 6)


def test_the_judge_reads_samples_and_real_sentences(evaluated, judge, evaluation_set):
    verdict, opened = evaluated.generation.judge, load_judge(str(judge), torch.device("cpu"))
    real = [evaluation_set.decoded[number] for number in evaluation_set.some(4)]
    for name, texts in (("samples", evaluated.samples), ("real", real)):
        expected = opened.read(list(texts)).judged()
        assert getattr(verdict, name).perplexity == pytest.approx(expected.perplexity)
        assert getattr(verdict, name).entropy == pytest.approx(expected.entropy)
    assert verdict.samples.perplexity != verdict.real.perplexity
    assert "not counted" in verdict.convention


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mauve_names_the_model_of_its_features(run, judge, capsys, monkeypatch, tmp_path):
    targets = {}

    def compute(**options):
        targets.update(options)
        return SimpleNamespace(mauve=0.25, mauve_star=0.5, num_buckets=2)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute))
    options = ["--mauve", f"--judge={judge}", "--json", f"--output={tmp_path}"]
    main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, *options])
    mauve = json.loads(capsys.readouterr().out)["generation"]["mauve"]
    assert (mauve["value"], mauve["features"]) == (0.25, str(judge))
    opened, samples = load_judge(str(judge), torch.device("cpu")), EvaluationResult.load(tmp_path).samples
    assert np.allclose(targets["q_features"], opened.read(list(samples)).features, atol=1e-5)


@pytest.mark.slow
def test_the_table_shows_figures_and_protocol(evaluated, run, capsys, tmp_path):
    main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, "--conventions", f"--output={tmp_path}"])
    printed = capsys.readouterr().out
    assert EvaluationResult.load(tmp_path).table() in printed
    own, real, data = evaluated.generation.samples, evaluated.generation.real, evaluated.data
    [words] = [line.split() for line in printed.splitlines() if line.startswith("  words per text")]
    assert words[3:] == [f"{own.words_per_text:.1f}", f"{real.words_per_text:.1f}"]
    for shown in (
        f"{evaluated.primary.rates.perplexity_per_token.value:,.2f}",
        f"{own.bleu4.value:.3f}",
        f"{real.distinct[0]:.3f}",
    ):
        assert shown in printed
    for words in (
        "length given",
        "128 steps",
        "top-k 30",
        "MDLM",
        "NOT what it was trained for",
        f"split {data.split.value}, sha256 {data.corpus_sha256[:12]}",  # as compare calls it
        f"of those {data.num_sentences} {data.sha256[:12]}",
    ):
        assert words in printed


@pytest.mark.slow
def test_without_a_run_directory_only_the_given_output_is_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("stays")
    model = f"--model={run / 'model'}"
    main(["evaluate", model, "--data=pydoc", *FEW, "--json"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    main(["evaluate", model, "--data=pydoc", *FEW, "--output=out"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"mine.txt", "evaluation.json", "scores.safetensors", "samples.txt"}
    assert "written to out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["evaluation.json", "scores.safetensors", "samples.txt"])
def test_existing_files_are_not_overwritten(run, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr("diffusionbert.model.load", None)  # no work is done first
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, f"--output={tmp_path}"])
    assert caught.value.code == 2
    [printed] = capsys.readouterr().err.strip().splitlines()
    assert printed.endswith(f"contains '{name}'; give --overwrite, or choose another --output")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_an_existing_evaluation_needs_overwrite(evaluated, run, capsys):
    before = {path.name: path.read_bytes() for path in (run / "evaluation").iterdir()}
    with pytest.raises(SystemExit):
        main(["evaluate", f"--model={run}", "--data=pydoc", *FEW])
    assert {path.name: path.read_bytes() for path in (run / "evaluation").iterdir()} == before
    assert "give --overwrite" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("diffusionbert.model.load", None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, f"--output={tmp_path / 'file'}"])
    assert caught.value.code == 2
    assert "file' is not writable (Not a directory); choose another --output" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_the_default_length_is_limited_by_the_model(run, tmp_path, capsys):
    options = ["--sentences=4", "--samples=2", "--max-draws=4", "--steps=2", "--json", f"--output={tmp_path}"]
    main(["evaluate", f"--model={run}", "--data=pydoc", *options])
    assert json.loads(capsys.readouterr().out)["generation"]["sampling"]["length"] == 46
    main(["evaluate", f"--model={run}", "--data=pydoc", *options, "--length=corpus", "--precision=0.1", "--overwrite"])
    found = json.loads(capsys.readouterr().out)
    assert found["generation"]["sampling"]["length"] is None
    assert found["likelihoods"]["continuous"]["protocol"]["precision"] == 0.1


@pytest.mark.slow
def test_texts_are_cleaned_as_in_training_by_default(run, tmp_path, capsys):
    lines = [f"The Value isn 't changed , it 's {word} ." for word in ("one", "two", "three")]
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    options = [f"--data={data}", "--field=body", "--samples=2", "--length=4", "--max-draws=4", "--json"]

    def read(*more: str) -> str:
        main(["evaluate", f"--model={run}", *options, *more, f"--output={tmp_path / 'out'}", "--overwrite"])
        return json.loads(capsys.readouterr().out)["data"]["sha256"]

    lower = [line.lower() for line in lines]
    assert read() == sha256_of(lower)
    assert read("--cased") == sha256_of(lines)
    assert read("--detokenize") == sha256_of([detokenize(line).lower() for line in lines])
    assert read("--split=all", "--sentences=2") in {sha256_of(lower[:2]), sha256_of(lower[1:]), sha256_of(lower[::2])}


@pytest.mark.slow
def test_another_seed_draws_other_samples_and_scores_the_same_sentences(evaluated, run, tmp_path):
    main(["evaluate", f"--model={run}", "--data=pydoc", *FEW, "--seed=1", f"--output={tmp_path}"])
    other = EvaluationResult.load(tmp_path)
    assert not {*other.samples, *other.more_samples} & {*evaluated.samples, *evaluated.more_samples}
    assert other.data == evaluated.data
    assert (other.seed, other.primary.protocol.seed, other.generation.sampling.seed) == (1, 1, 1)
    assert torch.equal(other.primary_scores.example, evaluated.primary_scores.example)
    assert not torch.equal(other.primary_scores.nats, evaluated.primary_scores.nats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data"),
        (["--data=no-such-file.txt"], "no-such-file"),
        (["--data=EMPTY"], "empty"),
        (["--data=PAIRS"], "pairs"),
        (["--data=pydoc", "--quantity=none"], "--quantity must be one that this model has, got 'none'"),
        (["--data=pydoc", "--samples=1"], "2 to 50000, or 0 for the likelihood alone, got 1"),
        (["--data=pydoc", "--samples=60000"], "likelihood alone, got 60000"),
        (["--data=pydoc", "--seed=-1"], "--seed must be >= 0, got -1"),
        (["--data=pydoc", "--sentences=1"], "at least two"),
        (["--data=pydoc", "--length=64"], "46"),
        (["--data=pydoc", "--length=0"], "--length must be 1 to 46 for this model, got 0"),
        (["--data=pydoc", "--length=nonsense"], "--length"),
        (["--data=pydoc", "--judge=no/such-judge"], "no/such-judge"),
        (["--data=pydoc", "--precision=fine"], "--precision"),
        (["--data=pydoc", "--precision=0"], "precision"),
        (["--data=pydoc", "--max-draws=1"], "--max-draws must be >= 2, got 1"),
        (["--data=pydoc", "--max-draws=0"], "--max-draws must be >= 2, got 0"),
        (["--data=pydoc", "--sampler=magic"], "magic"),
        (["--data=pydoc", "--split=test"], "test split"),
        (["--data=pydoc", "--field=text"], "JSONL"),
        (["--data=pydoc", "--model=no/such/model"], "no/such/model"),
    ],
    ids=str,
)
def test_wrong_use_gives_one_line_and_exit_code_2(run, capsys, tmp_path, options, message):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "pairs.tsv").write_text("a question\tan answer\n" * 3)
    paths = {"--data=EMPTY": f"--data={tmp_path / 'empty.txt'}", "--data=PAIRS": f"--data={tmp_path / 'pairs.tsv'}"}
    words = [paths.get(option, option) for option in options]
    model = [] if any("--model" in word for word in words) else [f"--model={run}"]
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", *model, *words, f"--output={tmp_path / 'out'}"])
    assert caught.value.code == 2
    assert not (tmp_path / "out").exists()
    [printed] = capsys.readouterr().err.strip().splitlines()
    assert printed.startswith("diffusionbert: ")
    assert message in printed


# ---- likelihoods --------------------------------------------------------------------------------------------------


def test_the_likelihood_equals_that_of_estimate_nats(engine, evaluation_set):
    budget = EstimationBudget(None, 4, strata=2, seed=3)
    found = evaluate(engine, evaluation_set, quick(budget=budget))
    expected = estimate_nats(engine, evaluation_set.scored, budget)
    assert torch.equal(found.primary_scores.nats, expected.scores.nats)
    assert found.primary.rates == LikelihoodRates.of(expected.rates)
    assert found.primary_scores.example.tolist() == list(evaluation_set.numbers)


def test_other_likelihoods_get_no_more_draws_than_the_models_own(engine, evaluation_set):
    found = evaluate(
        engine, evaluation_set, quick(budget=EstimationBudget(0.5, 400, strata=2), conventions=True)
    ).likelihoods
    own, grid = found["continuous"], found["grid"]
    assert 4 <= grid.protocol.num_draws <= own.protocol.num_draws < 400
    assert own.limited_by is None


@pytest.mark.slow
def test_modeled_lengths_are_added_except_in_conventions(engine, evaluation_set):
    given = evaluate(engine, evaluation_set, quick(conventions=True))
    paid = evaluate(engine, evaluation_set, quick(conventions=True, modeled_length=True))
    assert engine.length_histogram is not None
    for name in ("continuous", "grid"):
        own, more = given.scores[name], paid.scores[name]
        price = length_nats(engine.length_histogram, own.tokens)
        assert torch.allclose(more.nats, own.nats + price)
        assert given.likelihoods[name].protocol.length is Length.GIVEN
        assert paid.likelihoods[name].protocol.length is Length.MODELED
    assert given.conventions is not None
    assert paid.conventions is not None
    for row, again in zip(given.conventions, paid.conventions, strict=True):
        assert again.value.value == pytest.approx(row.value.value)


ALLOWED = torch.tensor([False, True, True, True, False])
STATISTICS = TokenStatistics(0, 4, ALLOWED, (1,), torch.tensor([0, 1, 5, 9, 0]))
CORPUS, SENTENCE = Spindle(0.3, Mean.CORPUS, 0.0), Spindle(0.3, Mean.SENTENCE, 0.05)


@pytest.mark.parametrize(
    ("objective", "time", "expected"),
    [
        (DiscreteTimeConfig(Linear(), 16), TimeEmbedding.NONE, {CONTINUOUS: OrderAgnostic, GRID: OrderAgnosticGrid}),
        (DiscreteTimeConfig(Linear(), 16), TimeEmbedding.LAYERS, {GRID: DiscreteTime, CONTINUOUS: ContinuousTime}),
        (DiscreteTimeConfig(CORPUS, 16), TimeEmbedding.NONE, {GRID: DiscreteTime, CONTINUOUS: ContinuousTime}),
        (DiscreteTimeConfig(SENTENCE, 16), TimeEmbedding.PREFIX, {GRID: DiscreteTime, CONTINUOUS: ContinuousTime}),
        (DiscreteTimeConfig(SENTENCE, 16, Quantity.PAPER), TimeEmbedding.NONE, {GRID: DiscreteTime}),
        (DiscreteTimeConfig(Linear(), 16, uniform_noise=True), TimeEmbedding.NONE, {GRID: DiscreteTime}),
        (ContinuousTimeConfig(CORPUS), TimeEmbedding.NONE, {CONTINUOUS: ContinuousTime}),
        (OrderAgnosticConfig(), TimeEmbedding.NONE, {CONTINUOUS: OrderAgnostic}),
        (MaskedLMConfig(), TimeEmbedding.NONE, {CONTINUOUS: OrderAgnostic}),
    ],
    ids=str,
)
def test_every_objective_has_its_scoring_quantities(objective, time, expected):
    """The model's own comes first; where the grid has no limit, a note says why."""
    quantities = objective.scoring_quantities(time)
    built = {quantity.name: type(quantity.build(STATISTICS)) for quantity in quantities.available}
    assert built == expected
    assert list(built) == list(expected)
    assert quantities.primary.name == next(iter(expected))
    assert bool(quantities.notes) == (list(expected) == [GRID])
    if GRID in expected:
        assert quantities.named(GRID).definition.time == TimeGrid(16)


def test_the_bound_uses_the_requested_number_of_steps(engine, evaluation_set):
    """One step generates all tokens independently; a thousand steps are close to the limit."""
    budget, found = EstimationBudget(None, 32, strata=16), {}
    for steps in (1, 1000):
        for quantity in DiscreteTimeConfig(Linear(), steps).scoring_quantities(engine.config.time).available:
            found[steps, quantity.name] = estimate_nats(engine, evaluation_set.scored, budget, quantity=quantity)
    batch = Sentences(engine.vocabulary, evaluation_set.scored).batch(range(6))
    masked = batch.tokens.masked_fill(batch.editable, engine.vocabulary.mask_id)
    with torch.no_grad():
        log_f = engine.network(masked, batch.attention_mask, torch.ones(6).double(), batch.editable)
    nats = per_position(-log_prob_of(log_f, batch.tokens[batch.editable]), batch.editable).sum(dim=1)
    assert torch.allclose(found[1, GRID].scores.nats, nats.double(), rtol=1e-4)
    assert float(found[1, GRID].scores.draw_variance.max()) < 1e-6
    assert torch.equal(found[1, CONTINUOUS].scores.nats, found[1000, CONTINUOUS].scores.nats)
    assert found[1000, GRID].nats_per_token == pytest.approx(found[1000, CONTINUOUS].nats_per_token, rel=0.01)
    assert [found[steps, GRID].protocol.definition.time.steps for steps in (1, 1000)] == [1, 1000]


def test_a_missing_likelihood_is_noted(engine, evaluation_set, monkeypatch):
    none = ScoringQuantities((), (NO_LIKELIHOOD,))
    monkeypatch.setattr(DiscreteTimeConfig, "scoring_quantities", lambda self, time: none)
    found = evaluate(engine, evaluation_set, quick(conventions=True))
    assert (found.primary, found.likelihoods, found.conventions) == (None, {}, ())
    assert found.generation.samples.bleu4.ci95 is not None
    assert any("this method has no likelihood" in note for note in found.notes)


def test_a_result_without_a_likelihood_is_saved_and_loaded(engine, evaluation_set, monkeypatch, tmp_path):
    found = replace(evaluate(engine, evaluation_set, quick()), likelihoods={}, scores={})
    found.save(tmp_path)
    again = EvaluationResult.load(tmp_path)
    assert again.primary is again.primary_scores is None
    assert again.samples == found.samples


# ---- conventions --------------------------------------------------------------------------------------------------


def estimate_of(nats: list[float], tokens: list[int], name: str) -> Estimate:
    size = len(nats)
    scores = Scores(
        Likelihood.BOUND,
        torch.arange(size),
        torch.tensor(nats, dtype=torch.float64),
        torch.zeros(size, dtype=torch.float64),
        2,
        torch.tensor(tokens),
        torch.tensor([2, 3][:size]),
        torch.tensor([10, 20][:size]),
    )
    return Estimate(scores, scores.rates(), None, Protocol(LikelihoodDefinition(name)))


def conventions_of(**changes) -> tuple[Convention, ...]:
    own = estimate_of([6.0, 9.0], [4, 6], "own")
    grid, limit = estimate_of([8.0, 12.0], [4, 6], "grid"), estimate_of([5.0, 7.0], [4, 6], "limit")
    packed = estimate_of([30.0, 20.0], [10, 10], "limit")
    usual = {"own": own, "grid": grid, "continuous": limit, "packed": packed, "num_special": 2, "vocabulary_size": 600}
    return conventions(**usual | {"length_nats": torch.tensor([1.0, 2.0]).double()} | changes)


def test_conventions_computed_by_hand():
    word, token, padded, packed, paid, byte = conventions_of()
    assert word.value.value == pytest.approx(math.exp((8 + 12) / (2 + 3)))
    assert token.value.value == pytest.approx(math.exp((6 + 9) / (4 + 6)))
    assert padded.value.value == pytest.approx(math.exp((5 + 7) / (4 + 2 + 6 + 2)))
    assert packed.value.value == pytest.approx(math.exp((30 + 20) / 20))
    assert paid.value.value == pytest.approx(math.exp((6 + 1 + 9 + 2) / (4 + 6)))
    assert byte.value.value == pytest.approx((6 + 9) / (10 + 20) / math.log(2))
    assert [row.definition.quantity for row in (word, token, padded, packed, paid, byte)] == [
        "grid", "own", "limit", "limit", "own", "own",
    ]  # fmt: skip
    assert [row.meaning.trained_for for row in (word, token, padded, packed, paid, byte)] == [
        True, True, True, False, True, True,
    ]  # fmt: skip
    # Two sentences drawn from two: the interval reaches from one of them to the other.
    assert word.value.ci95 == pytest.approx((math.exp(8 / 2), math.exp(12 / 3)))
    assert padded.value.ci95 == pytest.approx(sorted((math.exp(5 / 6), math.exp(7 / 8))))
    assert {row.meaning.scale for row in (word, token, padded, packed, paid)} == {ConventionScale.PERPLEXITY}
    assert byte.meaning.scale is ConventionScale.BITS


def test_an_unavailable_convention_has_a_reason():
    rows = conventions_of(packed=None, length_nats=None, own=estimate_of([math.inf, 9.0], [4, 6], "own"))
    by_name = {row.meaning.name: row for row in rows}
    assert "do not fill" in by_name["per token, packed"].meaning.note
    assert "length histogram" in by_name["per token, with length"].meaning.note
    assert "infinite" in by_name["per token"].meaning.note
    for name in ("per token, packed", "per token, with length", "per token", "per byte"):
        assert by_name[name].value is None
    assert by_name["per word"].value is not None


def test_conventions_of_a_run_agree_with_its_likelihoods(evaluated):
    rows = {row.meaning.name: row for row in evaluated.conventions}
    values = {name: row.value for name, row in rows.items()}
    scores, rates = evaluated.primary_scores, evaluated.primary.rates
    assert values["per token"].value == pytest.approx(rates.perplexity_per_token.value)
    assert values["per token"].ci95 == pytest.approx(rates.perplexity_per_token.ci95)
    grid = evaluated.likelihoods["grid"].rates
    assert values["per word"].value == pytest.approx(grid.perplexity_per_word.value)
    assert values["per byte"].value == pytest.approx(rates.bits_per_byte.value)
    padded = float(scores.nats.sum()) / float(scores.tokens.sum() + 2 * len(scores))
    assert values["per token, padded"].value == pytest.approx(math.exp(padded))
    assert not rows["per token, packed"].meaning.trained_for


def test_packed_sequences_are_full_and_drop_only_the_rest(engine):
    vocabulary = engine.vocabulary
    texts = ["the value is not changed .", "an object is a value", "this is the end of it"]
    framed = vocabulary.encode(texts)
    running = [token for row in framed for token in row[1:-1]]
    packed = PackedSequences(vocabulary, texts, 9)
    sequences = packed.sequences
    assert len(sequences) == len(running) // 7
    assert [token for tokens in sequences for token in tokens[1:-1]] == running[: 7 * len(sequences)]
    assert {(tokens[0], tokens[-1], len(tokens)) for tokens in sequences} == {(framed[0][0], framed[0][-1], 9)}
    batch = packed.batch([1, 0])
    assert batch.editable.sum(dim=1).tolist() == [7, 7]
    assert not batch.editable[:, [0, -1]].any()
    assert batch.tokens.tolist() == [sequences[1], sequences[0]]
    assert batch.example.tolist() == [1, 0]
    assert packed.lengths.tolist() == [9] * len(sequences)


# ---- the evaluation set --------------------------------------------------------------------------------------------


def corpus_of(path: Path, lines: list[str]):
    path.write_text("\n".join(lines), encoding="utf-8")
    return parse_corpus(str(path), Split.ALL, cleaning=AS_IT_IS)


def test_sentences_keep_their_numbers_in_subsets(engine, tmp_path):
    lines = [f"the value {'of the value ' * (number % 5)}is not changed ." for number in range(40)]
    corpus = corpus_of(tmp_path / "a.txt", lines)
    everything = read_evaluation_set(corpus, "a", engine.vocabulary, 46)
    assert everything.numbers == tuple(range(40))
    lengths = [len(row) - 2 for row in engine.vocabulary.encode(lines)]
    room = sorted(lengths)[20]
    short = read_evaluation_set(corpus, "a", engine.vocabulary, room)
    assert short.numbers == tuple(number for number in range(40) if lengths[number] <= room)
    assert 0 < short.record.num_overlong == 40 - len(short.numbers)
    assert short.scored == tuple(lines[number] for number in short.numbers)
    some, fewer = (read_evaluation_set(corpus, "a", engine.vocabulary, 46, number).numbers for number in (20, 10))
    assert (len(some), len(fewer)) == (20, 10)
    assert set(fewer) < set(some)
    assert some != tuple(range(20))
    assert list(some) == sorted(some)
    assert short.texts == everything.texts  # references are all sentences, also those that are not scored


def test_skipped_lines_are_noted(engine, tmp_path):
    lines = ["the value is changed .", "the value is not changed .", "the value is new ."]
    assert read_evaluation_set(corpus_of(tmp_path / "a.txt", lines), "a", engine.vocabulary, 46).notes == ()
    corpus = corpus_of(tmp_path / "b.txt", [*lines, "a long line " * 10_000])
    [note] = read_evaluation_set(corpus, "b", engine.vocabulary, 46).notes
    assert note.startswith("text: 3 kept; 1 skipped: 1 over the character limit (first at ")


def test_samples_are_never_scored_against_the_training_text(tmp_path, run):
    own = tmp_path / "own.txt"
    other = tmp_path / "other.txt"
    for path in (own, other):
        path.write_text("\n".join(f"{path.name} sentence {number}" for number in range(500)))
    trained = Trained(DataConfig(str(own)))
    assert default_split(str(own), trained) is Split.VALIDATION
    assert default_split(str(other), trained) is Split.ALL
    assert default_split(str(own), Trained(DataConfig("gone.txt"))) is Split.ALL
    assert default_split("pydoc", Trained(DataConfig("pydoc"))) is Split.VALIDATION
    assert default_split("pydoc", trained) is Split.ALL
    shard = tmp_path / "lm1b" / "heldout-monolingual.tokenized.shuffled" / "news.en.heldout-00000-of-00050"
    shard.parent.mkdir(parents=True)
    shard.write_text("a sentence\n")
    assert default_split(f"lm1b:{tmp_path / 'lm1b'}", trained) is Split.TEST


@pytest.mark.slow
def test_training_text_is_noted(engine, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("\n".join(f"the value {number} is not changed ." for number in range(900)))

    def notes(split: Split, trained: DataConfig) -> tuple[str, ...]:
        corpus = parse_corpus(str(path), split)
        return read_evaluation_set(corpus, "own", engine.vocabulary, 46, None, Trained(trained)).notes

    assert "trained on" in notes(Split.ALL, DataConfig(str(path)))[0]
    assert "trained on" in notes(Split.VALIDATION, DataConfig(str(path), validation="other.txt"))[0]
    assert not notes(Split.VALIDATION, DataConfig(str(path)))
    assert not notes(Split.ALL, DataConfig("pydoc"))
    assert "is unknown whether" in notes(Split.ALL, DataConfig("gone.txt"))[0]
    (tmp_path / "torn.txt.xz").write_bytes(b"\0" * 100)
    assert "is unknown whether" in notes(Split.ALL, DataConfig(str(tmp_path / "torn.txt.xz")))[0]
    assert "is unknown whether" in notes(Split.ALL, DataConfig("hf:somewhere"))[0]
    assert not notes(Split.VALIDATION, DataConfig("gone.txt"))  # had it been trained on them, these were held out


@pytest.mark.slow
def test_a_copy_of_the_training_text_is_recognized(run, tmp_path, capsys, monkeypatch):
    lines = "".join(f"the value {number} is not changed in the class .\n" for number in range(400))
    Path(tmp_path / "own.txt").write_text(lines)
    with lzma.open(tmp_path / "copy.txt.xz", "wt") as copy:
        copy.write(lines)
    (tmp_path / "other.txt").write_text(lines.replace("class", "module"))
    monkeypatch.chdir(tmp_path)
    trained = ["--data=own.txt", "--output=run", "--cache=cache", *QUICK, *SMALL]
    main(["train", *trained])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    few = ["--sentences=2", "--samples=2", "--length=4", "--steps=2", "--max-draws=2", "--overwrite"]

    def noted(*arguments: str) -> tuple[str, str, list[str]]:
        capsys.readouterr()
        main(["evaluate", f"--model={tmp_path / 'run'}", "--json", *few, *arguments])
        printed = capsys.readouterr()
        report = json.loads(printed.out)
        return report["data"]["split"], printed.err, [note for note in report["notes"] if "trained" in note]

    assert noted(f"--data={tmp_path / 'copy.txt.xz'}") == ("validation", "", [])
    split, warned, notes = noted(f"--data={tmp_path / 'copy.txt.xz'}", "--split=all")
    assert (split, len(notes)) == ("all", 1)
    assert "was trained on" in notes[0]
    assert warned == f"note: {notes[0]}\n"
    assert noted(f"--data={tmp_path / 'other.txt'}") == ("all", "", [])
    about = tmp_path / "run" / "model" / "diffusionbert.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"training_text": None}))
    split, warned, notes = noted(f"--data={tmp_path / 'copy.txt.xz'}")
    assert (split, len(notes)) == ("all", 1)
    assert "is unknown whether" in notes[0]
    assert warned == f"note: {notes[0]}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": (30, 10)}, "30-10"),
        ({"length": (0, 10)}, "0-10"),
        ({"length": (10, 99)}, "99"),
        ({"sampling": requested("refinement")}, "refinement"),
        ({"sampling": requested(block=0)}, "block"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_before_scoring(engine, evaluation_set, monkeypatch, changes, message):
    def scored(*_, **__):
        raise AssertionError("a likelihood was computed")

    monkeypatch.setattr("diffusionbert.evaluation.evaluate.estimate_nats", scored)
    with pytest.raises(ValueError, match=message):
        evaluate(engine, evaluation_set, quick(**changes))


def test_a_plain_cased_model_reads_upper_case(tmp_path, capsys):
    lines = [f"The King saw {word} in Paris ." for word in ("a river", "the sea", "two red houses")]
    data = tmp_path / "cased.txt"
    data.write_text("\n".join(lines))
    uncased = tmp_path / "uncased"
    shutil.copytree(plain_bert(), uncased)
    tokenizer = json.loads((uncased / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = True
    (uncased / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((uncased / "tokenizer_config.json").read_text())
    (uncased / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": True}))
    for folder, expected in ((plain_bert(), lines), (uncased, [line.lower() for line in lines])):
        few = ["--samples=2", "--length=4", "--steps=2", "--max-draws=2", "--json"]
        main(["evaluate", f"--model={folder}", f"--data={data}", *few])
        report = json.loads(capsys.readouterr().out)
        assert report["data"]["sha256"] == sha256_of(expected)
        assert any("is unknown whether" in note for note in report["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "kinds"),
    [
        (DiscreteTimeConfig(CORPUS, 16), {"grid": "bound", "continuous": "bound"}),
        (DiscreteTimeConfig(SENTENCE, 16, Quantity.PAPER), {"grid": "pseudo"}),
        (DiscreteTimeConfig(Linear(), 16, uniform_noise=True), {"grid": "bound"}),
        (ContinuousTimeConfig(CORPUS), {"continuous": "bound"}),
        (MaskedLMConfig(), {"continuous": "bound"}),
    ],
    ids=str,
)
def test_every_kind_of_model_is_evaluated_completely(run, tmp_path, objective, kinds):
    """The same weights under another objective."""
    folder = tmp_path / "model"
    shutil.copytree(run / "model", folder)
    about = json.loads((folder / "diffusionbert.json").read_text())
    about["config"] |= {"objective": to_json(objective)}
    (folder / "diffusionbert.json").write_text(json.dumps(about))
    other = load_engine(folder, "cpu")
    evaluation_set = read_evaluation_set(HELD_OUT, "pydoc", other.vocabulary, 46, 3)
    found = evaluate(other, evaluation_set, quick(samples=2, conventions=True))
    assert {name: summary.kind.value for name, summary in found.likelihoods.items()} == kinds
    assert found.primary.kind.value == next(iter(kinds.values()))
    assert all(summary.rates.nats_per_token.value > 0 for summary in found.likelihoods.values())
    assert {row.kind.value for row in found.conventions} == {*kinds.values()}
    quantities = {summary.protocol.definition.quantity for summary in found.likelihoods.values()}
    assert quantities == {"paper" if "pseudo" in kinds.values() else "strict"}


def test_progress_adds_up_to_the_total(engine, evaluation_set):
    seen: dict[str, tuple[int, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        seen[what] = done, total

    evaluate(engine, evaluation_set, quick(conventions=True), progress=progress)
    assert seen["samples"] == (6, 6)
    assert seen["likelihood, grid"] == seen["likelihood, continuous"] == (12, 12)
    assert all(0 < done <= total for done, total in seen.values())


def test_the_interval_of_a_mean_contains_it():
    values = PerSample(np.linspace(0, 1, 50))
    low, high = mean_with_interval(values).ci95
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * np.std(values.values) / math.sqrt(50), rel=0.1)
    assert mean_with_interval(PerSample(np.full(9, 0.25))) == PointEstimate(0.25, (0.25, 0.25))


def change(folder: Path, key: str, value: object) -> None:
    report = json.loads((folder / "evaluation.json").read_text())
    (folder / "evaluation.json").write_text(json.dumps(report | {key: value}))


def lose(folder: Path, name: str) -> None:
    tensors = load_tensors(folder / "scores.safetensors")
    save_tensors({key: value for key, value in tensors.items() if key != name}, folder / "scores.safetensors")


def without(folder: Path, *keys: str) -> None:
    """Takes a key out of a report."""
    report = inner = json.loads((folder / "evaluation.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    (folder / "evaluation.json").write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "evaluation.json").unlink(), "no evaluation"),
        (lambda folder: (folder / "evaluation.json").write_text('{"format": 99}'), "has the format 99"),
        (lambda folder: (folder / "evaluation.json").write_text("{"), "not valid JSON"),
        (lambda folder: without(folder, "data"), "damaged .*json: .*lacks the field 'data'"),
        (lambda folder: without(folder, "data", "corpus_sha256"), "damaged .*json.data: .*'corpus_sha256'"),
        (lambda folder: without(folder, "likelihoods", "grid", "protocol"), "json.likelihoods.grid: .*'protocol'"),
        (lambda folder: change(folder, "seed", "x"), "json.seed must be a whole number, got 'x'"),
        (lambda folder: change(folder, "generation", 1), "json.generation must be an object"),
        (lambda folder: change(folder, "bleu4", 1), "unknown field 'bleu4'"),
        (lambda folder: lose(folder, "nats.grid"), "scores.safetensors: no tensor 'nats.grid'"),
        (lambda folder: (folder / "scores.safetensors").write_bytes(b"no"), "damaged"),
        (lambda folder: (folder / "scores.safetensors").unlink(), "damaged"),
        (lambda folder: (folder / "samples.txt").unlink(), "damaged"),
    ],
)
def test_a_damaged_evaluation_gives_a_one_line_error(engine, evaluation_set, tmp_path, damage, message):
    evaluate(engine, evaluation_set, quick()).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        EvaluationResult.load(tmp_path)
    assert "\n" not in str(caught.value)


# ---- one likelihood at a time ---------------------------------------------------------------------------------------


def test_without_samples_only_likelihoods_are_computed(engine, evaluation_set, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusionbert.evaluation.evaluate.generate", None)
    found = evaluate(engine, evaluation_set, quick(samples=0))
    assert found.generation is None
    assert [*found.likelihoods] == [CONTINUOUS, GRID]
    found.save(tmp_path)
    again = EvaluationResult.load(tmp_path)
    assert again.to_json() == found.to_json()
    assert "BLEU" not in found.table()
    with pytest.raises(ValueError, match="neither samples nor likelihoods"):
        quick(samples=0, scored=False)


def test_a_judge_without_samples_is_refused(run):
    with pytest.raises(ValueError, match="need samples"):
        db.evaluate(run, "pydoc", samples=0, judge="gpt2")


@pytest.mark.parametrize("name", [CONTINUOUS, GRID])
def test_one_quantity_is_computed_alone(engine, evaluation_set, name):
    plan = quick(samples=0)
    everything, one = (
        evaluate(engine, evaluation_set, plan),
        evaluate(engine, evaluation_set, replace(plan, quantity=name)),
    )
    assert [*one.likelihoods] == [name]
    assert one.scores[name].nats.equal(everything.scores[name].nats)


@pytest.mark.parametrize("order", [*Order, RandomOrders(4)], ids=lambda order: order.value)
def test_a_quantity_may_be_an_order_of_unmasking(engine, evaluation_set, order):
    """The same nats as `score` gives them."""
    found = evaluate(engine, evaluation_set, quick(samples=0, quantity=order.value))
    [own] = found.likelihoods.values()
    assert (own.kind, own.protocol.num_draws) == (Likelihood.EXACT, 1)
    scored = score(engine, evaluation_set.scored, ScoreSettings(order=order))
    assert found.scores[order.value].nats.tolist() == pytest.approx([one.nats for one in scored], rel=1e-5)
    number = order.number if isinstance(order, RandomOrders) else 1
    assert [one.protocol.num_draws for one in scored] == [number * one.num_tokens for one in scored]


@pytest.mark.parametrize(("number", "note"), [(0, None), (1, "1 sentence is"), (1200, "1,200 sentences are")])
def test_sentences_that_are_not_scored_are_counted(engine, evaluation_set, number, note):
    some = replace(evaluation_set, record=replace(evaluation_set.record, num_overlong=number))
    found = evaluate(engine, some, quick(samples=0, quantity=CONTINUOUS)).notes
    expected = [] if note is None else [f"{note} too long for the model and not scored"]
    assert [one for one in found if "not scored" in one] == expected


def test_an_unknown_quantity_is_refused_with_those_there_are(engine, evaluation_set):
    with pytest.raises(
        ValueError, match="got 'exact'; it has: continuous, grid, left-to-right, confidence, entropy, random-K"
    ):
        evaluate(engine, evaluation_set, quick(quantity="exact"))


def test_models_share_their_noise_if_requested(engine, evaluation_set):
    """A spindle of strength 0 is the linear schedule: only noise can tell the two apart."""
    spindle, objective = copy(engine), DiscreteTimeConfig(Spindle(0.0), num_steps=engine.config.objective.num_steps)
    spindle.config = replace(engine.config, objective=objective)
    for shared_noise in (True, False):
        plan = quick(samples=0, shared_noise=shared_noise, budget=EstimationBudget(0.5, 8, strata=2))
        first, second = (evaluate(one, evaluation_set, plan) for one in (engine, spindle))
        for name in (GRID, CONTINUOUS):
            is_same = torch.allclose(first.scores[name].nats, second.scores[name].nats, rtol=1e-5)
            assert is_same is shared_noise
        if shared_noise:
            protocol = first.likelihoods[GRID].protocol
            assert protocol.definition.estimator is Estimator.STRATIFIED_TIMES
            assert (protocol.num_draws, protocol.precision) == (8, None)


def test_the_model_is_described_with_its_tokens_and_epochs(run, evaluated):
    model = evaluated.model
    size = sum(number * count for number, count in enumerate(load_engine(run, "cpu").length_histogram.tolist()))
    assert model.epochs == pytest.approx(model.tokens_seen / size)
    assert (model.pretraining_tokens, model.optimizer, model.start) == (0, "adamw", "scratch")
