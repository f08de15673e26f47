"""The result of an evaluation as text: figures in columns, and how they were obtained below them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from diffusionbert.evaluation.conventions import Convention, ConventionScale
from diffusionbert.evaluation.result import EvaluationResult, Generation
from diffusionbert.likelihood.scores import Length, LikelihoodRates, LikelihoodSummary, PointEstimate


def result_table(result: EvaluationResult) -> str:
    """The whole table."""
    lines = [result.name]
    for summary in result.likelihoods.values():
        lines.append(f"{summary.kind.value}, {summary.protocol.definition}")
        lines += _likelihood_lines(summary.rates)
    if result.generation is not None:
        lines += _generation_lines(result.generation)
    if result.conventions is not None:
        lines.append("in the conventions of the literature")
        for convention in result.conventions:
            lines += _convention_lines(convention)
    lines += _protocol_lines(result)
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def _columns(name: str, value: str, interval: str = "", real: str = "") -> str:
    return f"{name:<27} {value:>12}  {interval:<20} {real:>14}".rstrip()


def _likelihood_lines(rates: LikelihoodRates) -> Iterator[str]:
    for name, measured, digits in (
        ("nats per sentence", rates.nats_per_sentence, 1),
        ("nats per token", rates.nats_per_token, 3),
        ("perplexity per token", rates.perplexity_per_token, 2),
        ("perplexity per word", rates.perplexity_per_word, 1),
        ("bits per byte", rates.bits_per_byte, 3),
    ):
        if measured is not None:
            yield _columns(f"  {name}", _number(measured.value, digits), _interval(measured, digits))


def _generation_lines(found: Generation) -> Iterator[str]:
    own, real, speed = found.samples, found.real, found.speed
    yield _columns(f"{own.number:,} samples", "", "95 %", "real sentences")
    for name, mine, other in (("BLEU-4", own.bleu4, real.bleu4), ("self-BLEU-4", own.self_bleu4, real.self_bleu4)):
        yield _columns(f"  {name}", f"{mine.value:.3f}", _interval(mine, 3), f"{other.value:.3f}")
    for n, (share, of_real) in enumerate(zip(own.distinct, real.distinct, strict=True), start=1):
        yield _columns(f"  distinct-{n}", _number(share, 3), "", _number(of_real, 3))
    for name, value, of_real, digits in (
        ("repeated 4-grams", own.repeated_4grams, real.repeated_4grams, 3),
        ("longest run of a word", own.longest_run, real.longest_run, 2),
        ("word entropy, all texts", own.entropy_pooled, real.entropy_pooled, 2),
        ("word entropy, each text", own.entropy_per_text, real.entropy_per_text, 2),
        ("words per text", own.words_per_text, real.words_per_text, 1),
    ):
        yield _columns(f"  {name}", _number(value, digits), "", _number(of_real, digits))
    if found.judge is not None:
        judged, judged_real = found.judge.samples, found.judge.real
        interval = _interval(PointEstimate(judged.perplexity, judged.ci95), 1)
        yield _columns("  judge's perplexity", f"{judged.perplexity:.1f}", interval, f"{judged_real.perplexity:.1f}")
        yield _columns("  judge's token entropy", f"{judged.entropy:.2f}", "", f"{judged_real.entropy:.2f}")
    if found.mauve is not None:
        yield _columns("  MAUVE", f"{found.mauve.value:.3f}")
    yield _columns("  seconds per sample", f"{speed.seconds_per_sample:.3f}")
    yield _columns("  tokens per second", f"{speed.tokens_per_second:,.0f}")
    yield _columns("  network calls per sample", f"{speed.calls_per_sample:.1f}")


def _convention_lines(found: Convention) -> Iterator[str]:
    meaning, is_bits = found.meaning, found.meaning.scale is ConventionScale.BITS
    digits = 3 if is_bits else 2
    value = "none" if found.value is None else _number(found.value.value, digits)
    interval = "" if found.value is None else _interval(found.value, digits)
    untrained = "" if meaning.trained_for else "; NOT what it was trained for"
    line = _columns(f"  {meaning.name}{', bits' if is_bits else ''}", value, interval)
    yield f"{line}  {meaning.papers}{untrained}"
    yield f"      {meaning.quotient}; {meaning.note}"


def _protocol_lines(result: EvaluationResult) -> Iterator[str]:
    data = result.data
    yield (
        f"on {data.num_sentences:,} of {data.num_in_corpus:,} sentences of {data.corpus}, split {data.split.value}, "
        f"sha256 {data.corpus_sha256[:12]}; sha256 of those {data.num_sentences:,} {data.sha256[:12]}, of the weights "
        f"{(result.weights.sha256 or 'unknown')[:12]}"
    )
    for name, summary in result.likelihoods.items():
        yield f"{name}: {_protocol(summary)}"
    found = result.generation
    if found is None:
        return
    sampling, speed = found.sampling, found.speed
    yield (
        f"unsmoothed BLEU-4, mean over {sampling.number:,} samples against all {data.num_in_corpus:,} sentences; "
        f"self-BLEU-4 of {sampling.number:,} other samples, each against the rest; whitespace-separated words in lower "
        "case; sentences went through the model's tokenizer and back, as samples do; 95 % by bootstrap over samples"
    )
    yield (
        f"samples: {sampling.sampler}, {sampling.steps} steps, temperature {sampling.temperature}, top-k "
        f"{sampling.top_k or 'off'}, top-p {sampling.top_p or 'off'}, length {length_text(sampling.length)}, seed "
        f"{sampling.seed}; {speed.batch} at once on {speed.device}"
    )
    if found.judge is not None:
        yield f"judge: {found.judge.name}, {found.judge.convention}"
    if found.mauve is not None:
        yield f"MAUVE: features of {found.mauve.features}, {found.mauve.num_buckets} buckets"


def _protocol(summary: LikelihoodSummary) -> str:
    protocol = summary.protocol
    length = "length given" if protocol.length is Length.GIVEN else "-log p(length) added"
    limit = f"; wider than requested for lack of {summary.limited_by.value}" if summary.limited_by else ""
    return (
        f"{protocol.definition.quantity}, {'packed text' if protocol.packed else 'single sentences'}, special tokens "
        f"{'counted' if protocol.special_tokens else 'not counted'}, {length}, {protocol.num_draws} draws per sentence "
        f"in {protocol.strata} strata, {protocol.arithmetic}, seed {protocol.seed}; {protocol.interval}{limit}"
    )


def length_text(length: int | tuple[int, int] | None) -> str:
    """The length of samples in words."""
    if length is None:
        return "as in the training corpus"
    return f"{length[0]}-{length[1]}" if isinstance(length, tuple) else str(length)


def _interval(measured: PointEstimate, digits: int) -> str:
    if measured.ci95 is None:
        return ""
    low, high = measured.ci95
    return f"[{_number(low, digits)}, {_number(high, digits)}]"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "none"
    return f"{value:,.{digits}f}" if math.isfinite(value) else "∞"
