"""Ways to check a claim against kept results: perplexities, budgets, steps, samples, trade-offs.

A check says what was measured and gives a verdict, which is computed and never typed (see verdicts.py); it raises
`NotRun` if a row is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kept import NotRun, Results, perplexity
from published import PAPER, PAPER_STEPS
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
from wording import nats, number, primary

from diffusionbert.likelihood.scores import Scores
from diffusionbert.paper.targets import curve

RIVALS = ("d3pm", "d3pm-tad", "d3pm-spindle", "d3pm-uniform")
"""The rows of D3PM that have a bound."""
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


def known(check: Check, results: Results) -> Finding:
    """The finding; if rows are missing, which."""
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


def lower(
    first: str, second: str, way: str = "grid", other: str | None = None, *, far: bool = False, steps: int | None = None
) -> Check:
    """The first has a lower perplexity than the second, on the same sentences; `far` if the paper says it is large.

    Of all seeds, or of a budget of training steps.
    """

    def check(results: Results) -> Finding:
        folders = common_seeds(results, first, second) if steps is None else [results.budget(steps, first, second)]
        pairs = [(results.scores(first, way, one), results.scores(second, other or way, one)) for one in folders]
        found = [difference(*pair) for pair in pairs]
        words = [
            f"{number(perplexity(one))} against {number(perplexity(two))}, {apart.per_cent}"
            for (one, two), apart in zip(pairs, found, strict=True)
        ]
        ours, theirs = (PAPER.get(key, PAPER.get(f"{key}-paper")) for key in (first, second))
        paper, said = None, ""
        if ours and theirs:
            paper = math.log(ours[0] / theirs[0])
            quantity = " by its own quantity" if "spindle" in first else ""
            said = f"; the paper{quantity}: {ours[0]} against {theirs[0]}, {change(paper)}" if steps is None else ""
        during = "" if steps is None else f" in {steps:,} steps"
        seeds = folders if steps is None else ["seed0"]
        ways = "" if way == "grid" and other is None else f" ({way if other is None else f'{way} and {other}'})"
        measured = f"`{first}` against `{second}`{ways}{during}: {listed(seeds, words)}{said}"
        return Finding((measured,), below(found, paper=paper if far else None), len(folders))

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
        return Finding((f"`{first}` against `{second}`: {listed(folders, words)}",), verdict, len(folders))

    return check


def spindle_gains(base: str, claimed: float, by_paper: str) -> Check:
    """By how much perplexity changes by the strict bound, with either mean, and by the paper's quantity."""

    def judged(results: Results, key: str) -> Finding:
        folders = common_seeds(results, base, key)
        found = [difference(results.scores(key, "grid", one), results.scores(base, "grid", one)) for one in folders]
        values = [perplexity(results.scores(name, "grid", folders[0])) for name in (key, base)]
        first = f"{number(values[0])} against {number(values[1])} with the first seed, "
        measured = f"`{key}` against `{base}`: {first}{listed(folders, [one.per_cent for one in found])}"
        return Finding((measured,), reaching(found, math.log1p(-claimed)), len(folders))

    def check(results: Results) -> Finding:
        strict = [judged(results, f"{base}-spindle")]
        sentence = f"{base}-spindle-sentence"
        strict += [judged(results, sentence)] if results.has(sentence) else []
        verdict = either([one.verdict for one in strict])
        words = [f"strict: {line}" for one in strict for line in one.measured]
        theirs = known(lambda found: judged(found, by_paper), results)
        words += [f"by the paper's quantity: {line}" for line in theirs.measured]
        if verdict is not Verdict.HOLDS:
            verdict = {Verdict.HOLDS: Verdict.BY_PAPER, Verdict.NOT_RUN: Verdict.NOT_RUN}.get(theirs.verdict, verdict)
        return Finding(tuple(words), verdict, strict[0].seeds)

    return check


def budget(share: float, rival: str, *, matches: bool) -> Check:
    """DiffusionBERT with a share of the steps against a rival with all of them; each had its own learning rates."""

    def check(results: Results) -> Finding:
        full = next((steps for steps, folder in results.budgets.items() if folder == "seed0"), 0)
        steps = round(share * full)
        folder = results.budget(steps, "diffusionbert")
        one, two = results.scores("diffusionbert", "grid", folder), results.scores(rival, "grid")
        found = difference(one, two)
        words = f"{number(perplexity(one))} against {number(perplexity(two))}, {found.per_cent} (seed 0 alone)"
        verdict = below([found], math.log1p(MATCHES) if matches else 0.0)
        return Finding((f"`diffusionbert` in {steps:,} steps against `{rival}` in {full:,}: {words}",), verdict, 1)

    return check


def converges_faster(results: Results) -> Finding:
    """At every validation the pretrained network is below the one from scratch that ends lowest."""
    folders, verdicts, words = [], [], []
    for folder in results.seeds:
        trained = results.experiments(folder)
        rivals = [curve(results.run(name, folder), name) for name in RIVALS if name in trained]
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
    measured = f"validation of `diffusionbert`, nats a token: {listed(folders, words)}"
    return Finding((measured,), agreed(verdicts), len(folders))


def few_steps_suffice(system: str) -> Check:
    """The last multiplication of the number of steps brings less than a substantial share of perplexity."""

    def check(results: Results) -> Finding:
        folders = [folder for folder in results.seeds if len(results.over_steps(system, folder)) > 1]
        if not folders:
            raise NotRun(f"table 3 of `{system}`")
        found, words = [], []
        for folder in folders:
            by_steps = {steps: one.scores["grid"] for steps, one in results.over_steps(system, folder).items()}
            *_, fewer, more = by_steps
            found.append(difference(by_steps[more], by_steps[fewer]))
            all_steps = ", ".join(f"{steps}: {number(perplexity(scores))}" for steps, scores in by_steps.items())
            words.append(f"perplexity over steps {all_steps}; from {fewer} to {more} {found[-1].per_cent}")
        theirs = PAPER_STEPS.get(system)
        said = (
            f"; the paper's own table, from 128 to 512: {change(math.log(theirs[512] / theirs[128]))}" if theirs else ""
        )
        verdict = within(found, math.log1p(-SUBSTANTIAL), math.inf)
        return Finding((f"`{system}`: {listed(folders, words)}{said}",), verdict, len(folders))

    return check


FEWER = 8
"""By how much steps are cut where a claim is of fewer steps."""


def loses_more(first: str, second: str) -> Check:
    """The first's perplexity rises by more than the second's when both are cut to an eighth of their steps."""

    def pair(results: Results, system: str, folder: str) -> tuple[Scores, Scores] | None:
        by_steps = results.over_steps(system, folder)
        most = max(by_steps, default=0)
        if most // FEWER not in by_steps:
            return None
        fewer, more = by_steps[most // FEWER], by_steps[most]
        return fewer.scores[primary(fewer)], more.scores[primary(more)]

    def check(results: Results) -> Finding:
        folders, found, words = [], [], []
        for folder in results.seeds:
            ours, theirs = (pair(results, system, folder) for system in (first, second))
            if ours and theirs:
                folders.append(folder)
                # (fewer - more) of the first less (fewer - more) of the second, sentence by sentence
                crossed = (
                    replace(ours[0], nats=ours[0].nats + theirs[1].nats),
                    replace(ours[1], nats=ours[1].nats + theirs[0].nats),
                )
                found.append(difference(*crossed))
                words.append(f"{difference(*ours).per_cent} against {difference(*theirs).per_cent}")
        if not folders:
            raise NotRun(f"table 3 of `{first}` and `{second}`")
        measured = f"`{first}` against `{second}`, by an eighth of the steps: {listed(folders, words)}"
        return Finding((measured,), above(found), len(folders))

    return check


def faster_and_better(first: str, second: str) -> Check:
    """Where the second is fastest in table 3, the first is as fast and has a lower bound."""

    def check(results: Results) -> Finding:
        folders, verdicts, words = [], [], []
        for folder in results.seeds:
            rival = next(iter(results.over_steps(second, folder).values()), None)
            if rival is None:
                continue
            limit = rival.generation.speed.seconds_per_sample
            own = {
                steps: one
                for steps, one in results.over_steps(first, folder).items()
                if one.generation.speed.seconds_per_sample <= limit
            }
            if not own:
                raise NotRun(f"table 3 of `{first}`")
            steps, best = min(own.items(), key=lambda item: nats(item[1]))
            apart = difference(best.scores[primary(best)], rival.scores[primary(rival)])
            verdicts.append(below([apart]))
            folders.append(folder)
            seconds = best.generation.speed.seconds_per_sample, limit
            words.append(
                f"{number(perplexity(best.scores[primary(best)]))} in {1000 * seconds[0]:.1f} ms a sample ({steps} "
                f"steps) against {number(perplexity(rival.scores[primary(rival)]))} in {1000 * seconds[1]:.1f} ms"
            )
        if not folders:
            raise NotRun(f"table 3 of `{second}`")
        return Finding((f"`{first}` against `{second}`: {listed(folders, words)}",), agreed(verdicts), len(folders))

    return check


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
        return Finding((measured,), Verdict.UNDECIDED if as_diverse and is_bought else verdict, len(folders))

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
        words = ["no self-BLEU in common" if one is None else str(one) for one in found]
        measured = f"BLEU-4 of `{first}` at the same self-BLEU as `{second}`: {listed(folders, words)}"
        verdict = judged([one.mean for one in known]) if len(known) == len(found) else Verdict.UNDECIDED
        return Finding((measured,), verdict, len(folders))

    return check


def all_of(*checks: Check) -> Check:
    """Every part must hold; beside each stands what becomes of it, unless all fare alike."""

    def check(results: Results) -> Finding:
        found = [known(one, results) for one in checks]
        is_told = len({one.verdict for one in found}) > 1
        words = tuple(
            f"{line} (*{one.verdict.value}*)" if is_told and one.verdict is not Verdict.NOT_RUN else line
            for one in found
            for line in one.measured
        )
        return Finding(words, together([one.verdict for one in found]), min(one.seeds for one in found))

    return check


def if_learnt(check: Check, *systems: str) -> Check:
    """Nothing follows from a system that does worse than word frequencies alone."""

    def checked(results: Results) -> Finding:
        found = check(results)
        limit = results.frequencies()
        worse = [
            f"`{name}` ({nats(results.evaluation(name)):.1f})" for name in systems if _is_above(results, name, limit)
        ]
        if not worse:
            return found
        words = f"above the {limit:.2f} nats a token of word frequencies alone: {', '.join(worse)}"
        return Finding((*found.measured, words), Verdict.UNLEARNT, found.seeds)

    return checked


def _is_above(results: Results, name: str, limit: float) -> bool:
    return results.has(name) and nats(results.evaluation(name)) > limit
