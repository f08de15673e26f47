"""How an assessment looks in a terminal: a table, and the protocol in words below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from diffusionbert.assessment import Assessment, Figures, mean_interval
from diffusionbert.conventions import BITS, Convention
from diffusionbert.protocol import Length
from diffusionbert.scores import Estimate

Row = tuple[str, str, str, str]
"""What it is, its value, its interval, and the same of real sentences."""


def show(found: Assessment, console: Console | None = None) -> None:
    """Prints an assessment."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, side in (("", "left"), (found.model, "right"), ("95 %", "left"), ("real sentences", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    groups = [
        *(_likelihood_rows(estimate) for estimate in found.likelihoods.values()),
        _text_rows(found),
        _judge_rows(found),
        _speed_rows(found),
    ]
    for group in groups:
        for row in group:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    if found.conventions is not None:
        console.print(_conventions_table(found.conventions))
    for line in _protocol(found):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _likelihood_rows(estimate: Estimate) -> Iterator[Row]:
    yield f"{estimate.kind.value}, {estimate.protocol.steps}", "", "", ""
    plain = estimate.to_json()
    for name, key, digits in (
        ("  nats a sentence", "nats_per_sentence", 1),
        ("  nats a token", "nats_per_token", 3),
        ("  perplexity a token", "perplexity_per_token", 2),
        ("  perplexity a word", "perplexity_per_word", 1),
        ("  bits a byte", "bits_per_byte", 3),
    ):
        low, high = plain["ci95"][key]
        yield name, _number(plain[key], digits), f"[{_number(low, digits)}, {_number(high, digits)}]", ""


def _text_rows(found: Assessment) -> Iterator[Row]:
    yield f"{len(found.samples.first):,} samples", "", "", ""
    mine, real = found.figures, found.real
    for name, own, other in (
        ("  BLEU-4", mine.bleu4, real.bleu4),
        ("  self-BLEU-4", mine.self_bleu4, real.self_bleu4),
    ):
        low, high = mean_interval(own)
        yield name, f"{own.mean:.3f}", f"[{low:.3f}, {high:.3f}]", f"{other.mean:.3f}"
    figures: list[tuple[str, Callable[[Figures], float | None], int]] = [
        *((f"  distinct-{n + 1}", lambda own, n=n: own.distinct[n], 3) for n in range(len(mine.distinct))),
        ("  repeated 4-grams", lambda own: own.repetition.share.mean, 3),
        ("  longest run of a word", lambda own: own.repetition.longest_run.mean, 2),
        ("  word entropy, all texts", lambda own: own.entropy.pooled, 2),
        ("  word entropy, each text", lambda own: own.entropy.within.mean, 2),
        ("  words a text", lambda own: own.words_per_text, 1),
    ]
    for name, get, digits in figures:
        yield name, _number(get(mine), digits), "", _number(get(real), digits)


def _judge_rows(found: Assessment) -> Iterator[Row]:
    if found.judgement is not None:
        own, real = found.judgement.samples, found.judgement.real
        yield f"judge {found.judgement.name}", "", "", ""
        low, high = own.ci95
        yield "  perplexity", f"{own.perplexity:.1f}", f"[{low:.1f}, {high:.1f}]", f"{real.perplexity:.1f}"
        yield "  token entropy, each text", f"{own.entropy:.2f}", "", f"{real.entropy:.2f}"
    if found.mauve is not None:
        yield f"MAUVE, {found.mauve.features}", f"{found.mauve.value:.3f}", "", ""


def _speed_rows(found: Assessment) -> Iterator[Row]:
    speed = found.samples.speed
    yield "seconds a sample", f"{speed.seconds_per_sample:.3f}", "", ""
    yield "tokens a second", f"{speed.tokens_per_second:,.0f}", "", ""
    yield "calls a sample", f"{speed.calls_per_sample:.1f}", "", ""


def _conventions_table(rows: tuple[Convention, ...]) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="dim", title="conventions of the literature", title_justify="left"
    )
    for name in ("", "", "95 %", "as in", "what is divided by what"):
        table.add_column(name, overflow="fold")
    for row in rows:
        digits = 3 if row.meaning.unit == BITS else 2
        interval = "" if row.ci95 is None else f"[{row.ci95[0]:.{digits}f}, {row.ci95[1]:.{digits}f}]"
        untrained = "" if row.meaning.trained_for else " (not trained for)"
        value = f"{_number(row.value, digits)} {row.meaning.unit if row.meaning.unit == BITS else ''}".strip()
        reason = f"; {row.meaning.note}" if row.value is None else ""
        table.add_row(
            f"{row.meaning.name}{untrained}", value, interval, row.meaning.papers, f"{row.meaning.quotient}{reason}"
        )
    return table


def _protocol(found: Assessment) -> Iterator[str]:
    data = found.material.to_json()
    yield (
        f"on {data['num_sentences']:,} of {data['num_in_corpus']:,} sentences of {data['corpus']} "
        f"(split {data['split']}), sha256 {data['sha256'][:16]}; weights {(found.weights_sha256 or 'unknown')[:16]}"
    )
    for name, estimate in found.likelihoods.items():
        card = estimate.protocol
        length = "length given" if card.length is Length.GIVEN else "length modelled and added"
        limit = (
            "" if estimate.limited_by is None else f"; wider than asked: more {estimate.limited_by.value} would help"
        )
        yield (
            f"{name}: single sentences, special tokens not counted, {length}, {card.num_draws} draws a sentence in "
            f"{card.strata} strata, {card.arithmetic}, seed {card.seed}; {card.interval}{limit}"
        )
    yield found.texts_protocol
    sampling = found.samples.to_json()
    yield (
        f"samples: {sampling['algorithm']}, {sampling['steps']} steps, top-k {sampling['top_k']}, length "
        f"{sampling['length']}, seed {sampling['seed']}; {found.samples.speed.batch} side by side on "
        f"{found.samples.speed.device}"
    )
    if found.judgement is not None:
        yield f"judge: {found.judgement.convention}"


def _number(value: float | None, digits: int) -> str:
    return "∞" if value is None else f"{value:,.{digits}f}"
