"""Everything that is said of a model on a corpus, as data; and the folder that keeps it.

    evaluation.json        what `evaluate --json` prints
    scores.safetensors     nats, draw variances, tokens, words, bytes and names by sentence; BLEU by sample
    samples.txt            the samples of BLEU-4, then as many of self-BLEU, one a line

`read_evaluation` gives back what paired comparisons need. How these figures are found is in `assessing`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from diffusionbert.assessment.conventions import Convention
from diffusionbert.assessment.judges import Judgement, Mauve
from diffusionbert.assessment.material import Material
from diffusionbert.checkpoints import load_tensors, read_json, save_tensors, write_json
from diffusionbert.likelihood.intervals import percentile_interval, resampled_sums
from diffusionbert.likelihood.scores import Estimate, Scores, rates_to_json
from diffusionbert.method import Likelihood
from diffusionbert.metrics import PerSample, Repetition, TokenEntropy
from diffusionbert.samplers import SamplingRequest, format_sampler

FORMAT = 1
"""Raised when the files or their meaning change."""
_FILES = "evaluation.json", "scores.safetensors", "samples.txt"
_READ = {
    "data": ("corpus", "split", "corpus_sha256"),
    "sampling": ("number", "length", "algorithm", "steps", "temperature", "top_k", "top_p"),
    "speed": ("device", "batch", "seconds_per_sample", "calls_per_sample"),
    "ci95": ("bleu4", "self_bleu4"),
    "token_entropy": ("per_sample",),
    "real": ("bleu4", "self_bleu4", "distinct_2", "token_entropy"),
    "weights": ("files",),
    **dict.fromkeys(("likelihoods", "bleu4", "self_bleu4", "distinct_2", "judge", "mauve", "notes"), ()),
}
"""What a comparison reads of a report: keys, and the keys within them."""
_CARD = "steps", "length", "special_tokens", "packed", "arithmetic"
"""What it reads of a likelihood's protocol."""


@dataclass(frozen=True, eq=False)
class Figures:
    """What can be said of texts by themselves and beside a corpus; words stand between white space."""

    bleu4: PerSample
    """Of each against all sentences of the corpus; of a real sentence, against all others."""
    self_bleu4: PerSample
    """Of each of another set, as large, against the rest of that set; of real sentences, of the same set."""
    distinct: tuple[float | None, ...]
    """Distinct 1-, 2-, 3- and 4-grams over all; None where no text is so long."""
    repetition: Repetition
    entropy: TokenEntropy
    words_per_text: float

    def to_json(self) -> dict[str, Any]:
        """Means as plain data."""
        return {
            "bleu4": self.bleu4.mean,
            "self_bleu4": self.self_bleu4.mean,
            **{f"distinct_{n}": share for n, share in enumerate(self.distinct, start=1)},
            "repetition": {"share": self.repetition.share.mean, "longest_run": self.repetition.longest_run.mean},
            "token_entropy": {"pooled": self.entropy.pooled, "per_sample": self.entropy.within.mean},
            "words_per_text": self.words_per_text,
        }


@dataclass(frozen=True)
class Speed:
    """What samples cost, the first call's warming up included."""

    seconds_per_sample: float
    tokens_per_second: float
    calls_per_sample: float
    """How often the network was asked about a sample."""
    device: str
    batch: int
    """Samples that were written side by side."""


@dataclass(frozen=True)
class Samples:
    """Texts that a model wrote."""

    first: tuple[str, ...]
    """For BLEU-4 and everything but self-BLEU."""
    second: tuple[str, ...]
    """As many again, for self-BLEU."""
    sampling: SamplingRequest
    length: int | tuple[int, int] | None
    """Tokens of each; None draws as the training corpus does."""
    seed: int
    speed: Speed

    def to_json(self) -> dict[str, Any]:
        """All settings, by which the same texts come again."""
        sampler, block = self.sampling.sampler, self.sampling.block
        name = None if sampler is None else format_sampler(sampler)
        plain = {"algorithm": name, **vars(self.sampling.config), "block": block}
        length = "corpus" if self.length is None else self.length
        return {**plain, "length": length, "number": len(self.first), "seed": self.seed}


@final
@dataclass(frozen=True, eq=False)
class Assessment:
    """A model on a corpus."""

    model: str
    weights: dict[str, str]
    """The hash of each file of weights."""
    weights_sha256: str | None
    material: Material
    likelihoods: dict[str, Estimate]
    """By name, the model's own first; none if it has no likelihood."""
    samples: Samples
    figures: Figures
    real: Figures
    """The same of as many real sentences."""
    judgement: Judgement | None
    mauve: Mauve | None
    conventions: tuple[Convention, ...] | None
    notes: tuple[str, ...]

    @property
    def own(self) -> Estimate | None:
        """The model's own likelihood."""
        return next(iter(self.likelihoods.values()), None)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        own = {"likelihood": Likelihood.NONE.value, **rates_to_json({})} if self.own is None else self.own.to_json()
        bleu = {"bleu4": self.figures.bleu4, "self_bleu4": self.figures.self_bleu4}
        card = own.get("protocol", {}) | {"texts": self.texts_protocol}
        return {
            "format": FORMAT,
            "model": self.model,
            **own,
            "ci95": own["ci95"] | {name: list(mean_interval(values)) for name, values in bleu.items()},
            "protocol": card,
            "primary": next(iter(self.likelihoods), None),
            "likelihoods": {name: estimate.to_json() for name, estimate in self.likelihoods.items()},
            **self.figures.to_json(),
            "real": self.real.to_json() | {"number": len(self.real.bleu4.values)},
            "judge": None if self.judgement is None else asdict(self.judgement),
            "mauve": None if self.mauve is None else asdict(self.mauve),
            "speed": asdict(self.samples.speed),
            "sampling": self.samples.to_json(),
            "data": self.material.to_json(),
            "weights": {"sha256": self.weights_sha256, "files": self.weights},
            "conventions": None if self.conventions is None else [row.to_json() for row in self.conventions],
            "notes": list(self.notes),
        }

    @property
    def texts_protocol(self) -> str:
        """How samples were compared, in words."""
        number = len(self.samples.first)
        return (
            f"BLEU-4 without smoothing, mean over {number:,} samples against all {len(self.material.texts):,} "
            f"sentences; self-BLEU-4 of {number:,} other samples, each against the rest; words between white space, "
            "lower case; sentences went through the model's tokenizer and back, as samples do; 95 % by bootstrap over "
            "samples"
        )


def mean_interval(values: PerSample, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean, by bootstrap over samples, as if they were independent."""
    [sums] = resampled_sums([values.values], seed)
    return percentile_interval(sums / len(values.values))


# ---- weights ------------------------------------------------------------------------------------------------------


def hashes_in(model: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in a model's folder, as `sha256sum` gives it."""
    return {path.name: file_hash(path) for path in sorted(model.glob("*.safetensors"))}


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, however large."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- the folder ---------------------------------------------------------------------------------------------------


def require_free(folder: Path) -> None:
    """Refuses a folder that holds an evaluation, or a file that one would overwrite."""
    taken = next((name for name in _FILES if (folder / name).exists()), None)
    if taken is not None:
        raise ValueError(f"{str(folder)!r} holds {taken!r} already; give --overwrite, or choose another --output")


def write_evaluation(folder: Path, assessment: Assessment) -> None:
    """Writes the files of an assessment; each appears whole, and `evaluation.json` last."""
    folder.mkdir(parents=True, exist_ok=True)
    report, scores, samples = (folder / name for name in _FILES)
    tensors = {
        "bleu4": torch.from_numpy(assessment.figures.bleu4.values),
        "self_bleu4": torch.from_numpy(assessment.figures.self_bleu4.values),
    }
    for name, estimate in assessment.likelihoods.items():
        found = estimate.scores
        assert found.words is not None
        assert found.bytes is not None
        tensors |= {"example": found.example, "tokens": found.tokens, "words": found.words, "bytes": found.bytes}
        tensors |= {f"nats.{name}": found.nats, f"draw_variance.{name}": found.draw_variance}
    unfinished = [path.with_name(f"{path.name}.unfinished") for path in (scores, samples)]
    save_tensors(tensors, unfinished[0])
    texts = (*assessment.samples.first, *assessment.samples.second)
    # A tokenizer may write line feeds; words, which everything here is counted in, do not change by this.
    unfinished[1].write_text("".join(f"{' '.join(text.split())}\n" for text in texts), encoding="utf-8")
    for path, final_path in zip(unfinished, (scores, samples), strict=True):
        path.replace(final_path)
    write_json(report, assessment.to_json())


@final
@dataclass(frozen=True, eq=False)
class Evaluation:
    """An assessment as its folder keeps it: what comparisons need."""

    folder: Path
    report: dict[str, Any]
    """`evaluation.json`."""
    scores: dict[str, Scores]
    """By name, the model's own first."""
    bleu4: PerSample
    self_bleu4: PerSample
    samples: tuple[str, ...]
    more_samples: tuple[str, ...]

    @property
    def primary(self) -> Scores | None:
        """The model's own likelihood."""
        return next(iter(self.scores.values()), None)


def read_evaluation(folder: Path) -> Evaluation:
    """Reads what `write_evaluation` wrote: an evaluation's folder, or a run folder with one in it."""
    inner = folder / "evaluation"
    folder = inner if (inner / _FILES[0]).exists() else folder
    if not (folder / _FILES[0]).exists():
        raise ValueError(f"{str(folder)!r} holds no evaluation; make one: diffusionbert evaluate --output {folder} …")
    report = read_json(folder / _FILES[0])
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{str(folder / _FILES[0])!r} is no evaluation of this version; evaluate anew")
    try:
        _require_keys(report)
        tensors = load_tensors(folder / _FILES[1])
        lines = (folder / _FILES[2]).read_text(encoding="utf-8").split("\n")
        number = report["sampling"]["number"]
        scores = {name: _scores(name, plain, tensors) for name, plain in report["likelihoods"].items()}
        bleu = [PerSample(tensors[name].numpy().astype(np.float64)) for name in ("bleu4", "self_bleu4")]
    except (KeyError, TypeError, OSError, ValueError) as error:
        raise ValueError(f"the evaluation in {str(folder)!r} is damaged ({error}); evaluate anew") from None
    return Evaluation(
        folder, report, scores, bleu[0], bleu[1], tuple(lines[:number]), tuple(lines[number : 2 * number])
    )


def _require_keys(report: dict[str, Any]) -> None:
    """Raises ValueError if a report lacks what is read of it."""
    missing = [key for key in _READ if key not in report]
    missing += [
        f"{key}.{inner}" for key, every in _READ.items() if key in report for inner in every if inner not in report[key]
    ]
    for name, plain in report.get("likelihoods", {}).items():
        missing += [f"likelihoods.{name}.{key}" for key in ("protocol", "ci95") if key not in plain]
        missing += [f"likelihoods.{name}.protocol.{key}" for key in _CARD if key not in plain.get("protocol", _CARD)]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing in {_FILES[0]}")


def _scores(name: str, plain: dict[str, Any], tensors: dict[str, Tensor]) -> Scores:
    card = plain["protocol"]
    return Scores(
        Likelihood(plain["likelihood"]),
        tensors["example"],
        tensors[f"nats.{name}"],
        tensors[f"draw_variance.{name}"],
        card["num_draws"] // card["strata"],
        tensors["tokens"],
        tensors["words"],
        tensors["bytes"],
    )
