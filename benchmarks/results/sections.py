"""The sections of docs/results.md on likelihoods and samples: table 2, the ratio, other text, seeds, claims.

Each section is a function from results, of which anything may be missing, and the folder of pictures to Markdown; what
is not run yet is named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, final

from checks import COMPARABLE, MATCHES, RIVALS, SUBSTANTIAL
from claims import CLAIMS, judged
from kept import NotRun, Results, exp, perplexity
from plan import LONG, VARIATIONS
from published import PAPER
from verdicts import Interval, Verdict, against_exact, below, difference
from wording import figure, grid, kind, missing, nats, number, primary, times

from diffusionbert.assessment.comparison import compare
from diffusionbert.assessment.tables import SIGNIFICANT, Cell, Column, Direction, Table, to_markdown
from diffusionbert.paper.targets import MAIN, Row, curve, title

TARGET = 0.65
"""What DiffusionBERT's perplexity should be at most, as a share of the best D3PM's."""
KINDS = {
    "Bounds": ("bound.grid", "bound.continuous"),
    "Bounds by way of vectors": ("bound.vectors",),
    "Exact": ("exact.exact",),
    "Pseudo: of no distribution over sentences": ("pseudo.grid", "pseudo.pseudo"),
}
"""The columns of table 2 that may stand side by side."""
PAPER_SETTING = "BERT-base for 1.9 million steps on LM1B"
TEXTS = ("bleu4", "self_bleu4", "distinct_2", "token_entropy", "calls_per_sample")


# ---- table 2 --------------------------------------------------------------------------------------------------------


def main_table(results: Results, _: Path) -> str:
    """Table 2: likelihoods, a table for each kind, and samples."""
    rows = [row for row in MAIN if results.has(row.key)]
    absent = missing(row.key for row in MAIN if row not in rows)
    if not rows:
        return f"## Main results (table 2){absent}"
    names = [title(row, results.experiments("seed0")[row.system]) for row in rows]
    table = compare([results.path(row.key) for row in rows], names=names)
    paper = {name: PAPER.get(row.key) for name, row in zip(names, rows, strict=True)}
    parts = [
        f"## Main results (table 2)\n\nThe paper's columns are of its table 2: a larger network, {PAPER_SETTING}. "
        "Orders compare, numbers do not: its perplexities are a word's, by an author's word and not by the paper's"
        f"{_a_word(results)}. With the spindle they are by its own quantity, which is no bound. Steps and tokens are "
        "equal for all, arithmetic is not: GenMD4 and SUNDAE make two passes a step. What is called GPT is a decoder "
        f"of this size, pretrained as the masked network was.{absent}"
    ]
    # What the paper calls perplexity is its own quantity with the spindle, and a bound without it.
    told = {
        name: one and one[:1]
        for (name, one), row in zip(paper.items(), rows, strict=True)
        if "spindle" not in row.key or row.key.endswith("-paper")
    }
    again = {name for name, row in zip(names, rows, strict=True) if row.note}  # another way of writing, the same nats
    for words, ways in KINDS.items():
        keys = [column.key for column in table.columns if column.key.endswith(ways)]
        if keys:
            parts.append(f"### {words}\n\n{_markdown(_part(table, keys, _told(table, keys, told), again))}")
    parts.append(_unlearnt(results, rows))
    without = [name for name, row in zip(names, rows, strict=True) if not results.evaluation(row.key).scores]
    parts.append(f"Without a likelihood: {'; '.join(without)}." if without else "")
    shown = _unranked(_part(table, TEXTS, {name: one and one[1:] for name, one in paper.items()}))
    warnings = tuple(words for words in table.warnings if not words.startswith("seconds"))
    card = tuple(note for note in table.footnotes if not note[0])
    texts = results.evaluation(rows[0].key).generation
    assert texts is not None
    parts.append(
        "### Samples\n\nBLEU-4 says how much of a sample occurs in real text, and the dullest text has the most of it; "
        "self-BLEU says how much samples have in common. Neither is good by itself, and only BLEU-4 is ranked. A "
        "network that is told the time is called at every step under the spindle, others only when a word is revealed. "
        f"Real sentences are shorter ({texts.real.words_per_text:.0f} words, samples "
        f"{texts.samples.words_per_text:.0f}), so their figures are no goal.\n\n{_markdown(shown, card, warnings)}"
    )
    return "\n\n".join(filter(None, parts))


def _a_word(results: Results) -> str:
    """What a perplexity a token is in the paper's unit."""
    if not results.has("diffusionbert"):
        return ""
    found = results.evaluation("diffusionbert").likelihoods["grid"]
    assert found.num_words is not None
    assert found.rates.perplexity_per_word is not None
    tokens, rates = found.num_tokens / found.num_words, found.rates
    return (
        f", and here a word has {tokens:.2f} tokens, so that `diffusionbert`'s "
        f"{number(rates.perplexity_per_token.value)} a token is {number(rates.perplexity_per_word.value)} a word"
    )


def _told(table: Table, keys: Sequence[str], paper: Mapping[str, tuple[float, ...] | None]) -> dict[str, Any]:
    """The paper's perplexities of those rows that have a first column: what it calls perplexity is of one kind."""
    first = next(place for place, column in enumerate(table.columns) if column.key in keys)
    return {name: paper.get(name) for name, row in zip(table.names, table.cells, strict=True) if row[first].value}


def _markdown(table: Table, notes: tuple[tuple[str, str], ...] = (), warnings: tuple[str, ...] = ()) -> str:
    """With the footnotes that its cells ask for."""
    marked = any(cell.significant for row in table.cells for cell in row)
    own = tuple(note for note in table.footnotes if note[0] == SIGNIFICANT and marked)
    return to_markdown(replace(table, footnotes=(*own, *notes), warnings=warnings)).rstrip()


def _unranked(table: Table) -> Table:
    """Without marks in all columns but the first: few samples in common are no merit of gibberish."""
    plain = [
        (row[0], *(replace(cell, best=False, second=False, significant=False) for cell in row[1:]))
        for row in table.cells
    ]
    columns = (table.columns[0], *(replace(column, better=Direction.NEITHER) for column in table.columns[1:]))
    return replace(table, columns=columns, cells=tuple(plain))


def _unlearnt(results: Results, rows: Sequence[Row]) -> str:
    """Names what is worse than word frequencies alone."""
    try:
        limit = results.frequencies()
    except NotRun:
        return ""
    found = {row.key: results.evaluation(row.key) for row in rows if results.evaluation(row.key).scores}
    worse = [key for key, one in found.items() if nats(one) > limit]
    if not worse:
        return ""
    words = ", ".join(f"`{key}` ({nats(found[key]):.1f}{_elsewhere(results, key)})" for key in worse)
    course = "; ".join(f"`{key}` {_course(results, key)}" for key in worse)
    return (
        f"Above the {limit:.2f} nats a token of word frequencies alone: {words}. They do learn, slowly; "
        f"validation in nats a token before training, half way and at the end: {course}. What is said against these "
        "need not hold for longer trainings."
    )


def _course(results: Results, key: str) -> str:
    found = curve(results.run(key), key).ys
    return ", ".join(f"{found[place]:.1f}" for place in (0, len(found) // 2, -1))


def _elsewhere(results: Results, key: str) -> str:
    """How the same system did in other trainings."""
    width = dict(VARIATIONS["narrower"].objective)["width"]
    places = {f"steps{LONG}": f"after {LONG:,} steps", "narrower": f"with vectors of {width} axes"}
    found = [
        f"{nats(results.evaluation(key, folder)):.1f} {words}"
        for folder, words in places.items()
        if results.has(key, folder)
    ]
    return "".join(f"; {one}" for one in found)


def _part(
    table: Table, keys: Sequence[str], paper: Mapping[str, tuple[float, ...] | None], without: Collection[str] = ()
) -> Table:
    """Some columns of a table, and the paper's figures; rows that have none of them are left out, and some others."""
    places = [place for place, column in enumerate(table.columns) if column.key in keys]
    columns = [table.columns[place] for place in places]
    told = len(next(filter(None, paper.values()), ()))
    titles = {0: (), 1: ("paper",), 2: ("paper, BLEU-4", "paper, self-BLEU-4")}[told]
    columns += [Column(words, words, Direction.NEITHER, 2 if words == "paper" else 3) for words in titles]
    names, rows = [], []
    for name, cells in zip(table.names, table.cells, strict=True):
        own = [cells[place] for place in places]
        if name not in without and any(cell.value is not None for cell in own):
            names.append(name)
            rows.append((*own, *(Cell(value) for value in paper.get(name) or [None] * len(titles))))
    return Table(tuple(columns), tuple(names), tuple(rows), table.footnotes, table.warnings)


def ratio(results: Results, _: Path) -> str:
    """DiffusionBERT against the best D3PM, in perplexity over the same steps, in every training that has both."""
    heading = "## How far ahead"
    budgets = {folder: steps for steps, folder in results.budgets.items()}
    lines, found = [], {}
    for folder in (*results.seeds, *(one for one in (*budgets, *VARIATIONS) if one != "seed0")):
        lead = lead_of(results, folder)
        if lead is None:
            continue
        found[folder] = lead.apart
        training = results.experiments(folder)["diffusionbert"].training
        told = f"{training.steps:,}", f"{training.learning_rate:g}", f"{training.seed}"
        rival = f"`{lead.rival}` (of {sum(results.has(key, folder) for key in RIVALS)})"
        lines.append((*told, rival, f"{number(lead.own)} : {number(lead.theirs)}", times(lead.apart)))
    if not found:
        return f"{heading}{missing(['diffusionbert', 'd3pm'])}"
    header = "training steps", "learning rate", "seed", "best D3PM row", "perplexities", "ratio"
    others = [
        f"{steps:,} steps: {_met([found[one]])}" for one, steps in budgets.items() if one in found and one != "seed0"
    ]
    verdict = _met([found[folder] for folder in results.seeds if folder in found])
    return (
        f"{heading}\n\nPerplexity a token of `diffusionbert` (linear, TAD) as a share of the best D3PM row's, both "
        f"bounds over the same steps, sentences resampled in pairs. This project's target: at most {TARGET}. At the "
        f"scale of table 2: **{verdict}**"
        + (f"; in {', '.join(others)}" if others else "")
        + ". The best row was chosen on these very sentences, which favours D3PM. The share also depends on when D3PM "
        "leaves its [plateau](#from-scratch-a-plateau), and so on the length of training; on the learning rate, which "
        "was chosen by a few probes; and on averaging weights: what that costs either is said "
        "[below](#beyond-the-paper-the-best-recipe). D3PM has its auxiliary term in its loss, DiffusionBERT has not: "
        "two that differ in pretraining alone are `mdlm` and `mdlm-pretrained`.\n\n"
        + grid(header, lines, left=4)
        + missing((), results.absent("faster"))
    )


@final
@dataclass(frozen=True)
class Lead:
    """DiffusionBERT beside the row of D3PM with the lowest bound."""

    rival: str
    own: float
    theirs: float
    apart: Interval


def lead_of(results: Results, folder: str) -> Lead | None:
    """In one training; None if either is missing there."""
    rivals = {key: results.scores(key, "grid", folder) for key in RIVALS if results.has(key, folder)}
    if not rivals or not results.has("diffusionbert", folder):
        return None
    best, own = min(rivals, key=lambda key: perplexity(rivals[key])), results.scores("diffusionbert", "grid", folder)
    return Lead(best, perplexity(own), perplexity(rivals[best]), difference(own, rivals[best]))


def _met(found: Sequence[Interval]) -> str:
    return {Verdict.HOLDS: "met", Verdict.FAILS: "not met"}.get(below(found, math.log(TARGET)), "undecided")


# ---- other text, seeds ----------------------------------------------------------------------------------------------


def other_text(results: Results, _: Path) -> str:
    """The same models on text of another kind."""
    rows = [row for row in MAIN if not row.note]
    known = [row for row in rows if results.has(f"{row.system}-other-text") and results.has(row.key)]
    known = [row for row in known if results.evaluation(row.key).scores]
    absent = missing(row.key for row in rows if not results.has(f"{row.system}-other-text"))
    if not known:
        return f"## Out of domain{absent}"
    lines = []
    for row in known:
        own, other = results.evaluation(row.key), results.evaluation(f"{row.system}-other-text")
        growth = exp(nats(other) - nats(own))
        words = other.likelihoods[primary(other)].rates.perplexity_per_word.value
        cells = figure(own), figure(other), f"{growth:.2f}" if growth < 1000 else f"{growth:.0e}", number(words)
        name = title(row, results.experiments("seed0")[row.system])
        lines.append((kind(own), name, *cells))
    data = results.evaluation(f"{known[0].system}-other-text").data
    header = "kind", "system", "own text", "other text", "times", "other text, a word"
    table = grid(header, sorted(lines, key=lambda line: line[0]), left=2)
    return (
        f"## Out of domain\n\nPerplexity a token on {data.num_sentences:,} sentences of `{data.corpus}`: "
        "news of all kinds, on which the paper trains and tests. Kinds cannot be compared, except that a bound below "
        f"an exact value, the length paid for, is better than it.\n\n{table}{_proven(results, known)}{absent}"
    )


def _proven(results: Results, rows: Sequence[Row]) -> str:
    """Says which bounds are below a decoder's exact value, on either text."""
    lines = []
    bounds = [row.key for row in rows if kind(results.evaluation(row.key)) == "bound"]
    for decoder in (row.key for row in rows if kind(results.evaluation(row.key)) == "exact"):
        for words, ending in (("own text", ""), ("other text", "-other-text")):
            exact = results.scores(f"{decoder}{ending}", "exact")
            found = [results.evaluation(f"{key}{ending}") for key in bounds]
            below_it = [
                f"`{key}`"
                for key, one in zip(bounds, found, strict=True)
                if against_exact(one.scores[primary(one)], exact).proves
            ]
            lines.append(f"- on the {words}, below the exact value of `{decoder}`: {', '.join(below_it) or 'no bound'}")
    return "\n\nWith the length paid for:\n\n" + "\n".join(lines) if lines else ""


def seeds(results: Results, _: Path) -> str:
    """Rows that were run with several seeds."""
    lines = []
    for row in MAIN:
        found = [results.evaluation(row.key, folder) for folder in results.seeds if results.has(row.key, folder)]
        if len(found) < 2 or not found[0].scores:
            continue
        values = [nats(one) for one in found]
        by_seed = ", ".join(number(exp(value)) for value in values)
        cells = f"{mean(values):.3f}", f"{stdev(values):.3f}", number(exp(mean(values)))
        lines.append((f"`{row.key}`", f"{kind(found[0])} ({primary(found[0])})", by_seed, *cells))
    if not lines:
        return "## Seeds\n\nNot run yet: seeds beside the first."
    header = "row", "kind", "perplexity by seed", "mean nats", "standard deviation", "exp(mean)"
    return (
        "## Seeds\n\nSeeds differ in batches, in noise and, from scratch, in the weights at the start; pretrained rows "
        "all start from one pretraining, so that their deviations do not tell how another would have ended. Standard "
        "deviations are of nats a token: 0.010 is 1 % of perplexity; of so few values they are rough.\n\n"
        f"{grid(header, lines, left=3)}"
    )


# ---- claims ---------------------------------------------------------------------------------------------------------


def claims(results: Results, _: Path) -> str:
    """The paper's claims: verdicts, then what they rest on."""
    found = judged(results)
    table = grid(
        ("", "claim", "where", "seeds", "verdict"),
        [
            (str(place), claim.words, claim.where, str(one.seeds or "–"), _strong(one.verdict))
            for place, (claim, one) in enumerate(zip(CLAIMS, found, strict=True), start=1)
        ],
        left=5,
    )
    parts = []
    for place, (claim, one) in enumerate(zip(CLAIMS, found, strict=True), start=1):
        if one.verdict is not Verdict.NOT_RUN or len(one.measured) > 1:
            lines = "\n".join(f"- {line}" for line in one.measured)
            parts.append(f"**{place}. {claim.words}: {one.verdict.value}**\n\n{lines}")
    return "\n\n".join(["## The paper's claims", _RULES, table, *parts])


def _strong(verdict: Verdict) -> str:
    return verdict.value if verdict is Verdict.NOT_RUN else f"**{verdict.value}**"


_RULES = "\n".join(
    (
        "Each is judged in every seed at hand by itself: likelihoods on the same sentences, by a paired bootstrap; "
        "BLEU by a bootstrap over the samples of either system. A claim of several parts rests on the fewest seeds "
        "that one of them has.",
        "",
        "- *holds*: the 95 % interval lies on the claimed side in every seed; where a size is in the claim, it reaches "
        "that size, too",
        "- *does not hold*: it lies on the other side in every seed; or it reaches the size in none; or, where the "
        "paper calls a difference large (“far behind”, “quite harmful”), it rules out even half of the paper's figure",
        "- *holds only by the paper's quantity*: the strict bound does not show it, but what the paper calls "
        "perplexity does",
        "- *holds by the bound*: a bound lies above an exact value in every seed; it may be the bound that is loose",
        "- *undecided*: none of these; seeds that disagree decide nothing, nor does more BLEU-4 with more self-BLEU "
        "where the paper speaks of quality: top-k buys one with the other",
        "- *undecided: too little training*: a system's bound is above what word frequencies alone need",
        "",
        "Sizes are changes of perplexity a token, the first against the second; bounds over the same steps where "
        f"nothing else is said. Perplexities match within {100 * MATCHES:.0f} %, more steps bring a substantial "
        f"improvement from {100 * SUBSTANTIAL:.0f} % on, and texts are comparable within {100 * COMPARABLE:.0f} % of "
        "BLEU-4 at the same self-BLEU. Trainings of other lengths, table 3 and figure 3 have one seed. Pretrained "
        "decoders had fewer tokens of pretraining than masked networks ([below](#at-equal-steps)).",
    )
)
