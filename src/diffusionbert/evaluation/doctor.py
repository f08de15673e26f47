"""Diagnoses generated text: what is wrong, the likely cause and the fix. Each finding has a stable code.

Each threshold lies between values measured on healthy and on deliberately broken text of the bundled model; both are
given next to it. Healthy: 64 samples with 1,800 tokens in total at top-k 30 or top-p 0.5, compared with the training
corpus, and real sentences of other corpora. Broken: temperature 0.3 and 2, top-k 1, confidence order, 4 steps, random
parameters, permuted ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import final

import numpy as np

from diffusionbert.evaluation.symptoms import MIN_SAMPLES, MIN_TOKENS, TENTHS, TOP, Case, Symptoms, measure
from diffusionbert.samplers import SamplingRequest, format_sampler
from diffusionbert.samplers.confidence import Confidence
from diffusionbert.samplers.mask_predict import MaskPredict


class Severity(Enum):
    """The severity of a finding, most severe first."""

    BROKEN = "broken"
    """The output is not what the model would generate; fix this first."""
    POOR = "poor"
    """The text is worse than the model can generate."""
    NOTE = "note"
    """Information only."""


@final
@dataclass(frozen=True)
class Finding:
    """A problem, its likely cause and its remedy."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    evidence: dict[str, float | int]


@final
@dataclass(frozen=True)
class Diagnosis:
    """All findings, most severe first, and the measurements behind them."""

    findings: tuple[Finding, ...]
    symptoms: Symptoms
    limits: tuple[str, ...] = ()
    """What the model cannot do at any setting, from its model card."""


def diagnose(case: Case) -> Diagnosis:
    """Measures samples and a model, and reports what is wrong, most severe first."""
    symptoms, severities = measure(case), list(Severity)
    checks = _network, _sampling, _diversity, _frequencies, _lengths, _unknown_and_few
    found = [finding for check in checks for finding in check(case, symptoms)]
    ordered = sorted(found, key=lambda finding: severities.index(finding.severity))
    return Diagnosis(tuple(ordered), symptoms, case.limits)


def _broken(code: str, what: str, why: str, remedy: str, **evidence: float | int) -> Finding:
    return Finding(code, Severity.BROKEN, what, why, remedy, evidence)


def _poor(code: str, what: str, why: str, remedy: str, **evidence: float | int) -> Finding:
    return Finding(code, Severity.POOR, what, why, remedy, evidence)


def _network(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    evidence: dict[str, float] = {}
    # Distance from the bundled model's corpus: other kinds of text (news, LM1B, documentation) 0.13 to 0.27; another
    # WordPiece 0.61, permuted ids 0.99.
    if symptoms.corpus_distance is not None and symptoms.corpus_distance > 0.45:
        evidence["corpus_distance"] = symptoms.corpus_distance
    # Correct vocabularies of 600 to 16,000 tokens: 0.68 to 0.82; permuted ones 0.96 to 1.1.
    if symptoms.brevity is not None and symptoms.brevity > 0.9:
        evidence["brevity"] = symptoms.brevity
    # The correct vocabulary: 0.99 to 1.0; another WordPiece 0.86 and 0.93.
    if symptoms.round_trip is not None and symptoms.round_trip < 0.95:
        evidence["round_trip"] = symptoms.round_trip
    if evidence:
        yield _broken(
            "wrong-tokenizer",
            "the tokenizer does not match the network: its token frequencies differ from the model's token counts, "
            "frequent tokens are not short, or generated text is tokenized differently",
            "the tokenizer or its ids differ from those used in training, or --data is another kind of text",
            "restore the tokenizer files that the model was trained with; give --data similar to the training text",
            **evidence,
        )
    nats, unigram = symptoms.network_nats, symptoms.unigram_nats
    if nats is None or evidence:
        return  # with a wrong tokenizer every network looks untrained
    # The bundled model: 4.3 nats per token, against 7.2 of the unigram model; random parameters: log V = 9.7.
    bar = 0.95 * unigram if unigram is not None else 0.9 * float(np.log(int(case.vocabulary.allowed.sum())))
    if nats > bar:
        of = "" if symptoms.network_texts is None else f" ({symptoms.network_texts})"
        rival = "a uniform guess" if unigram is None else "token frequencies alone"
        yield _broken(
            "untrained-network",
            f"the network needs {nats:.1f} nats per token{of}, no fewer than {rival}",
            "its parameters are random or hardly trained, or a checkpoint was loaded under the wrong names",
            "train it (diffusionbert train), or for longer; give the run directory of the trained model",
            network_nats=nats,
            bar=bar,
        )


def _sampling(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    mask = case.vocabulary.tokenizer.mask_token
    if symptoms.special_tokens:
        yield _broken(
            "special-tokens",
            f"the texts contain {symptoms.special_tokens} special tokens such as {mask}",
            "sampling stopped before all positions were unmasked, or special ids were not excluded or not removed",
            "sample to the end of the time grid and exclude special ids, as --sampler exact does",
            special_tokens=symptoms.special_tokens,
        )
    histogram, steps = symptoms.unmask_histogram, None if case.sampling is None else case.sampling.config.steps
    if histogram is not None and (steps is None or steps >= TENTHS):
        # The bundled model: 9 to 13 % in each tenth; temperature 0.1 on the posterior: over 90 % in the last.
        if histogram[-1] > case.expected_late + 0.4:
            yield _broken(
                "unmasks-at-the-end",
                f"{histogram[-1]:.0%} of the positions are unmasked in the last tenth of the steps, where "
                f"{case.expected_late:.0%} are expected: all at once, independently of each other",
                "temperature, top-k or top-p act on the distribution that includes 'stay masked', and sharpen it",
                "apply them to p(x0 | x_t), before the reverse step, as --sampler exact or ancestral do",
                last_tenth=histogram[-1],
                expected=case.expected_late,
            )
        if histogram[0] > 0.5:
            yield _poor(
                "unmasks-at-once",
                f"{histogram[0]:.0%} of the positions are unmasked in the first tenth of the steps, independently",
                "all positions pass the threshold of --sampler confidence, or the sampler unmasks all of them at once",
                "raise the threshold or leave it out; --sampler exact",
                first_tenth=histogram[0],
            )
    # 4 steps for 22 tokens: "she was part of of was-on ' a-is-a '"; at half a step per token, pairs are independent.
    if steps is not None and 2 * steps < symptoms.mean_length:
        yield _poor(
            "too-few-steps",
            f"{steps} steps generate {symptoms.mean_length:.0f} tokens: several per step, regardless of each other",
            "the tokens of one step are drawn independently",
            f"--steps {4 * round(symptoms.mean_length)}, which costs at most one network call per token",
            steps=steps,
            mean_length=symptoms.mean_length,
        )


def _diversity(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    why, remedy = _sharpened(case.sampling)
    # Real sentences: 0.003; the bundled model: 0.000; temperature 0.3: 0.02; confidence order and top-k 1: 0.06.
    if symptoms.repetition > 0.015 or symptoms.long_runs > 0.1:
        what = (
            f"the samples repeat themselves: {symptoms.repetition:.1%} of the 4-grams occur earlier in the same "
            f"sample, {symptoms.long_runs:.0%} of the samples have a token four times in a row"
        )
        yield _poor("repetition", what, why, remedy, repetition=symptoms.repetition, long_runs=symptoms.long_runs)
    if symptoms.duplicates > 0.1:
        yield _poor(
            "duplicates",
            f"{symptoms.duplicates:.0%} of the samples are duplicates",
            f"{why}; or several samples share a seed",
            f"{remedy}; another --seed per run",
            duplicates=symptoms.duplicates,
        )
    entropy, expected = symptoms.entropy, symptoms.reference_entropy
    # Relative to the reference: real sentences 0.97 to 1.02, the bundled model 0.86 to 0.93; 4 steps 0.80, temperature
    # 0.3 0.73, top-k 1 0.71, confidence order 0.69.
    evidence = {} if expected is None or entropy > 0.8 * expected else {"entropy": entropy, "expected": expected}
    distinct, other = symptoms.distinct_2, symptoms.reference_distinct_2
    # Relative to real sentences: the bundled model 0.85, top-k 1 0.59.
    if distinct is not None and other is not None and distinct < 0.7 * other:
        evidence |= {"distinct_2": distinct, "expected_distinct_2": other}
    if evidence and symptoms.are_enough:
        what = f"the samples use few different tokens: {entropy:.2f} nats of entropy"
        what += f", {distinct:.0%} of their bigrams are distinct" if distinct is not None else ""
        what += f"; real text of that size has {expected:.2f}" if expected is not None else ""
        what += f" and {other:.0%}" if other is not None else ""
        yield _poor("low-entropy", what, why, remedy, **evidence)


def _frequencies(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    fraction, expected = symptoms.frequent_fraction, symptoms.reference_frequent_fraction
    if fraction is None or expected is None or not symptoms.are_enough:
        return
    # The bundled model: 0.57 to 0.63, its corpus 0.46; top-k 1 0.70 to 0.74, 4 steps 0.76.
    if fraction > expected + 0.22:
        why, remedy = _sharpened(case.sampling)
        yield _poor(
            "common-words",
            f"the {TOP} most frequent tokens make up {fraction:.0%} of the samples, {expected:.0%} of the corpus",
            f"{why}; or many tokens per step, each the most likely",
            f"{remedy}; more --steps",
            frequent_fraction=fraction,
            expected=expected,
        )
    # Relative to the corpus: other corpora 0.94 or more; temperature 2 0.28, random parameters 0.03.
    if fraction < 0.6 * expected:
        yield _poor(
            "rare-words",
            f"the {TOP} most frequent tokens make up only {fraction:.0%} of the samples, {expected:.0%} of the corpus",
            "a temperature above 1 without top-k or top-p, an untrained network, or another kind of text or tokenizer",
            "--temperature 1 --top-p 0.5; compare with a corpus of the same kind as the samples (--data)",
            frequent_fraction=fraction,
            expected=expected,
        )


def _lengths(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    if case.has_given_length:
        return
    short, expected = symptoms.one_token_fraction, symptoms.reference_one_token_fraction or 0.0
    if short > expected + 0.1:
        yield _poor(
            "one-token-samples",
            f"{short:.0%} of the samples have at most one token, against {expected:.0%} of the corpus",
            "a sampler that ends texts early, lengths drawn from a corpus of fragments, or blank lines in the file",
            "--length 24, or a range such as 10-30; train on whole sentences",
            one_token_fraction=short,
            expected=expected,
        )
    distance, length = symptoms.length_distance, symptoms.reference_length
    # Other kinds of corpora: up to 0.3 of the mean length; 12 tokens instead of 27: 0.55.
    if distance is not None and length is not None and distance > 0.4 * length and symptoms.are_enough:
        yield _poor(
            "length-mismatch",
            f"the samples have {symptoms.mean_length:.0f} tokens on average, the corpus {length:.0f}",
            "lengths were set instead of drawn, or texts of the training corpus and of this corpus differ in length",
            "--length corpus draws lengths from the training corpus; otherwise train on text of these lengths",
            length_distance=distance,
            mean_length=symptoms.mean_length,
            expected=length,
        )


def _unknown_and_few(case: Case, symptoms: Symptoms) -> Iterator[Finding]:
    fraction, expected, name = (
        symptoms.unknown_fraction,
        symptoms.reference_unknown_fraction or 0.0,
        case.vocabulary.tokenizer.unk_token,
    )
    if fraction > expected + 0.02:  # the bundled model's corpus and samples: 0
        yield _poor(
            "unknown-tokens",
            f"{fraction:.0%} of the samples' tokens are {name}, {expected:.0%} of the corpus's",
            "characters that are not in the vocabulary: another alphabet, or another tokenizer",
            "use a vocabulary trained on such text (train --vocabulary)",
            unknown_fraction=fraction,
            expected=expected,
        )
    if not symptoms.are_enough:
        yield Finding(
            "few-samples",
            Severity.NOTE,
            f"{symptoms.samples} samples with {symptoms.tokens} tokens are too few to judge frequencies and lengths",
            "token frequencies have a high variance in so little text",
            f"--num-return-sequences 64, or a file of {MIN_SAMPLES} lines and {MIN_TOKENS} tokens or more",
            {"samples": symptoms.samples, "tokens": symptoms.tokens},
        )


def _sharpened(sampling: SamplingRequest | None) -> tuple[str, str]:
    """The likely cause of low diversity and its remedy, from the sampling settings if known."""
    if sampling is None:
        why = "the most likely tokens are drawn too often: a low temperature, top-k or top-p, or confidence order"
        return why, "--temperature 1 --top-p 0.5 --sampler exact"
    config, sampler = sampling.config, sampling.sampler
    if config.top_k is not None and config.top_k < 10:
        return f"top-k {config.top_k} keeps only the most likely tokens", "--top-k 30, or 0 for all tokens"
    if config.temperature < 0.7:
        return f"at temperature {config.temperature} the most likely token is drawn almost always", "--temperature 1"
    if config.top_p is not None and config.top_p < 0.5:
        return f"top-p {config.top_p} keeps few tokens", "--top-p 0.5, or 1 for all tokens"
    if isinstance(sampler, Confidence | MaskPredict):
        named = format_sampler(sampler)
        return f"the sampler {named} prefers high confidence, and so frequent tokens", "--sampler exact"
    why = "the network is undertrained, or its training corpus has little variety"
    return why, "--top-p 0.9; then more training, or a larger and more varied corpus"
