"""What is wrong with generated text, why, and what mends it.

`diagnose` turns what `symptoms` measured into `Finding`s, each with a stable code, in words.

Thresholds lie between what is healthy and what was broken on purpose, both measured on the bundled model: 64 samples
of 1,800 tokens in all, top-k 30, against its training corpus; real sentences of other corpora; temperature 0.3 and 2,
top-k 1, confidence order, 4 steps, random weights, permuted ids. Both ends stand beside each threshold. Knows samplers
by their settings alone, and no concrete method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, final

import numpy as np

from diffusionbert.evaluation.symptoms import TENTHS, TOP, Case, Symptoms, measure
from diffusionbert.samplers import SamplingRequest, format_sampler
from diffusionbert.samplers.confidence import Confidence
from diffusionbert.samplers.mask_predict import MaskPredict

LEAST_TOKENS, LEAST_SAMPLES = 120, 8
"""From fewer, frequencies and lengths say nothing."""


class Severity(IntEnum):
    """How bad it is."""

    BROKEN = 0
    """What comes out is not this model's text; mend it before looking at anything else."""
    POOR = 1
    """Text, but worse than the model can do."""
    NOTE = 2
    """Worth knowing."""


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    evidence: dict[str, float | int]

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        return asdict(self) | {"severity": self.severity.name.lower()}


@final
@dataclass(frozen=True)
class Diagnosis:
    """All that was found, the most serious first, and what it rests on."""

    findings: tuple[Finding, ...]
    symptoms: Symptoms

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        findings = [finding.to_json() for finding in self.findings]
        return {"healthy": not findings, "findings": findings, "symptoms": asdict(self.symptoms)}


def diagnose(case: Case) -> Diagnosis:
    """Says what is wrong, the most serious first."""
    symptoms = measure(case)
    found = [finding for check in _CHECKS for finding in check(case, symptoms)]
    return Diagnosis(tuple(sorted(found, key=lambda finding: finding.severity)), symptoms)


def _tokenizer(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    evidence: dict[str, float | int] = {}
    # Corpora of other kinds (news, LM1B, documentation) lie at 0.13 to 0.27 from the bundled model's; another WordPiece
    # at 0.61, permuted ids at 0.99.
    if symptoms.corpus_distance is not None and symptoms.corpus_distance > 0.45:
        evidence["corpus_distance"] = symptoms.corpus_distance
    # 0.68 to 0.82 for right vocabularies of 600 to 16,000 tokens; 0.96 to 1.1 for permuted ones.
    if symptoms.brevity is not None and symptoms.brevity > 0.9:
        evidence["brevity"] = symptoms.brevity
    # 0.99 to 1.0 where the vocabulary is right; 0.86 and 0.93 with another WordPiece.
    if symptoms.round_trip is not None and symptoms.round_trip < 0.95:
        evidence["round_trip"] = symptoms.round_trip
    if evidence:
        yield Finding(
            "wrong-tokenizer",
            Severity.BROKEN,
            "the tokenizer is not the one the network was trained with: its tokens do not occur as often as the "
            "model's counts say, or do not look like it",
            "the model folder's tokenizer was replaced, or its ids were changed; or the corpus (--data) is of another "
            "language or kind than the training text",
            "put back the tokenizer files that the model was trained with; give --data of the kind it was trained on",
            evidence,
        )


def _untrained(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    nats, unigram = symptoms.network_nats, symptoms.unigram_nats
    if nats is None or any(_tokenizer(case, symptoms)):
        return  # with a wrong tokenizer every network looks untrained
    # The bundled model needs 4.3 nats where frequencies need 7.2; random weights need log V = 9.7.
    bar = 0.95 * unigram if unigram is not None else 0.9 * float(np.log(int(case.vocabulary.allowed.sum())))
    if nats > bar:
        of = "" if symptoms.network_texts is None else f" ({symptoms.network_texts})"
        yield Finding(
            "untrained-network",
            Severity.BROKEN,
            f"the network needs {nats:.1f} nats a token{of}, no fewer than "
            + ("word frequencies alone" if unigram is not None else "a blind guess"),
            "its weights are random or hardly trained, or a checkpoint was loaded into the wrong names",
            "train it (diffusionbert train), for longer if it was; give the run folder that holds the trained model",
            {"network_nats": nats, "bar": bar},
        )


def _special(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    if symptoms.special_tokens:
        yield Finding(
            "special-tokens",
            Severity.BROKEN,
            f"{symptoms.special_tokens} special tokens such as {case.vocabulary.tokenizer.mask_token} are in the texts",
            "the sampler stopped before everything was written, the network may write special ids, or the text was "
            "decoded with them",
            "sample to the end of the grid and forbid special ids, as this package's samplers do (--sampler exact)",
            {"special_tokens": symptoms.special_tokens},
        )


def _unmasking(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    histogram, sampling = symptoms.unmask_histogram, case.sampling
    if histogram is None or (sampling is not None and sampling.config.steps < TENTHS):
        return  # few steps have no tenths
    # The bundled model writes 9 to 13 % in each tenth; temperature 0.1 on the posterior, over 90 % in the last.
    if histogram[-1] > case.expected_late + 0.4:
        yield Finding(
            "reveals-at-the-end",
            Severity.BROKEN,
            f"{histogram[-1]:.0%} of the places are written in the last tenth of the steps, where "
            f"{case.expected_late:.0%} are due: all at once, none seeing the others",
            "temperature, top-k or top-p act on the distribution that contains 'stay masked': sharpened, it stays "
            "masked until it cannot",
            "shape the distribution over words, p(x0 | x_t), before it is mixed with staying, as --sampler exact or "
            "ancestral do",
            {"last_tenth": histogram[-1], "expected": case.expected_late},
        )
    if histogram[0] > 0.5:
        yield Finding(
            "reveals-at-once",
            Severity.POOR,
            f"{histogram[0]:.0%} of the places are written in the first tenth of the steps, none seeing the others",
            "a threshold of --sampler confidence that everything passes, or a sampler that unmasks all at first",
            "raise the threshold or leave it out; --sampler exact",
            {"first_tenth": histogram[0]},
        )


def _steps(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    steps = None if case.sampling is None else case.sampling.config.steps
    # 4 steps for 22 tokens: "she was part of of was-on ' a-is-a '"; at half a step a token two words a step are blind.
    if steps is not None and 2 * steps < symptoms.mean_length:
        yield Finding(
            "too-few-steps",
            Severity.POOR,
            f"{steps} steps write {symptoms.mean_length:.0f} tokens: words of one step do not see each other",
            "each step draws its words independently of each other",
            f"--steps {4 * round(symptoms.mean_length)}, which costs at most one network call a token",
            {"steps": steps, "mean_length": symptoms.mean_length},
        )


def _poverty(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    """Samples that are poor in words: repeating themselves or each other, or all of one kind."""
    why, remedy = _sharpened(case.sampling)
    # Real sentences 0.003, the bundled model 0.000; temperature 0.3 0.02, confidence order and top-k 1 0.06.
    if symptoms.repetition > 0.015 or symptoms.long_runs > 0.1:
        yield Finding(
            "repetition",
            Severity.POOR,
            f"the samples repeat themselves: {symptoms.repetition:.1%} of their 4-grams stood before in the same "
            f"sample, {symptoms.long_runs:.0%} of them have a token four times in a row",
            why,
            remedy,
            {"repetition": symptoms.repetition, "long_runs": symptoms.long_runs},
        )
    if symptoms.duplicates > 0.1:
        yield Finding(
            "duplicates",
            Severity.POOR,
            f"{symptoms.duplicates:.0%} of the samples occurred before",
            f"{why}, or one seed for several",
            f"{remedy}; another --seed for each run",
            {"duplicates": symptoms.duplicates},
        )
    if not _enough(symptoms):
        return
    entropy, expected = symptoms.entropy, symptoms.reference_entropy
    # Of what the reference has: real sentences 0.97 to 1.02, the bundled model 0.86 to 0.93; 4 steps 0.80, temperature
    # 0.3 0.73, top-k 1 0.71, confidence order 0.69.
    evidence = {} if expected is None or entropy > 0.8 * expected else {"entropy": entropy, "expected": expected}
    distinct, other = symptoms.distinct_2, symptoms.reference_distinct_2
    # The bundled model 0.85 of what real sentences have, top-k 1 0.59.
    if distinct is not None and other is not None and distinct < 0.7 * other:
        evidence |= {"distinct_2": distinct, "expected_distinct_2": other}
    if evidence:
        yield Finding(
            "low-entropy",
            Severity.POOR,
            f"the samples use few words: {entropy:.2f} nats of entropy"
            + (f", {distinct:.0%} of their word pairs are distinct" if distinct is not None else "")
            + (f"; text of that size has {expected:.2f}" if expected is not None else "")
            + (f" and {other:.0%}" if other is not None else ""),
            why,
            remedy,
            evidence,
        )


def _frequencies(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    share, expected = symptoms.frequent_share, symptoms.reference_frequent_share
    if share is None or expected is None or not _enough(symptoms):
        return
    evidence = {"frequent_share": share, "expected": expected}
    # The bundled model has 0.57 to 0.63 where its corpus has 0.46; top-k 1 0.70 to 0.74, 4 steps 0.76.
    if share > expected + 0.22:
        why, remedy = _sharpened(case.sampling)
        yield Finding(
            "common-words",
            Severity.POOR,
            f"the {TOP} commonest tokens make up {share:.0%} of the samples, {expected:.0%} of the corpus",
            f"{why}; or many words at once, each the safest",
            f"{remedy}; more --steps",
            evidence,
        )
    # Other corpora have 0.94 of it or more; temperature 2 0.28, random weights 0.03.
    if share < 0.6 * expected:
        yield Finding(
            "rare-words",
            Severity.POOR,
            f"the {TOP} commonest tokens make up only {share:.0%} of the samples, {expected:.0%} of the corpus",
            "a temperature above 1 without top-k or top-p, an untrained network, or text of another kind or tokenizer",
            "--temperature 1 --top-k 30; compare with a corpus of the samples' own kind (--data)",
            evidence,
        )


def _lengths(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    short, expected = symptoms.one_token_share, symptoms.reference_one_token_share or 0.0
    if short > expected + 0.1 and not case.length_asked:
        yield Finding(
            "one-token-samples",
            Severity.POOR,
            f"{short:.0%} of the samples have one token or none, {expected:.0%} of the corpus",
            "a sampler that ends texts at once, lengths drawn from a corpus of fragments, or blank lines in the file",
            "--length 24, or a range such as 10-30; train on whole sentences",
            {"one_token_share": short, "expected": expected},
        )
    distance, length = symptoms.length_distance, symptoms.reference_length
    # Corpora of other kinds lie up to 0.3 of the mean length apart; 12 tokens for 27 are 0.55.
    if distance is None or length is None or case.length_asked or not _enough(symptoms):
        return
    if distance > 0.4 * length:
        yield Finding(
            "length-mismatch",
            Severity.POOR,
            f"the samples have {symptoms.mean_length:.0f} tokens on average, the corpus {length:.0f}",
            "lengths that were chosen and not drawn, or a model trained on text of other lengths than the corpus",
            "--length corpus draws lengths as the training text has; else train on text of these lengths",
            {"length_distance": distance, "mean_length": symptoms.mean_length, "expected": length},
        )


def _unknown(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    share, expected = symptoms.unknown_share, symptoms.reference_unknown_share or 0.0
    if share > expected + 0.02:  # of the bundled model's corpus and samples 0
        yield Finding(
            "unknown-tokens",
            Severity.POOR,
            f"{share:.0%} of the samples' tokens are {case.vocabulary.tokenizer.unk_token}, {expected:.0%} of the "
            "corpus's",
            "characters that the vocabulary does not know: another alphabet, or another tokenizer",
            "a vocabulary that was trained on such text (train --vocabulary)",
            {"unknown_share": share, "expected": expected},
        )


def _few(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    if not _enough(symptoms):
        yield Finding(
            "few-samples",
            Severity.NOTE,
            f"{symptoms.samples} samples with {symptoms.tokens} tokens are too few to judge frequencies and lengths",
            "frequencies of so few tokens scatter",
            f"--number 64, or a file of {LEAST_SAMPLES} lines and {LEAST_TOKENS} tokens or more",
            {"samples": symptoms.samples, "tokens": symptoms.tokens},
        )


_CHECKS = (_tokenizer, _untrained, _special, _unmasking, _steps, _poverty, _frequencies, _lengths, _unknown, _few)
"""In the order of how serious they are, where severities are equal."""


def _enough(symptoms: Symptoms) -> bool:
    return symptoms.samples >= LEAST_SAMPLES and symptoms.tokens >= LEAST_TOKENS


def _sharpened(sampling: SamplingRequest | None) -> tuple[str, str]:
    """Why samples may be poor in words, and what mends it: by the settings, where they are known."""
    if sampling is None:
        return "the likeliest words win too often: a low temperature, top-k or top-p, or confidence order", (
            "--temperature 1 --top-k 30 --sampler exact"
        )
    config, sampler = sampling.config, sampling.sampler
    if config.top_k is not None and config.top_k < 10:
        return f"top-k {config.top_k} leaves the likeliest words alone", "--top-k 30, or 0 for all words"
    if config.temperature < 0.7:
        return f"temperature {config.temperature} all but takes the likeliest word", "--temperature 1"
    if config.top_p is not None and config.top_p < 0.7:
        return f"top-p {config.top_p} leaves few words", "--top-p 0.95"
    if isinstance(sampler, Confidence | MaskPredict):
        return f"the sampler {format_sampler(sampler)} goes by what is likeliest, which is common", "--sampler exact"
    return "the network has learned too little, or from text that is itself monotonous", (
        "--top-k 0; then more training, or a larger and more varied corpus"
    )
