"""The result of an evaluation: one typed value from `evaluate` to JSON, to `compare` and to tables.

    evaluation.json        everything but arrays and texts (docs/formats.md); what `evaluate --json` prints
    scores.safetensors     per sentence: number, tokens, words, bytes, nats and their variance over draws;
                           per sample: BLEU-4 and self-BLEU-4
    samples.txt            the samples of BLEU-4, then as many of self-BLEU-4, one per line

`EvaluationResult.save` writes this folder and `EvaluationResult.load` reads it back without loss; folders of format 1
open, too. How the figures are computed is in `evaluate`.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from diffusionbert.evaluation.conventions import Convention
from diffusionbert.evaluation.dataset import EvaluationSetRecord
from diffusionbert.evaluation.judges import Judgement, Mauve
from diffusionbert.evaluation.metrics import ORDER, PerSample, distinct_n, repetition, token_entropy
from diffusionbert.likelihood.intervals import percentile_interval, resampled_sums
from diffusionbert.likelihood.scores import LikelihoodSummary, PointEstimate, Scores
from diffusionbert.storage.files import CodeVersion, load_tensors, read_json, save_tensors, write_json
from diffusionbert.storage.schema import Component, from_json, to_json
from diffusionbert.training.log import ModelDescription

FORMAT = 2
"""Increased when the files or their meaning change."""
REPORT, SCORES, SAMPLES = "evaluation.json", "scores.safetensors", "samples.txt"


@dataclass(frozen=True)
class Weights:
    """The weights of a model by their hashes."""

    sha256: str | None = None
    """Of all files together."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file."""


@dataclass(frozen=True)
class SamplingRecord:
    """The settings from which the same samples follow again."""

    sampler: Component
    steps: int
    temperature: float
    top_k: int | None
    top_p: float | None
    block: int | None
    length: int | tuple[int, int] | None
    """Tokens of a sample, or a range; None draws lengths from the training corpus."""
    number: int
    """Samples of each of the two sets."""
    seed: int


@dataclass(frozen=True)
class TextMetrics:
    """Figures of a set of texts; words are separated by whitespace."""

    number: int
    bleu4: PointEstimate
    """Mean over texts, each against the whole corpus (a real sentence: against the rest of it)."""
    self_bleu4: PointEstimate
    """Mean over another set of as many samples (of real sentences, the same set), each against the rest of the set."""
    distinct: tuple[float | None, ...]
    """Distinct 1-, 2-, 3- and 4-grams, as shares of all; None where no text is long enough."""
    repeated_4grams: float
    """Share of 4-grams that occur earlier in the same text."""
    longest_run: float
    """Mean length of the longest run of one word."""
    entropy_pooled: float
    """Entropy of word frequencies over all texts, in nats."""
    entropy_per_text: float
    """Mean entropy of the word frequencies of each text, in nats."""
    words_per_text: float

    @classmethod
    def of(cls, texts: list[str], bleu4: PerSample, self_bleu4: PerSample) -> TextMetrics:
        """Computes the figures of texts."""
        lengths = [len(text.split()) for text in texts]
        repeated, entropy = repetition(texts), token_entropy(texts)
        return cls(
            len(texts),
            mean_with_interval(bleu4),
            mean_with_interval(self_bleu4),
            tuple(distinct_n(texts, n) if max(lengths) >= n else None for n in range(1, ORDER + 1)),
            repeated.share.mean,
            repeated.longest_run.mean,
            entropy.pooled,
            entropy.within.mean,
            sum(lengths) / len(lengths),
        )


@dataclass(frozen=True)
class Speed:
    """The cost of sampling, warm-up of the first call included."""

    seconds_per_sample: float
    tokens_per_second: float
    calls_per_sample: float
    """Network calls."""
    device: str
    batch: int
    """Samples generated at once."""


@dataclass(frozen=True)
class Generation:
    """What was measured on generated text."""

    sampling: SamplingRecord
    samples: TextMetrics
    real: TextMetrics
    """The same figures of real sentences."""
    speed: Speed
    judge: Judgement | None = None
    mauve: Mauve | None = None


def _no_values() -> PerSample:
    return PerSample(np.zeros(0))


@final
@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Everything that was measured of a model on an evaluation set."""

    name: str
    """What the model was loaded as."""
    model: ModelDescription
    weights: Weights
    code: CodeVersion
    data: EvaluationSetRecord
    seed: int
    """Of the evaluation."""
    likelihoods: dict[str, LikelihoodSummary]
    """By name, the model's own first; empty if it has none."""
    generation: Generation | None
    """None if nothing was generated."""
    conventions: tuple[Convention, ...] | None = None
    """The likelihood in the conventions of the literature; None if they were not requested."""
    notes: tuple[str, ...] = ()

    scores: dict[str, Scores] = field(default_factory=dict, repr=False)
    """The nats of each sentence, by the names of `likelihoods`."""
    bleu4: PerSample = field(default_factory=_no_values, repr=False)
    """Of each sample."""
    self_bleu4: PerSample = field(default_factory=_no_values, repr=False)
    """Of each sample of the second set."""
    samples: tuple[str, ...] = field(default=(), repr=False)
    """For BLEU-4 and everything but self-BLEU-4; each is one line."""
    more_samples: tuple[str, ...] = field(default=(), repr=False)
    """As many again, for self-BLEU-4."""

    @property
    def primary(self) -> LikelihoodSummary | None:
        """The model's own likelihood."""
        return next(iter(self.likelihoods.values()), None)

    @property
    def primary_scores(self) -> Scores | None:
        """The scores of the model's own likelihood."""
        return next(iter(self.scores.values()), None)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The figures and how they were obtained, as text."""
        from diffusionbert.evaluation.tables import result_table

        return result_table(self)

    def to_json(self) -> dict[str, object]:
        """Everything but arrays and texts, as plain JSON values."""
        return {"format": FORMAT} | {name: to_json(getattr(self, name)) for name in _RECORDED}

    def save(self, folder: Path) -> None:
        """Writes the folder of the result; each file appears complete, and `evaluation.json` last."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = [folder / f"{name}.unfinished" for name in (SCORES, SAMPLES)]
        save_tensors(self._tensors(), unfinished[0])
        texts = "".join(f"{text}\n" for text in (*self.samples, *self.more_samples))
        unfinished[1].write_text(texts, encoding="utf-8")
        for path in unfinished:
            path.replace(path.with_suffix(""))
        write_json(folder / REPORT, self.to_json())

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: torch.tensor(getattr(self, name).values) for name in ("bleu4", "self_bleu4")}
        for name, scores in self.scores.items():
            tensors |= {"example": scores.example, "tokens": scores.tokens}
            tensors |= {"words": scores.words} if scores.words is not None else {}
            tensors |= {"bytes": scores.bytes} if scores.bytes is not None else {}
            tensors |= {f"nats.{name}": scores.nats, f"draw_variance.{name}": scores.draw_variance}
        return tensors

    @classmethod
    def load(cls, folder: str | Path) -> EvaluationResult:
        """Reads the folder of a result, or a run folder with one in it."""
        folder = locate(Path(folder))
        where, plain = str(folder / REPORT), read_json(folder / REPORT)
        version = plain.get("format") if isinstance(plain, dict) else None
        if version == 1:
            plain = from_format_1(plain, where)
        elif version != FORMAT:
            raise ValueError(f"{where!r} has the format {version!r}, but {FORMAT} or 1 is expected; evaluate again")
        record = {key: value for key, value in plain.items() if key != "format"}
        try:
            if unknown := sorted(record.keys() - _RECORDED):
                raise ValueError(f"{where}: unknown field {unknown[0]!r}")
            return from_json(record, cls, where)._with_arrays(folder)
        except ValueError as error:
            raise ValueError(f"the evaluation in {str(folder)!r} is damaged ({error}); evaluate again") from None

    def _with_arrays(self, folder: Path) -> EvaluationResult:
        tensors = load_tensors(folder / SCORES)
        try:
            scores = {name: _scores(name, summary, tensors) for name, summary in self.likelihoods.items()}
            bleu = [PerSample(tensors[name].numpy().astype(np.float64)) for name in ("bleu4", "self_bleu4")]
        except KeyError as error:
            raise ValueError(f"{folder / SCORES}: no tensor {error}") from None
        try:
            lines = (folder / SAMPLES).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{folder / SAMPLES}: {error.strerror}") from None
        number = 0 if self.generation is None else self.generation.sampling.number
        first, second = tuple(lines[:number]), tuple(lines[number : 2 * number])
        return replace(self, scores=scores, bleu4=bleu[0], self_bleu4=bleu[1], samples=first, more_samples=second)


_ARRAYS = {"scores", "bleu4", "self_bleu4", "samples", "more_samples"}
_RECORDED = {each.name: None for each in fields(EvaluationResult) if each.name not in _ARRAYS}


def _scores(name: str, summary: LikelihoodSummary, tensors: dict[str, Tensor]) -> Scores:
    return Scores(
        summary.kind,
        tensors["example"],
        tensors[f"nats.{name}"],
        tensors[f"draw_variance.{name}"],
        summary.protocol.num_draws // summary.protocol.strata,
        tensors["tokens"],
        tensors.get("words"),
        tensors.get("bytes"),
    )


def mean_with_interval(values: PerSample, seed: int = 0) -> PointEstimate:
    """A mean with its 95 % interval, by bootstrap over samples, as if they were independent."""
    [sums] = resampled_sums([values.values], seed)
    return PointEstimate(values.mean, percentile_interval(sums / len(values.values)))


# ---- files ----------------------------------------------------------------------------------------------------------


def locate(folder: Path) -> Path:
    """The folder of an evaluation: this one, or that of a run folder."""
    inner = folder / "evaluation"
    folder = inner if (inner / REPORT).exists() else folder
    if not (folder / REPORT).exists():
        raise ValueError(
            f"{str(folder)!r} contains no evaluation; create one: diffusionbert evaluate --output {folder} …"
        )
    return folder


def require_free(folder: Path) -> None:
    """Raises ValueError if a folder holds an evaluation, or a file that one would overwrite."""
    taken = next((name for name in (REPORT, SCORES, SAMPLES) if (folder / name).exists()), None)
    if taken is not None:
        raise ValueError(f"{str(folder)!r} contains {taken!r}; give --overwrite, or choose another --output")


def hashes_in(model: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in a model folder, as `sha256sum` gives it."""
    return {path.name: file_hash(path) for path in sorted(model.glob("*.safetensors"))}


def file_hash(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- format 1 -------------------------------------------------------------------------------------------------------
#
# Evaluations of format 1, in which a string said which number a likelihood is, converted to format 2.


_RATES = (
    "nats_per_sentence",
    "nats_per_token",
    "perplexity_per_token",
    "nats_per_word",
    "perplexity_per_word",
    "bits_per_byte",
)
_PROTOCOL = "data", "weights", "special_tokens", "packed", "num_draws", "strata", "seed", "precision", "arithmetic"
_PAIR = re.compile(r"(\w+)=(?:<[^:>]*: '([^']*)'>|'([^']*)'|([\w.+-]+))")


def from_format_1(plain: Any, where: str) -> Any:
    """The same evaluation as plain JSON values of format 2; what was not recorded is null."""
    try:
        sampling, likelihoods = plain["sampling"], plain["likelihoods"]
        return {
            "name": plain["model"],
            "model": {},
            "weights": plain["weights"],
            "code": {"version": next((one["protocol"]["version"] for one in likelihoods.values()), "unknown")},
            "data": plain["data"],
            "seed": sampling["seed"],
            "likelihoods": {name: _likelihood(one) for name, one in likelihoods.items()},
            "generation": {
                "sampling": _sampling(sampling),
                "samples": _metrics(plain, plain["ci95"], sampling["number"]),
                "real": _metrics(plain["real"], {}, plain["real"]["number"]),
                "speed": plain["speed"],
                "judge": plain["judge"],
                "mauve": plain["mauve"],
            },
            "conventions": None if plain["conventions"] is None else [_convention(one) for one in plain["conventions"]],
            "notes": plain["notes"],
        }
    except (KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"the evaluation {where!r} is damaged ({error!r}); evaluate again") from None


def _likelihood(plain: Any) -> Any:
    protocol = plain["protocol"]
    is_given = protocol["interval"].startswith("95 %, over draws alone")
    return {
        "kind": plain["likelihood"],
        "rates": {name: _measurement(plain[name], plain["ci95"][name]) for name in _RATES},
        "protocol": {name: protocol[name] for name in (*_PROTOCOL, "version")}
        | {
            "definition": _definition(protocol["steps"], plain["likelihood"]),
            "length": "given" if protocol["length"] == "given" else "modelled",
            "interval": "draws" if is_given else "sentences and draws",
        },
        "standard_error": plain["standard_error_nats_per_token"],
        "limited_by": plain["limited_by"],
        **{name: plain[name] for name in ("num_sentences", "num_tokens", "num_words", "num_bytes", "num_infinite")},
    }


def _definition(steps: str, kind: str) -> Any:
    """Which number a likelihood is, from its description."""
    if steps == "one token after another":
        return {"quantity": "nll", "estimator": "left to right"}
    if steps == "each token given all others":
        return {"quantity": "pseudo-likelihood", "estimator": "each token given all others"}
    head, _, rest = steps.partition(", ")
    number = head.removesuffix(" steps")
    definition = {
        "quantity": "paper" if kind == "pseudo" else "strict",
        "time": {"steps": int(number) if number.isdigit() else None},
    }
    if rest == "estimated in any order":
        return definition | {"estimator": "order-agnostic"}
    if rest == "learned rates":
        return definition | {"schedule": {"name": "learned"}}
    settings = {
        name: ast.literal_eval(text) if text else word or quoted for name, word, quoted, text in _PAIR.findall(rest)
    }
    return definition | {"schedule": {"name": rest.partition("(")[0].lower(), "settings": settings}}


def _measurement(value: float | None, interval: Any) -> Any:
    """Infinity was null; a unit that was not counted had no interval."""
    if interval is None:
        return None
    return {"value": "inf" if value is None else value, "ci95": ["inf" if end is None else end for end in interval]}


def _metrics(plain: Any, intervals: Any, number: int) -> Any:
    bleu = {name: {"value": plain[name], "ci95": intervals.get(name)} for name in ("bleu4", "self_bleu4")}
    return bleu | {
        "number": number,
        "distinct": [plain[f"distinct_{n}"] for n in range(1, 5)],
        "repeated_4grams": plain["repetition"]["share"],
        "longest_run": plain["repetition"]["longest_run"],
        "entropy_pooled": plain["token_entropy"]["pooled"],
        "entropy_per_text": plain["token_entropy"]["per_sample"],
        "words_per_text": plain["words_per_text"],
    }


def _sampling(plain: Any) -> Any:
    name = plain["algorithm"]
    knobs = {"threshold": plain["threshold"]} if plain["threshold"] is not None else {}
    knobs |= {"remasking": plain["remasking"]} if name.startswith("remasking") else {}
    kept = "steps", "temperature", "top_k", "top_p", "block", "number", "seed"
    length = None if plain["length"] == "corpus" else plain["length"]
    return {key: plain[key] for key in kept} | {"sampler": {"name": name, "settings": knobs}, "length": length}


def _convention(plain: Any) -> Any:
    words = {name: plain[name] for name in ("name", "papers", "quotient", "note", "trained_for")}
    return {
        "meaning": words | {"scale": plain["unit"]},
        "kind": plain["likelihood"],
        "definition": _definition(plain["steps"], plain["likelihood"]),
        "value": _measurement(plain["value"], plain["ci95"]),
    }
