"""The claims of He et al. 2022, "DiffusionBERT", one by one, each with its check against kept results.

A check says what was measured and gives a verdict, which is computed and never typed (see verdicts.py); it raises
`NotRun` if a row is missing. The paper's own figures stand in `PAPER` and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from kept import NotRun, Results, perplexity
from verdicts import (
    Finding,
    Interval,
    Verdict,
    above,
    agreed,
    below,
    change,
    difference,
    either,
    means_apart,
    reaching,
    together,
    tradeoffs_apart,
    within,
)
from wording import number

from diffusionbert.paper.targets import curve

PAPER = {
    "d3pm": (82.34, 0.3897, 0.2347),
    "d3pm-tad": (125.15, 0.3390, 0.2720),
    "d3pm-spindle": (77.50, 0.4241, 0.2288),
    "diffusion-lm": (118.62, 0.3553, 0.2668),
    "diffusion-lm-bert": (132.12, 0.3562, 0.2798),
    "bert-mouth": (142.89, 0.2867, 0.1240),
    "diffusionbert-lte": (92.53, 0.3995, 0.2118),
    "diffusionbert-pte": (79.95, 0.3886, 0.2156),
    "diffusionbert": (78.76, 0.4213, 0.2116),
    "diffusionbert-spindle-paper": (63.78, 0.4358, 0.2151),
}
"""Its table 2: perplexity, BLEU-4, self-BLEU-4. Its spindle row is by its own quantity, which is no bound."""
PAPER_STEPS = {
    "diffusionbert-spindle": {2: 313.57, 8: 91.01, 16: 75.66, 64: 65.83, 128: 63.78, 512: 54.63},
    "diffusion-lm": {2000: 112.12},
    "bert-mouth": {64: 142.89, 512: 86.78},
    "decoder-pretrained": {64: 38.7},
}
"""Its table 3: perplexity over so many steps. That its DiffusionBERT has the spindle, follows from its table 2."""
MATCHES = 0.01
"""Perplexities that differ by less than this share match."""
SUBSTANTIAL = 0.05
"""A share of perplexity that more steps should bring to be worth it."""
COMPARABLE = 0.1
"""A share of BLEU within which two systems write comparably."""
FEWEST = 100
"""Samples that say something of BLEU: most rows wrote them with one seed alone."""

Check = Callable[[Results], Finding]
"""Raises `NotRun` if a row is missing."""


@final
@dataclass(frozen=True)
class Claim:
    """What the paper says, where, and how it is checked."""

    words: str
    where: str
    check: Check

    def judge(self, results: Results) -> Finding:
        """The finding; if rows are missing, which."""
        return _known(self.check, results)


def _known(check: Check, results: Results) -> Finding:
    try:
        return check(results)
    except NotRun as missing:
        return Finding((f"not run yet: {missing}",), Verdict.NOT_RUN)


# ---- what is at hand ------------------------------------------------------------------------------------------------


def common_seeds(results: Results, *keys: str, samples: int = 0) -> list[str]:
    """The folders of the seeds with which all of these rows were run, each with so many samples."""
    found = [folder for folder in results.seeds if all(_has(results, key, folder, samples) for key in keys)]
    if not found:
        missing = [key for key in keys if not any(_has(results, key, folder, samples) for folder in results.seeds)]
        raise NotRun(("samples of " if samples else "") + " and ".join(f"`{key}`" for key in missing or keys))
    return found


def _has(results: Results, key: str, folder: str, samples: int) -> bool:
    return results.has(key, folder) and len(results.evaluation(key, folder).bleu4.values) >= samples


def listed(folders: Sequence[str], words: Sequence[object]) -> str:
    """What each seed says."""
    names = [folder.replace("seed", "seed ") for folder in folders]
    if len(folders) == 1:
        return f"{words[0]} ({names[0]} alone)"
    return "; ".join(f"{name}: {word}" for name, word in zip(names, words, strict=True))


# ---- likelihoods ----------------------------------------------------------------------------------------------------


def lower(first: str, second: str, way: str = "grid", other: str | None = None, *, far: bool = False) -> Check:
    """The first has a lower perplexity than the second, on the same sentences; `far` if the paper says so."""

    def check(results: Results) -> Finding:
        folders = common_seeds(results, first, second)
        pairs = [(results.scores(first, way, one), results.scores(second, other or way, one)) for one in folders]
        found = [difference(*pair) for pair in pairs]
        words = [
            f"{number(perplexity(one))} against {number(perplexity(two))}, {apart.per_cent}"
            for (one, two), apart in zip(pairs, found, strict=True)
        ]
        paper = math.log(PAPER[first][0] / PAPER[second][0]) if {first, second} <= set(PAPER) else None
        said = "" if paper is None else f"; the paper: {PAPER[first][0]} against {PAPER[second][0]}, {change(paper)}"
        ways = "" if way == "grid" and other is None else f" ({way if other is None else f'{way} and {other}'})"
        measured = f"`{first}` against `{second}`{ways}: {listed(folders, words)}{said}"
        return Finding((measured,), below(found, paper=paper if far else None))

    return check


def behind_exact(first: str, second: str, way: str = "grid") -> Check:
    """The first's bound is above the second's exact value, which does not prove it worse: it is but a bound."""

    def check(results: Results) -> Finding:
        folders = common_seeds(results, first, second)
        pairs = [(results.scores(first, way, one), results.scores(second, "exact", one)) for one in folders]
        found = [difference(*pair) for pair in pairs]
        words = [
            f"bound {number(perplexity(one))}, exact {number(perplexity(two))}, {apart.per_cent}"
            for (one, two), apart in zip(pairs, found, strict=True)
        ]
        verdict = {Verdict.HOLDS: Verdict.FAILS, Verdict.FAILS: Verdict.BY_BOUND}.get(below(found), Verdict.UNDECIDED)
        return Finding((f"`{first}` against `{second}`: {listed(folders, words)}",), verdict)

    return check


def spindle_gains(base: str, claimed: float, by_paper: str | None = None) -> Check:
    """By how much perplexity changes by the strict bound, with either mean, and by the paper's quantity."""

    def judged(results: Results, key: str) -> Finding:
        folders = common_seeds(results, base, key)
        found = [difference(results.scores(key, "grid", one), results.scores(base, "grid", one)) for one in folders]
        measured = f"`{key}` against `{base}`: {listed(folders, [one.per_cent for one in found])}"
        return Finding((measured,), reaching(found, math.log1p(-claimed)))

    def check(results: Results) -> Finding:
        strict = [judged(results, f"{base}-spindle")]
        sentence = f"{base}-spindle-sentence"
        strict += [judged(results, sentence)] if results.has(sentence) else []
        verdict = either([one.verdict for one in strict])
        words = [f"strict: {line}" for one in strict for line in one.measured]
        if by_paper is not None:
            theirs = judged(results, by_paper)
            words += [f"by the paper's quantity: {line}" for line in theirs.measured]
            if verdict is not Verdict.HOLDS and theirs.verdict is Verdict.HOLDS:
                verdict = Verdict.BY_PAPER
        return Finding(tuple(words), verdict)

    return check


def budget(share: float, rival: str, *, matches: bool) -> Check:
    """DiffusionBERT with a share of the steps against a rival with all of them; each had its own learning rates."""

    def check(results: Results) -> Finding:
        full = next((steps for steps, folder in results.budgets.items() if folder == "seed0"), 0)
        steps = round(share * full)
        folder = results.budgets.get(steps)
        if folder is None:
            raise NotRun(f"`diffusionbert` in {steps} steps")
        one, two = results.scores("diffusionbert", "grid", folder), results.scores(rival, "grid")
        found = difference(one, two)
        words = f"{number(perplexity(one))} against {number(perplexity(two))}, {found.per_cent} (seed 0 alone)"
        verdict = below([found], math.log1p(MATCHES) if matches else 0.0)
        return Finding((f"`diffusionbert` in {steps} steps against `{rival}` in {full}: {words}",), verdict)

    return check


def converges_faster(results: Results) -> Finding:
    """At every validation the pretrained network is below the one from scratch that ends lowest."""
    folders, verdicts, words = [], [], []
    for folder in results.seeds:
        trained = results.experiments(folder)
        rivals = [curve(results.run(name, folder), name) for name in trained if name.startswith("d3pm")]
        if "diffusionbert" not in trained or not rivals:
            continue
        mine, theirs = (
            curve(results.run("diffusionbert", folder), "diffusionbert"),
            min(rivals, key=lambda one: one.ys[-1]),
        )
        is_below = all(one < two for one, two in zip(mine.ys, theirs.ys, strict=True))
        passed = next((x for x, y in zip(mine.xs, mine.ys, strict=True) if y < theirs.ys[-1]), None)
        reached = "never below that" if passed is None else f"below that from step {passed:.0f} of {mine.xs[-1]:.0f} on"
        folders.append(folder)
        verdicts.append(Verdict.HOLDS if is_below else Verdict.FAILS)
        words.append(f"{mine.ys[-1]:.2f} at the end, `{theirs.name}` {theirs.ys[-1]:.2f}, {reached}")
    if not folders:
        raise NotRun("`diffusionbert` and `d3pm`")
    return Finding((f"validation of `diffusionbert`, nats a token: {listed(folders, words)}",), agreed(verdicts))


def few_steps_suffice(results: Results) -> Finding:
    """The last multiplication of the number of steps brings less than a substantial share of perplexity."""
    folders = [folder for folder in results.seeds if len(results.over_steps("diffusionbert", folder)) > 1]
    if not folders:
        raise NotRun("table 3")
    found, words = [], []
    for folder in folders:
        by_steps = {steps: one.scores["grid"] for steps, one in results.over_steps("diffusionbert", folder).items()}
        *_, fewer, more = by_steps
        found.append(difference(by_steps[more], by_steps[fewer]))
        all_steps = ", ".join(f"{steps}: {number(perplexity(scores))}" for steps, scores in by_steps.items())
        words.append(f"perplexity over steps {all_steps}; from {fewer} to {more} {found[-1].per_cent}")
    theirs = PAPER_STEPS["diffusionbert-spindle"]
    paper = change(math.log(theirs[512] / theirs[128]))
    verdict = within(found, math.log1p(-SUBSTANTIAL), math.inf)
    return Finding((listed(folders, words), f"the paper's own table, from 128 to 512: {paper}"), verdict)


# ---- samples --------------------------------------------------------------------------------------------------------


def writes_better(first: str, second: str, *, as_diverse: bool = False) -> Check:
    """The first's BLEU-4 is higher; if asked, its self-BLEU not. Samples are no pairs."""

    def check(results: Results) -> Finding:
        folders = common_seeds(results, first, second, samples=FEWEST)
        pairs = [(results.evaluation(first, one), results.evaluation(second, one)) for one in folders]
        closer = [means_apart(one.bleu4, two.bleu4) for one, two in pairs]
        duller = [means_apart(one.self_bleu4, two.self_bleu4) for one, two in pairs]
        verdict = above(closer)
        is_bought = (verdict is Verdict.HOLDS and any(one.low > 0 for one in duller)) or (
            verdict is Verdict.FAILS and any(one.high < 0 for one in duller)
        )
        words = [
            f"BLEU-4 {one.bleu4.mean:.3f} against {two.bleu4.mean:.3f}, {quality}, self-BLEU "
            f"{one.self_bleu4.mean:.3f} against {two.self_bleu4.mean:.3f}, {sameness}"
            for (one, two), quality, sameness in zip(pairs, closer, duller, strict=True)
        ]
        measured = f"`{first}` against `{second}`: {listed(folders, words)}"
        return Finding((measured,), Verdict.UNDECIDED if as_diverse and is_bought else verdict)

    return check


def trades_off(first: str, second: str, judged: Callable[[Sequence[Interval]], Verdict]) -> Check:
    """BLEU-4 at the same self-BLEU, over the settings of figure 3."""

    def check(results: Results) -> Finding:
        folders, found = [], []
        for folder in results.seeds:
            lines = [list(results.tradeoff(system, folder).values()) for system in (first, second)]
            if all(len(line) > 1 for line in lines):
                folders.append(folder)
                found.append(tradeoffs_apart(*lines))
        if not folders:
            raise NotRun(f"figure 3 of `{first}` and `{second}`")
        known = [one for one in found if one is not None]
        words = [
            "no self-BLEU in common"
            if one is None
            else f"{100 * one.value:+.0f} % [{100 * one.low:+.0f}, {100 * one.high:+.0f}]".replace("-", "−")
            for one in found
        ]
        measured = f"BLEU-4 of `{first}` at the same self-BLEU as `{second}`: {listed(folders, words)}"
        return Finding((measured,), judged(known) if len(known) == len(found) else Verdict.UNDECIDED)

    return check


def all_of(*checks: Check) -> Check:
    """Every part must hold."""

    def check(results: Results) -> Finding:
        found = [_known(one, results) for one in checks]
        words = tuple(line for one in found for line in one.measured)
        return Finding(words, together([one.verdict for one in found]))

    return check


CLAIMS = (
    Claim(
        "Pretraining converges faster and further",
        "§4.5, figure 4",
        all_of(converges_faster, lower("diffusionbert", "d3pm"), lower("diffusionbert", "d3pm-tad")),
    ),
    Claim("30 % of the budget matches all of it", "§4.5", budget(0.3, "diffusionbert", matches=True)),
    Claim("30 % of the budget beats D3PM's full one", "figure 4", budget(0.3, "d3pm", matches=False)),
    Claim(
        "Pretrained, TAD beats PTE beats LTE",
        "§4.3, table 2",
        all_of(lower("diffusionbert", "diffusionbert-pte"), lower("diffusionbert-pte", "diffusionbert-lte", far=True)),
    ),
    Claim("From scratch, TAD hurts", "§4.3, table 2", lower("d3pm", "d3pm-tad", far=True)),
    Claim(
        "The spindle gains 19 % for DiffusionBERT",
        "§4.3, table 2",
        spindle_gains("diffusionbert", 0.19, "diffusionbert-spindle-paper"),
    ),
    Claim("The spindle gains 18 % for D3PM", "§4.3, in words", spindle_gains("d3pm", 0.18)),
    Claim(
        f"The spindle gains {100 * (1 - PAPER['d3pm-spindle'][0] / PAPER['d3pm'][0]):.1f} % for D3PM",
        "table 2",
        spindle_gains("d3pm", 1 - PAPER["d3pm-spindle"][0] / PAPER["d3pm"][0]),
    ),
    Claim("More steps bring no substantial improvement", "§4.2, table 3", few_steps_suffice),
    Claim(
        "DiffusionBERT beats Diffusion-LM",
        "§4.3, table 2",
        all_of(
            lower("diffusionbert", "diffusion-lm", "grid", "vectors"), writes_better("diffusionbert", "diffusion-lm")
        ),
    ),
    Claim(
        "Diffusion-LM does not profit from BERT's weights",
        "§4.3, table 2",
        lower("diffusion-lm", "diffusion-lm-bert", "vectors"),
    ),
    Claim(
        "DiffusionBERT beats BERT-Mouth in perplexity",
        "§4.3, table 2",
        lower("diffusionbert", "bert-mouth", "continuous"),
    ),
    Claim("DiffusionBERT beats BERT-Mouth in BLEU", "§4.3, table 2", writes_better("diffusionbert", "bert-mouth")),
    Claim(
        "BERT-Mouth writes better in random order than from left to right",
        "§4.2",
        writes_better("bert-mouth", "bert-mouth-left-to-right", as_diverse=True),
    ),
    Claim("A better trade-off than D3PM's", "§4.4, figure 3", trades_off("diffusionbert", "d3pm", above)),
    Claim(
        "Comparable with a decoder from scratch",
        "§4.4, figure 3",
        trades_off("diffusionbert", "decoder", lambda found: within(found, -COMPARABLE, COMPARABLE)),
    ),
    Claim("Behind a pretrained decoder", "§4.4, figure 3", trades_off("diffusionbert", "decoder-pretrained", below)),
    Claim("Behind a pretrained decoder in perplexity", "table 3", behind_exact("diffusionbert", "decoder-pretrained")),
    Claim(
        "Behind a decoder from scratch in perplexity (not in the paper)", "–", behind_exact("diffusionbert", "decoder")
    ),
)
"""In the order of the paper's argument."""
