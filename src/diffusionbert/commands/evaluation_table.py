"""How an assessment looks in a terminal: figures in columns, and the protocol in words below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console

from diffusionbert.assessment.conventions import BITS, Convention
from diffusionbert.assessment.report import Assessment, Figures, mean_interval
from diffusionbert.likelihood.protocol import Length
from diffusionbert.likelihood.scores import Estimate

Row = tuple[str, str, str, str]
"""What it is, its value, its interval, and the same of real sentences."""


def show(found: Assessment, console: Console | None = None) -> None:
    """Prints an assessment."""
    console = console or Console(highlight=False)

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, soft_wrap=True)

    say(found.model, "bold")
    for estimate in found.likelihoods.values():
        say(_columns(f"{estimate.kind.value}, {estimate.protocol.steps}", "", "", ""), "dim")
        for row in _likelihood_rows(estimate):
            say(_columns(*row))
    say(_columns(f"{len(found.samples.first):,} samples", "", "95 %", "real sentences"), "dim")
    for row in (*_text_rows(found), *_judge_rows(found)):
        say(_columns(*row))
    for row in _speed_rows(found):
        say(_columns(*row))
    if found.conventions is not None:
        say("in the conventions of the literature", "dim")
        for convention in found.conventions:
            say(_convention_line(convention))
            say(f"      {convention.meaning.quotient}; {convention.meaning.note}", "dim")
    for note in (*_protocol(found), *(f"note: {note}" for note in found.notes)):
        say(note, "" if note.startswith("note") else "dim")


def _columns(name: str, value: str, interval: str, real: str) -> str:
    return f"{name:<27} {value:>12}  {interval:<20} {real:>14}".rstrip()


def _likelihood_rows(estimate: Estimate) -> Iterator[Row]:
    plain = estimate.to_json()
    for name, key, digits in (
        ("nats a sentence", "nats_per_sentence", 1),
        ("nats a token", "nats_per_token", 3),
        ("perplexity a token", "perplexity_per_token", 2),
        ("perplexity a word", "perplexity_per_word", 1),
        ("bits a byte", "bits_per_byte", 3),
    ):
        yield f"  {name}", _number(plain[key], digits), _interval(plain["ci95"][key], digits), ""


def _text_rows(found: Assessment) -> Iterator[Row]:
    mine, real = found.figures, found.real
    for name, own, other in (
        ("  BLEU-4", mine.bleu4, real.bleu4),
        ("  self-BLEU-4", mine.self_bleu4, real.self_bleu4),
    ):
        yield name, f"{own.mean:.3f}", _interval(mean_interval(own), 3), f"{other.mean:.3f}"
    for n, (share, of_real) in enumerate(zip(mine.distinct, real.distinct, strict=True), start=1):
        yield f"  distinct-{n}", _share(share), "", _share(of_real)
    figures: list[tuple[str, Callable[[Figures], float], int]] = [
        ("repeated 4-grams", lambda own: own.repetition.share.mean, 3),
        ("longest run of a word", lambda own: own.repetition.longest_run.mean, 2),
        ("word entropy, all texts", lambda own: own.entropy.pooled, 2),
        ("word entropy, each text", lambda own: own.entropy.within.mean, 2),
        ("words a text", lambda own: own.words_per_text, 1),
    ]
    for name, get, digits in figures:
        yield f"  {name}", _number(get(mine), digits), "", _number(get(real), digits)


def _judge_rows(found: Assessment) -> Iterator[Row]:
    if found.judgement is not None:
        own, real = found.judgement.samples, found.judgement.real
        yield "  judge's perplexity", f"{own.perplexity:.1f}", _interval(own.ci95, 1), f"{real.perplexity:.1f}"
        yield "  judge's token entropy", f"{own.entropy:.2f}", "", f"{real.entropy:.2f}"
    if found.mauve is not None:
        yield "  MAUVE", f"{found.mauve.value:.3f}", "", ""


def _speed_rows(found: Assessment) -> Iterator[Row]:
    speed = found.samples.speed
    yield "  seconds a sample", f"{speed.seconds_per_sample:.3f}", "", ""
    yield "  tokens a second", f"{speed.tokens_per_second:,.0f}", "", ""
    yield "  network calls a sample", f"{speed.calls_per_sample:.1f}", "", ""


def _convention_line(row: Convention) -> str:
    digits = 3 if row.meaning.unit == BITS else 2
    value = "none" if row.value is None else _number(row.value, digits)
    interval = "" if row.ci95 is None else _interval(row.ci95, digits)
    untrained = "" if row.meaning.trained_for else "; NOT what it was trained for"
    return (
        _columns(f"  {row.meaning.name}{', bits' if row.meaning.unit == BITS else ''}", value, interval, "")
        + f"  {row.meaning.papers}{untrained}"
    )


def _protocol(found: Assessment) -> Iterator[str]:
    data = found.material.to_json()
    yield (
        f"on {data['num_sentences']:,} of {data['num_in_corpus']:,} sentences of {data['corpus']}, "
        f"split {data['split']}, sha256 {data['corpus_sha256'][:12]}; "  # as `compare` names the text
        f"sha256 of those {data['num_sentences']:,} alone {data['sha256'][:12]}, "
        f"of the weights {(found.weights_sha256 or 'unknown')[:12]}"
    )
    for name, estimate in found.likelihoods.items():
        card = estimate.protocol
        length = "length given" if card.length is Length.GIVEN else "length modelled and added"
        limit = f"; wider than asked for want of {estimate.limited_by.value}" if estimate.limited_by else ""
        yield (
            f"{name}: single sentences, special tokens not counted, {length}, {card.num_draws} draws a sentence in "
            f"{card.strata} strata, {card.arithmetic}, seed {card.seed}; {card.interval}{limit}"
        )
    yield found.texts_protocol
    sampling, speed = found.samples.to_json(), found.samples.speed
    yield (
        f"samples: {sampling['algorithm']}, {sampling['steps']} steps, top-k {sampling['top_k']}, length "
        f"{sampling['length']}, seed {sampling['seed']}; {speed.batch} side by side on {speed.device}"
    )
    if found.judgement is not None:
        yield f"judge: {found.judgement.name}, {found.judgement.convention}"
    if found.mauve is not None:
        yield f"MAUVE: features of {found.mauve.features}, {found.mauve.num_buckets} buckets"


def _interval(ends: tuple[float | None, float | None] | list[float | None], digits: int) -> str:
    low, high = ends
    return f"[{_number(low, digits)}, {_number(high, digits)}]"


def _number(value: float | None, digits: int) -> str:
    return "∞" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
