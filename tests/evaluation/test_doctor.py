"""The doctor: planted faults are found by their codes, and healthy text has no findings."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from backbones import MASK, NUM_SPECIAL, backbone_of, tokenizer_allowed
from drawing import drawing, requested
from shared import shared
from tiny_models import plain_roberta, run_of

from diffusionbert.cli.doctor import Doctor
from diffusionbert.data.corpus import parse_corpus
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Purpose
from diffusionbert.diffusion.schedules import Cosine, Linear, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper, draw
from diffusionbert.evaluation.doctor import Severity, diagnose
from diffusionbert.evaluation.symptoms import Case, Reference, encode, examine, limits_of, measure, unmask_times
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.generate import generate
from diffusionbert.inference.tasks import Task
from diffusionbert.model import Model
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.samplers.ancestral import Ancestral, GridSampler, after_step
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.storage.schema import to_json
from diffusionbert.training.model_folder import BUNDLED

FLAT = tuple((position + 1) / 20 for position in range(20))
SIZE = 2000


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """Real sentences: the English documentation of Python."""
    found = [text.lower() for text in parse_corpus("pydoc")]
    random.Random(0).shuffle(found)
    return found


@pytest.fixture(scope="module")
def vocabulary(sentences) -> Vocabulary:
    return Vocabulary.load(shared("pydoc-vocabulary", lambda output: train_wordpiece(sentences, SIZE).save(output)))


@pytest.fixture(scope="module")
def healthy(vocabulary, sentences) -> Case:
    """64 real sentences as samples, with the other sentences as reference."""
    rest = encode(vocabulary, sentences[64:])
    stored = Reference.of(rest, vocabulary.size)
    texts = tuple(sentences[:64])
    return Case(
        vocabulary,
        texts,
        stored=stored,
        corpus=rest,
        generated=encode(vocabulary, texts),
        unmask_times=(FLAT,) * 64,
        sampling=requested(top_k=30),
        network_nats=4.0,
        unigram_nats=6.0,
    )


def codes(case: Case) -> list[str]:
    return [finding.code for finding in diagnose(case).findings]


def text_case(healthy: Case, texts: list[str]) -> Case:
    """Samples from a file, whose sampling settings are unknown."""
    return replace(healthy, texts=tuple(texts), generated=(), unmask_times=(), sampling=None)


def test_real_text_has_no_findings(healthy):
    assert codes(healthy) == []
    assert codes(text_case(healthy, list(healthy.texts))) == []


def test_a_case_needs_only_a_vocabulary_and_samples(vocabulary, sentences):
    assert codes(Case(vocabulary, tuple(sentences[:64]))) == []
    with pytest.raises(ValueError, match="there are no samples; give a file of samples, or generate at least one"):
        Case(vocabulary, ())


# ---- unmasking times ------------------------------------------------------------------------------------------------


def test_the_last_unmasking_of_each_position_counts():
    states = [
        (1.0, [True, True, True, False, True]),
        (0.7, [False, True, True, False, False]),
        (0.4, [True, False, True, False, True]),  # positions 0 and 4 are remasked
        (0.1, [False, False, True, False, True]),  # positions 2 and 4 stay masked, position 3 never was
    ]
    assert unmask_times(states) == pytest.approx((0.9, 0.6))


def test_a_step_counts_in_the_tenth_that_it_ends_in(healthy):
    steps = tuple((step + 1) / 10 for step in range(10))
    case = replace(healthy, unmask_times=(steps, steps, (1.0,)))  # a sample of one position is ignored
    assert measure(case).unmask_histogram == pytest.approx((0.1,) * 10)
    early = replace(healthy, unmask_times=((0.04,) * 15 + (0.95,) * 5,))
    assert measure(early).unmask_histogram == pytest.approx((0.75, 0, 0, 0, 0, 0, 0, 0, 0, 0.25))
    assert measure(replace(healthy, unmask_times=((1.0,),))).unmask_histogram is None


@dataclass(frozen=True)
class TemperatureOnThePosterior(GridSampler):
    """A faulty sampler: temperature acts on the distribution that contains "stay masked"."""

    temperature: float

    def update(self, state, answer):
        if answer is None:
            return after_step(state, state.tokens)
        log_p = state.process.reverse(state.x, answer, *state.interval)
        log_p = (log_p / self.temperature).log_softmax(-1)
        drawn = draw(log_p, state.noise.per_position(state.x, Purpose.SAMPLE)[state.targets])
        return after_step(state, state.tokens.masked_scatter(state.targets, drawn))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=["linear", "cosine"])
@pytest.mark.parametrize("is_broken", [True, False], ids=["posterior", "tokens"])
@torch.no_grad()
def test_temperature_on_the_posterior_is_diagnosed(healthy, schedule, is_broken):
    backbone = backbone_of("bert")
    network = Denoiser(backbone, TimeAgnostic(), tokenizer_allowed())
    allowed = network.allowed
    information = TokenInformation.from_counts(torch.ones(len(allowed)), allowed=allowed)
    process = Absorbing(schedule, MASK, information)
    tokens = torch.full((6, 18), NUM_SPECIAL)
    canvas = Batch.of(tokens, torch.arange(18).expand(6, -1) > 1)
    sampler = (
        drawing(TemperatureOnThePosterior(0.1), process, steps=48)
        if is_broken
        else drawing(Ancestral(), process, steps=48, warper=LogitsWarper(temperature=0.1))
    )
    states = list(sampler.sample(network, canvas, seed=0))
    assert not bool((states[-1].tokens == MASK).any())
    times = tuple(
        unmask_times((float(state.time[index]), (state.tokens[index] == MASK).tolist()) for state in states)
        for index in range(6)
    )
    due = 1 - float(schedule.survival(torch.tensor([0.1]), torch.ones(1)))
    found = diagnose(replace(healthy, unmask_times=times, expected_late=due)).findings
    assert [finding.code for finding in found] == (["unmasks-at-the-end"] if is_broken else [])
    if is_broken:
        assert "stay masked" in found[0].why
        assert found[0].severity is Severity.BROKEN
        assert found[0].evidence["last_tenth"] > 0.9


def test_unmasking_all_at_once_is_diagnosed(healthy):
    assert codes(replace(healthy, unmask_times=((0.01,) * 16 + (0.95,) * 4,) * 8)) == ["unmasks-at-once"]


def test_few_steps_have_no_tenths_but_are_too_few(healthy):
    in_one = replace(healthy, unmask_times=((1.0,) * 20,) * 8, sampling=requested(steps=1))
    assert codes(in_one) == ["too-few-steps"]
    length = measure(healthy).mean_length
    assert codes(replace(healthy, sampling=requested(steps=round(length / 2) + 1))) == []


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_repetition_is_diagnosed(healthy):
    texts = [f"{' '.join(text.split()[:3])} " * 4 for text in healthy.texts]
    assert "repetition" in codes(text_case(healthy, texts))
    runs = [f"{text} ! ! ! !" if index % 5 == 0 else text for index, text in enumerate(healthy.texts)]
    assert codes(text_case(healthy, runs)) == ["repetition"]


def test_duplicates_are_diagnosed(healthy):
    texts = [*healthy.texts[:54], *healthy.texts[:10]]
    assert codes(text_case(healthy, texts)) == ["duplicates"]
    assert codes(text_case(healthy, texts[:57])) == []


def test_low_entropy_is_diagnosed(healthy):
    rng = random.Random(0)
    words = healthy.texts[0].split() + healthy.texts[1].split()
    texts = [" ".join(rng.choices(words, k=15)) for _ in healthy.texts]
    counts_alone = replace(healthy, corpus=())
    found = {finding.code: finding.evidence for finding in diagnose(text_case(counts_alone, texts)).findings}
    assert set(found["low-entropy"]) == {"entropy", "expected"}
    assert "rare-words" not in found


def test_the_expected_entropy_grows_with_the_number_of_tokens():
    even = Reference(torch.ones(1000, dtype=torch.long), None)
    assert even.entropy(50) == pytest.approx(math.log(50), abs=0.1)
    assert even.entropy(100_000) == pytest.approx(math.log(1000), abs=0.01)


def test_few_distinct_bigrams_are_diagnosed_if_a_corpus_is_given(healthy, vocabulary):
    """Windows of one fixed order of words: the usual number of words, but few distinct bigrams."""
    chain = " ".join(dict.fromkeys(" ".join(healthy.texts).split())).split()
    texts = [" ".join(chain[start : start + 16]) for start in range(0, 6 * 60, 6)]
    low = diagnose(text_case(healthy, texts)).findings
    assert [finding.code for finding in low] == ["low-entropy"]
    assert set(low[0].evidence) == {"distinct_2", "expected_distinct_2"}


def test_too_frequent_and_too_rare_tokens_are_diagnosed(healthy, vocabulary):
    order = [token for token in healthy.stored.counts.argsort(descending=True).tolist() if token > 4]
    whole = [token for token in order if not vocabulary.continuation[token]]
    rng = random.Random(0)

    def drawn(tokens):
        return [vocabulary.decode(rng.choices(tokens, k=16)) for _ in range(64)]

    assert "common-words" in codes(text_case(healthy, drawn(whole[:80])))
    found = codes(text_case(healthy, drawn(whole[150:])))
    assert "rare-words" in found
    assert "low-entropy" not in found


def test_special_tokens_are_diagnosed(healthy, vocabulary):
    texts = [healthy.texts[0] + " [MASK]", *healthy.texts[1:]]
    assert "special-tokens" in codes(text_case(healthy, texts))
    left_over = ((*healthy.generated[0][:-1], vocabulary.mask_id), *healthy.generated[1:])
    found = diagnose(replace(healthy, generated=left_over))
    assert [finding.code for finding in found.findings] == ["special-tokens"]
    assert found.symptoms.special_tokens == 1


def test_unknown_tokens_are_diagnosed(healthy):
    texts = [f"{text} 漢 字" if index % 2 else text for index, text in enumerate(healthy.texts)]
    assert codes(text_case(healthy, texts)) == ["unknown-tokens"]


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_unusual_lengths_are_diagnosed_unless_the_user_set_them(healthy):
    short = replace(text_case(healthy, [" ".join(text.split()[:4]) for text in healthy.texts]))
    assert "length-mismatch" in codes(short)
    assert "length-mismatch" not in codes(replace(short, has_given_length=True))


def test_lengths_are_compared_by_the_wasserstein_distance(healthy):
    stored = replace(healthy.stored, length_histogram=torch.tensor([0, 0, 1, 0, 0, 0, 1]))
    symptoms = measure(replace(healthy, texts=("a b c d", "a b c d"), generated=(), corpus=(), stored=stored))
    assert symptoms.mean_length == symptoms.reference_length == 4
    assert symptoms.length_distance == 2


def test_one_token_samples_are_diagnosed(healthy):
    texts = ["a" if index % 4 == 0 else text for index, text in enumerate(healthy.texts)]
    found = codes(text_case(healthy, texts))
    assert "one-token-samples" in found


def test_few_samples_are_noted(healthy):
    few = diagnose(text_case(healthy, list(healthy.texts[:3])))
    assert [(finding.code, finding.severity) for finding in few.findings] == [("few-samples", Severity.NOTE)]


# ---- the network and its tokenizer ----------------------------------------------------------------------------------


def test_an_untrained_network_needs_as_many_nats_as_the_unigram_model(healthy, vocabulary):
    assert codes(replace(healthy, network_nats=6.1)) == ["untrained-network"]
    assert codes(replace(healthy, network_nats=5.0)) == []
    unknown = replace(healthy, stored=None, unigram_nats=None, network_nats=7.0)
    assert codes(unknown) == ["untrained-network"]  # log 2000 is 7.6
    assert codes(replace(unknown, network_nats=6.0)) == []


def permuted(reference: Reference, seed: int = 0) -> Reference:
    counts = reference.counts.clone()
    order = torch.randperm(len(counts) - 5, generator=torch.Generator().manual_seed(seed))
    counts[5:] = counts[5:][order]
    return Reference(counts, reference.length_histogram)


def test_a_small_corpus_is_not_compared_with_the_stored_counts(healthy):
    assert measure(healthy).corpus_distance < 0.01
    assert measure(replace(healthy, corpus=healthy.corpus[:40])).corpus_distance is None


@pytest.mark.parametrize("has_corpus", [True, False], ids=["corpus", "no corpus"])
def test_permuted_ids_are_diagnosed_as_a_wrong_tokenizer(healthy, has_corpus):
    case = replace(healthy, stored=permuted(healthy.stored), network_nats=9.0)
    case = case if has_corpus else replace(case, corpus=())
    found = diagnose(case).findings
    assert found[0].code == "wrong-tokenizer"
    assert ("corpus_distance" in found[0].evidence) is has_corpus
    assert found[0].evidence["brevity"] > 0.9
    assert "untrained-network" not in [finding.code for finding in found]  # it may be well trained


def test_another_wordpiece_of_the_same_size_is_diagnosed_as_a_wrong_tokenizer(healthy, sentences):
    """It is trained on the same words spelled backwards; the stored counts are those of the correct one."""
    other = train_wordpiece([text[::-1] for text in sentences], SIZE)
    assert other.size == healthy.vocabulary.size
    texts = tuple(other.decode(tokens) for tokens in healthy.generated)
    generated = replace(healthy, vocabulary=other, texts=texts, corpus=())
    assert "round_trip" in diagnose(generated).findings[0].evidence
    corpus = replace(healthy, vocabulary=other, generated=(), corpus=encode(other, sentences[64:]))
    assert "corpus_distance" in diagnose(corpus).findings[0].evidence
    assert {diagnose(case).findings[0].code for case in (generated, corpus)} == {"wrong-tokenizer"}


def test_random_tokens_are_not_diagnosed_as_a_wrong_tokenizer(healthy, vocabulary):
    rng = random.Random(0)
    inner = vocabulary.continuation.nonzero()[:, 0].tolist()
    generated = tuple(tuple(rng.choices(inner, k=20)) for _ in range(64))
    texts = tuple(vocabulary.decode(tokens) for tokens in generated)
    assert encode(vocabulary, texts) != generated  # random word pieces are encoded differently after decoding
    found = codes(replace(healthy, texts=texts, generated=generated, network_nats=7.5))
    assert "wrong-tokenizer" not in found
    assert found[0] == "untrained-network"
    assert "rare-words" in found


def test_a_barely_trained_network_does_not_have_a_wrong_tokenizer(healthy, vocabulary):
    """It draws tokens without regard to each other, and such pieces are encoded differently after decoding."""
    fractions, rng = healthy.stored.fractions, random.Random(0)
    inner, frequent = vocabulary.continuation.nonzero()[:, 0].tolist(), healthy.stored.frequent.tolist()
    generated = tuple(tuple(rng.choice(one) for one in (frequent, inner) * 10) for _ in range(64))
    texts = tuple(vocabulary.decode(tokens) for tokens in generated)
    unigram = -float(np.log(fractions[[token for tokens in generated for token in tokens]] + 1e-6).mean())
    barely = replace(healthy, texts=texts, generated=generated, network_nats=6.0, generated_nats=unigram)
    assert codes(barely)[0] == "untrained-network"
    assert "wrong-tokenizer" not in codes(barely)
    assert codes(replace(barely, generated_nats=0.5 * unigram))[0] == "wrong-tokenizer"  # it knows which tokens follow


def test_the_limits_of_the_bundled_model_are_named(tmp_path):
    card = (BUNDLED / "README.md").read_text(encoding="utf-8")
    found = limits_of(BUNDLED)
    assert len(found) > 1
    assert all(limit.split()[0] in card for limit in found)
    assert limits_of(tmp_path) == ()


# ---- remedies and JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "flag"),
    [
        (requested(top_k=1), "--top-k 30"),
        (requested(temperature=0.2), "--temperature 1"),
        (requested(top_p=0.2), "--top-p 0.5"),
        (requested("confidence"), "--sampler exact"),
        (requested(), "training"),
        (None, "--temperature 1 --top-p 0.5 --sampler exact"),
    ],
)
def test_the_remedy_depends_on_the_sampling_settings(healthy, sampling, flag):
    texts = tuple("the . the . the . the ." for _ in healthy.texts)
    case = replace(healthy, texts=texts, generated=(), unmask_times=(), sampling=sampling)
    remedies = {finding.code: finding.remedy for finding in diagnose(case).findings}
    assert {"repetition", "duplicates", "low-entropy"} <= set(remedies)
    assert flag in remedies["low-entropy"]


def test_findings_are_sorted_by_severity_and_json_is_complete(healthy):
    case = replace(healthy, texts=healthy.texts[:2] * 2, generated=(), network_nats=9.0)
    plain = to_json(diagnose(case))
    assert [finding["severity"] for finding in plain["findings"]] == ["broken", "poor", "note"]
    assert [finding["code"] for finding in plain["findings"]] == ["untrained-network", "duplicates", "few-samples"]
    assert set(plain["findings"][0]) == {"code", "severity", "what", "why", "remedy", "evidence"}
    assert json.loads(json.dumps(plain)) == json.loads(json.dumps(plain, allow_nan=False))


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled() -> Engine:
    return load_engine(device="cpu")


@pytest.mark.slow
def test_the_bundled_model_is_healthy(bundled):
    case = examine(bundled, Task(8, 16), requested(steps=64, top_k=30))
    diagnosis = diagnose(case)
    assert diagnosis.findings == ()
    assert diagnosis.symptoms.network_nats < 0.85 * diagnosis.symptoms.unigram_nats
    assert diagnosis.symptoms.network_texts == "8 generated texts, 4 draws each"
    assert diagnosis.symptoms.round_trip > 0.97
    assert len(case.texts) == 8
    assert all(len(tokens) == 16 for tokens in case.generated)
    assert max(diagnosis.symptoms.unmask_histogram) < 0.25


@pytest.mark.slow
def test_a_top_k_of_one_is_diagnosed(bundled):
    found = diagnose(examine(bundled, Task(10, 16), requested("confidence", steps=64, top_k=1))).findings
    assert {"low-entropy", "repetition"} & {finding.code for finding in found}
    assert all("--top-k 30" in finding.remedy for finding in found)


@pytest.mark.slow
def test_an_untrained_network_is_diagnosed(sentences):
    engine = load_engine(device="cpu")
    for parameter in engine.network.backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    for corpus in ([], sorted(sentences, key=len)[:8]):
        found = diagnose(examine(engine, Task(1, 12), requested(steps=12, top_k=1), corpus=corpus)).findings
        assert found[0].code == "untrained-network"
        texts = "8 sentences of the corpus" if corpus else "8 generated texts"
        assert f"nats per token ({texts}, 4 draws each), no fewer than" in found[0].what


@pytest.fixture(scope="module")
def permuted_model(tmp_path_factory) -> Path:
    """The bundled model with permuted ids in its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    for file in BUNDLED.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    plain = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    words = [word for word, index in plain["model"]["vocab"].items() if index > 4]
    ids = [plain["model"]["vocab"][word] for word in words]
    random.Random(0).shuffle(ids)
    plain["model"]["vocab"].update(zip(words, ids, strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(plain), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_wrong_tokenizer_is_diagnosed(permuted_model, sentences):
    engine = load_engine(permuted_model, "cpu")
    for corpus in ([], sentences[:200]):
        found = diagnose(examine(engine, Task(1, 12), requested(steps=12), corpus=corpus)).findings
        assert found[0].code == "wrong-tokenizer"
        assert "untrained-network" not in [finding.code for finding in found]


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> None:
    tyro.cli(Doctor, args=list(arguments)).run()


@pytest.fixture
def quick(monkeypatch, bundled) -> None:
    monkeypatch.setattr(Doctor, "loaded", lambda self: Model(bundled))


@pytest.fixture
def corpus_file(tmp_path, sentences) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(sorted(sentences[:200], key=len)[:120]), encoding="utf-8")
    return file


@pytest.mark.slow
def test_the_command_finds_no_problems_in_a_file_of_real_sentences(quick, tmp_path, sentences, corpus_file, capsys):
    file = tmp_path / "samples.txt"
    file.write_text("\n".join(sorted(sentences[200:300], key=len)[:60]), encoding="utf-8")
    run(f"--samples={file}", f"--data={corpus_file}")
    shown = capsys.readouterr().out
    assert "no problems found" in shown
    assert "samples.txt" in shown
    assert all(limit in shown for limit in ("limits of this model", *limits_of(BUNDLED)))


@pytest.mark.slow
def test_the_command_prints_problem_cause_and_remedy(quick, tmp_path, capsys):
    file = tmp_path / "samples.txt"
    file.write_text("the . the . the . the .\n" * 20, encoding="utf-8")
    run(f"--samples={file}")
    shown = capsys.readouterr().out
    assert "network, nats per token (8 generated texts, 4 draws each)" in shown
    assert "repetition (poor)" in shown
    assert "what" in shown
    assert "try  --temperature 1 --top-p 0.5" in shown


@pytest.mark.slow
def test_the_command_prints_only_json_on_stdout(quick, capsys):
    run("--json", "--num-return-sequences=2", "--length=10", "--steps=12", "--top-k=5", "--seed=3")
    plain = json.loads(capsys.readouterr().out)
    assert (plain["model"], plain["healthy"]) == ("bundled", False)
    assert [finding["code"] for finding in plain["findings"]] == ["few-samples"]
    assert len(plain["symptoms"]["unmask_histogram"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples=/nowhere"], "cannot be read"),
        (["--num-return-sequences=0"], "`num_return_sequences` must be between 1 and 100000, got 0"),
        (["--sampler=magic"], "unknown sampler"),
        (["--data=/nowhere"], "nowhere"),
    ],
)
def test_invalid_options_give_a_one_line_error(quick, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_tokens_of_a_byte_level_model_are_read_by_id():
    """Its spelling does not lead back to them: read again, `Ġking` would be unknown or special."""
    engine = load_engine(plain_roberta())
    case = examine(engine, Task(2, 6, seed=0), requested(steps=6))
    own = next(iter(generate(engine, Task(1, 6, seed=0), requested(steps=6)))).text
    assert engine.vocabulary.decode(case.generated[0]) == own
    assert measure(case).special_tokens == 0


@pytest.mark.slow
def test_the_default_sampler_is_resolved():
    case = examine(load_engine(run_of("mask-predict"), "cpu"), Task(2, 6), requested(steps=4))
    assert case.sampling is not None
    assert case.sampling.sampler == MaskPredict()
