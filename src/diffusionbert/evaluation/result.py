"""The result of an evaluation: one type from `evaluate` to JSON, `compare` and tables.

    evaluation.json        everything but arrays and texts (docs/formats.md); also printed by `evaluate --json`
    scores.safetensors     per sentence: number, tokens, words, bytes, nats and their variance over draws;
                           per sample: BLEU-4 and self-BLEU-4
    samples.txt            the samples of BLEU-4, then as many of self-BLEU-4, one per line

`EvaluationResult.save` writes this folder, and `EvaluationResult.load` reads it back without loss; it also opens
folders of format 1. The figures are computed in `evaluate`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from diffusionbert.evaluation.conventions import Convention
from diffusionbert.evaluation.dataset import EvaluationSetRecord
from diffusionbert.evaluation.judges import Judgment, Mauve
from diffusionbert.evaluation.metrics import (
    ORDER,
    Floats,
    PairedBleu,
    PerSample,
    distinct_n,
    repetition,
    token_entropy,
    without_underflow,
)
from diffusionbert.likelihood.intervals import percentile_interval, resampled_sums
from diffusionbert.likelihood.scores import LikelihoodRates, LikelihoodSummary, PointEstimate, Scores
from diffusionbert.storage.files import CodeVersion, load_tensors, read_json, write_bytes, write_json
from diffusionbert.storage.limits import read_text
from diffusionbert.storage.reader import FLOATS, INTEGERS, TensorRule, require_stored, stored_tensors
from diffusionbert.storage.schema import Component, from_json, to_json
from diffusionbert.training.log import ModelDescription

FORMAT = 2
"""Increment this when the files or their meaning change."""
REPORT, SCORES, SAMPLES = "evaluation.json", "scores.safetensors", "samples.txt"


@dataclass(frozen=True)
class Weights:
    """Hashes that identify a model's weights, as `sha256sum` gives them."""

    sha256: str | None = None
    """The hash of the list of all files."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file."""

    @classmethod
    def of(cls, folder: Path) -> Weights:
        """Hashes the weights of a model folder."""
        files = {path.name: _sha256(path) for path in sorted(folder.glob("*.safetensors"))}
        together = "".join(f"{digest}  {name}\n" for name, digest in files.items())
        return cls(hashlib.sha256(together.encode()).hexdigest(), files) if files else cls()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class SamplingRecord:
    """The settings that reproduce the samples."""

    sampler: Component
    steps: int
    temperature: float
    top_k: int | None
    top_p: float | None
    block: int | None
    length: int | tuple[int, int] | None
    """The number of tokens per sample, or a range; None draws lengths from the training corpus."""
    number: int
    """The number of samples in each of the two sets."""
    seed: int


@final
@dataclass(frozen=True)
class TextMetrics:
    """Figures of a set of texts; words are separated by whitespace."""

    number: int
    bleu4: PointEstimate
    """The mean over texts, each against the whole corpus (a real sentence against the rest of it)."""
    self_bleu4: PointEstimate
    """The mean over a second set of as many samples (for real sentences, the same set), each against the rest of it."""
    distinct: tuple[float | None, ...]
    """Distinct 1-, 2-, 3- and 4-grams as fractions of all; None if no text is long enough."""
    repeated_4grams: float
    """The fraction of 4-grams that occur earlier in the same text."""
    longest_run: float
    """The mean length of the longest run of one word."""
    entropy_pooled: float
    """The entropy of word frequencies over all texts, in nats."""
    entropy_per_text: float
    """The mean entropy of each text's word frequencies, in nats."""
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
            repeated.fraction.mean,
            repeated.longest_run.mean,
            entropy.pooled,
            entropy.within.mean,
            sum(lengths) / len(lengths),
        )


@final
@dataclass(frozen=True)
class Speed:
    """The cost of sampling, including the warm-up of the first call."""

    seconds_per_sample: float
    tokens_per_second: float
    calls_per_sample: float
    """The number of network calls per sample."""
    device: str
    batch: int
    """The number of samples generated at once."""


@final
@dataclass(frozen=True)
class AnswerMetrics:
    """Texts generated from sources, each against its own target; words are separated by whitespace, in lower case."""

    number: int
    num_candidates: int
    """The number of candidates per source; the answer is the one that agrees most with the others (minimum Bayes
    risk)."""
    length_given: bool
    """Whether answers were given the number of tokens of their target."""
    bleu4: PointEstimate
    """Corpus BLEU-4: n-grams are pooled over all answers (Papineni et al. 2002)."""
    exact_match: PointEstimate
    """The fraction of answers that equal their target, word for word."""
    copied_bleu4: float
    """BLEU-4 of copying the source as the answer."""

    @classmethod
    def of(
        cls,
        answers: Sequence[str],
        targets: Sequence[str],
        sources: Sequence[str],
        *,
        num_candidates: int,
        length_given: bool,
        seed: int = 0,
    ) -> AnswerMetrics:
        """Computes the figures of answers."""
        counts = PairedBleu.of(answers, targets).arrays
        resampled = PairedBleu.value(resampled_sums(counts, seed))
        same = [one.split() == other.split() for one, other in zip(answers, targets, strict=True)]
        return cls(
            len(answers),
            num_candidates,
            length_given,
            PointEstimate(_bleu_of(counts), percentile_interval(resampled)),
            mean_with_interval(PerSample(np.array(same, np.float64)), seed),
            _bleu_of(PairedBleu.of(sources, targets).arrays),
        )


def _bleu_of(counts: Sequence[Floats]) -> float:
    return float(PairedBleu.value([np.array([each.sum()]) for each in counts])[0])


@final
@dataclass(frozen=True)
class Generation:
    """Everything measured on generated text."""

    sampling: SamplingRecord
    samples: TextMetrics
    real: TextMetrics
    """The same figures for real sentences."""
    speed: Speed
    judge: Judgment | None = None
    mauve: Mauve | None = None
    answers: AnswerMetrics | None = None
    """The figures of answers, for models trained on pairs, whose samples are answers to sources."""


_NO_VALUES = PerSample(np.zeros(0))


@final
@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Everything measured for a model on an evaluation set."""

    name: str
    """The name under which the model was loaded."""
    model: ModelDescription
    weights: Weights
    code: CodeVersion
    data: EvaluationSetRecord
    seed: int
    """The seed of the evaluation."""
    likelihoods: dict[str, LikelihoodSummary]
    """The likelihoods by name, the model's own first; empty if it has none."""
    generation: Generation | None
    """The figures of generated text; None if nothing was generated."""
    conventions: tuple[Convention, ...] | None = None
    """The likelihood in the conventions of the literature; None if they were not requested."""
    notes: tuple[str, ...] = ()

    scores: dict[str, Scores] = field(default_factory=dict, repr=False)
    """The nats of each sentence, by the names of `likelihoods`."""
    bleu4: PerSample = field(default=_NO_VALUES, repr=False)
    """The BLEU-4 of each sample."""
    self_bleu4: PerSample = field(default=_NO_VALUES, repr=False)
    """The self-BLEU-4 of each sample of the second set."""
    samples: tuple[str, ...] = field(default=(), repr=False)
    """The samples for BLEU-4 and everything else except self-BLEU-4, one line each."""
    more_samples: tuple[str, ...] = field(default=(), repr=False)
    """As many samples again, for self-BLEU-4."""

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
        """The figures, and how they were obtained, as text."""
        from diffusionbert.evaluation.tables import result_table

        return result_table(self)

    def to_json(self) -> dict[str, object]:
        """Everything but arrays and texts, as plain JSON values."""
        return {"format": FORMAT} | {name: to_json(getattr(self, name)) for name in _RECORDED}

    def save(self, folder: Path) -> None:
        """Writes the folder of the result; each file appears complete or not at all, `evaluation.json` last."""
        tensors = {"bleu4": torch.tensor(self.bleu4.values), "self_bleu4": torch.tensor(self.self_bleu4.values)}
        for name, scores in self.scores.items():
            counts = {"example": scores.example, "tokens": scores.tokens, "words": scores.words, "bytes": scores.bytes}
            tensors |= {key: count for key, count in counts.items() if count is not None}
            tensors |= {f"nats.{name}": scores.nats, f"draw_variance.{name}": scores.draw_variance}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT).unlink(missing_ok=True)  # an earlier evaluation's, which other scores would contradict
        write_bytes(folder / SCORES, save_safetensors(tensors))
        write_bytes(folder / SAMPLES, "".join(f"{text}\n" for text in (*self.samples, *self.more_samples)).encode())
        write_json(folder / REPORT, self.to_json())

    @classmethod
    def load(cls, folder: str | Path) -> EvaluationResult:
        """Reads the folder of a result, or a run folder with one in it."""
        folder = locate(Path(folder))
        where, plain = str(folder / REPORT), read_json(folder / REPORT)
        version = plain.get("format") if isinstance(plain, dict) else None
        if version not in (1, FORMAT):
            raise ValueError(f"{where!r} has the format {version!r}, but {FORMAT} or 1 is expected; evaluate again")
        try:
            record = from_format_1(plain) if version == 1 else {key: plain[key] for key in plain if key != "format"}
            if unknown := sorted(record.keys() - _RECORDED):
                raise ValueError(f"{where}: unknown field {unknown[0]!r}")
            return from_json(record, cls, where)._with_arrays(folder)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the evaluation in {str(folder)!r} is damaged ({error}); evaluate again") from None

    def _with_arrays(self, folder: Path) -> EvaluationResult:
        stored = stored_tensors(folder / SCORES)
        number = stored["example"].shape[0] if "example" in stored and stored["example"].shape else None
        per_sentence = dict.fromkeys(("example", "tokens", "words", "bytes"), (number, INTEGERS))
        per_sentence |= {name: (number, FLOATS) for name in stored if name.startswith(("nats.", "draw_variance."))}
        per_sample = dict.fromkeys(("bleu4", "self_bleu4"), (None, FLOATS))
        # Values may be infinite, such as the bound of a sentence that the model excludes.
        require_stored(
            folder / SCORES,
            {name: each for name, each in stored.items() if each.size or name in per_sentence},
            {
                name: TensorRule((extent,), dtypes, is_required=False)
                for name, (extent, dtypes) in (per_sentence | per_sample).items()
            },
        )
        tensors = load_tensors(folder / SCORES)
        try:
            scores = {name: _scores(name, summary, tensors) for name, summary in self.likelihoods.items()}
            bleu = [
                PerSample(without_underflow(tensors[name].numpy().astype(np.float64)))
                for name in ("bleu4", "self_bleu4")
            ]
        except KeyError as error:
            raise ValueError(f"{folder / SCORES}: no tensor {error}") from None
        lines = tuple(read_text(folder / SAMPLES).splitlines())
        number = 0 if self.generation is None else self.generation.sampling.number
        recorded = {name: (one.num_sentences, one.num_tokens) for name, one in self.likelihoods.items()}
        stored_sizes = {name: (len(one), int(one.tokens.sum())) for name, one in scores.items()}
        if stored_sizes != recorded or (number and {number} != {len(one.values) for one in bleu}):
            raise ValueError(f"{SCORES} and {REPORT} are of different evaluations")
        samples, more = lines[:number], lines[number : 2 * number]
        return replace(self, scores=scores, bleu4=bleu[0], self_bleu4=bleu[1], samples=samples, more_samples=more)


_ARRAYS = {"scores", "bleu4", "self_bleu4", "samples", "more_samples"}
_RECORDED = {each.name: None for each in fields(EvaluationResult) if each.name not in _ARRAYS}


def _scores(name: str, summary: LikelihoodSummary, tensors: Mapping[str, Tensor]) -> Scores:
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
    """A mean with its 95 % interval, by bootstrap over samples as if they were independent."""
    [sums] = resampled_sums([values.values], seed)
    return PointEstimate(values.mean, percentile_interval(sums / len(values.values)))


def locate(folder: Path) -> Path:
    """The folder of an evaluation: this one, or the one in a run directory."""
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


# ---- format 1 -------------------------------------------------------------------------------------------------------
#
# Converts evaluations of format 1, in which a string described the quantity, to plain JSON values of format 2; what was
# not recorded is null.


def from_format_1(old: Any) -> dict[str, object]:
    """The same evaluation in format 2."""
    sampling, likelihoods = old["sampling"], old["likelihoods"]
    settings = {"threshold": sampling["threshold"]} if sampling["threshold"] is not None else {}
    if sampling["algorithm"].startswith("remasking"):
        settings["remasking"] = sampling["remasking"]
    kept = "steps", "temperature", "top_k", "top_p", "block", "number", "seed"
    return {
        "name": old["model"],
        "model": {},
        "code": {"version": next((one["protocol"]["version"] for one in likelihoods.values()), "unknown")},
        "seed": sampling["seed"],
        "likelihoods": {name: _likelihood(one) for name, one in likelihoods.items()},
        "generation": {
            "sampling": {
                "sampler": {"name": sampling["algorithm"], "settings": settings},
                "length": None if sampling["length"] == "corpus" else sampling["length"],
                **{key: sampling[key] for key in kept},
            },
            "samples": _text_metrics(old, old["ci95"], sampling["number"]),
            "real": _text_metrics(old["real"], {}, old["real"]["number"]),
            **{key: old[key] for key in ("speed", "judge", "mauve")},
        },
        "conventions": None if old["conventions"] is None else [_convention(one) for one in old["conventions"]],
        **{key: old[key] for key in ("weights", "data", "notes")},
    }


def _likelihood(old: Any) -> dict[str, object]:
    protocol, rates = old["protocol"], [each.name for each in fields(LikelihoodRates)]
    same = ["data", "weights", "special_tokens", "packed", "num_draws", "strata", "seed", "precision", "arithmetic"]
    return {
        "kind": old["likelihood"],
        "rates": {name: _measurement(old[name], old["ci95"][name]) for name in rates},
        "protocol": {
            "definition": _definition(protocol["steps"], old["likelihood"]),
            "length": "given" if protocol["length"] == "given" else "modelled",
            "interval": "sentences and draws",
            **{name: protocol[name] for name in (*same, "version")},
        },
        "standard_error": old["standard_error_nats_per_token"],
        "limited_by": old["limited_by"],
        **{name: old[name] for name in ("num_sentences", "num_tokens", "num_words", "num_bytes", "num_infinite")},
    }


def _definition(steps: str, kind: str) -> dict[str, object]:
    """The definition of a likelihood, from a description such as "512 steps, Spindle(strength=0.3, …)"."""
    if steps == "one token after another":
        return {"quantity": "nll", "estimator": "left to right"}
    if steps == "each token given all others":
        return {"quantity": "pseudo-likelihood", "estimator": steps}
    number, _, rest = steps.partition(", ")
    steps = number.removesuffix(" steps")
    time = {"steps": int(steps) if steps.isdigit() else None}
    found: dict[str, object] = {"quantity": "paper" if kind == "pseudo" else "strict", "time": time}
    if rest == "estimated in any order":
        return found | {"estimator": "order-agnostic"}
    if rest == "learned rates":
        return found | {"schedule": {"name": "learned"}}
    pairs = re.findall(r"(\w+)=(?:<[^>]*'(\w+)'>|([\d.e-]+))", rest)
    settings = {name: word or float(value) for name, word, value in pairs}
    return found | {"schedule": {"name": rest.partition("(")[0].lower(), "settings": settings}}


def _measurement(value: float | None, interval: Any) -> dict[str, object] | None:
    """A value with its interval. In format 1, infinity was null, and a unit that was not counted had no interval."""
    if interval is None:
        return None
    return {"value": "inf" if value is None else value, "ci95": ["inf" if end is None else end for end in interval]}


def _text_metrics(old: Any, intervals: Any, number: int) -> dict[str, object]:
    return {
        **{name: {"value": old[name], "ci95": intervals.get(name)} for name in ("bleu4", "self_bleu4")},
        "number": number,
        "distinct": [old[f"distinct_{n}"] for n in range(1, 5)],
        "repeated_4grams": old["repetition"]["share"],
        "longest_run": old["repetition"]["longest_run"],
        "entropy_pooled": old["token_entropy"]["pooled"],
        "entropy_per_text": old["token_entropy"]["per_sample"],
        "words_per_text": old["words_per_text"],
    }


def _convention(old: Any) -> dict[str, object]:
    words = {name: old[name] for name in ("name", "papers", "quotient", "note", "trained_for")}
    return {
        "meaning": words | {"scale": old["unit"]},
        "kind": old["likelihood"],
        "definition": _definition(old["steps"], old["likelihood"]),
        "value": _measurement(old["value"], old["ci95"]),
    }
