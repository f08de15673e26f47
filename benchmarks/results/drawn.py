"""The sections of docs/results.md with pictures, and table 1: table 3 and figures 2, 3 and 4.

Each section is a function from results, of which anything may be missing, and the folder of pictures to Markdown.
"""

from __future__ import annotations

from pathlib import Path

from kept import Results, exp
from plan import LONG
from published import PAPER_STEPS
from wording import figure, grid, kind, missing, nats

from diffusionbert import figures
from diffusionbert.assessment.tables import escaped_for_markdown
from diffusionbert.checkpoints import read_json
from diffusionbert.paper import denoising
from diffusionbert.paper.targets import (
    BY_STEPS,
    CONVERGING,
    MAIN,
    TRADED_OFF,
    Row,
    curve,
    draw_tradeoffs,
    short_title,
    title,
)

DRAWN = 10_000
"""A perplexity above this is not drawn: all others would lie on one line."""


# ---- table 3, figures 3 and 4 ---------------------------------------------------------------------------------------


def speeds(results: Results, pictures: Path) -> str:
    """Table 3 and its picture."""
    heading = "## Steps, seconds, perplexity (table 3)"
    folder = next((one for one in results.seeds if results.over_steps(BY_STEPS[0], one)), None)
    if folder is None:
        return f"{heading}\n\nNot run yet."
    lines, curves, left_out = [], [], []
    for system in BY_STEPS:
        found = results.over_steps(system, folder)
        name = short_title(system, results.experiments(folder)[system]) if found else system
        points = []
        for steps, one in found.items():
            seconds = one.generation.speed.seconds_per_sample
            paper = str(PAPER_STEPS.get(system, {}).get(steps, "–"))
            calls = f"{one.generation.speed.calls_per_sample:.0f}"
            lines.append((name, kind(one), str(steps), calls, f"{seconds:.4f}", figure(one), paper))
            points.append((seconds, exp(nats(one)), str(steps), kind(one)))
        if points and all(value < DRAWN for _, value, _, _ in points):
            xs, ys, notes, kinds = zip(*points, strict=True)
            curves.append(figures.Curve(name, xs, ys, kinds[0], notes=notes))
        elif points:
            left_out.append(name)
    if curves:
        figures.speed(curves, pictures / "speed.png")
    texts = next(iter(results.over_steps(BY_STEPS[0], folder).values())).generation
    header = "system", "kind", "steps", "calls", "seconds a sample", "perplexity a token", "paper"
    words = (
        f"Nothing else ran on the chip ({texts.speed.device}); {texts.speed.batch} samples of "
        f"{texts.sampling.length} tokens are written at once, and a sample's seconds are its share. A bound is "
        "taken over as many steps as are written in, BERT-Mouth's over all orders of writing. Calls are those of the "
        "network a sample: steps in which nothing "
        "is revealed are skipped, for each sample by itself with the linear schedule; with the spindle and top-k, "
        "samples go through their steps together, which takes longer for the same calls."
    )
    note = f"\n\nNot drawn, because it is far above: {', '.join(left_out)}." if left_out else ""
    absent = missing(system for system in BY_STEPS if not results.over_steps(system, folder))
    picture = "\n\n![perplexity and seconds](results/speed.png)" if curves else ""
    return f"{heading}\n\n{words}\n\n{grid(header, lines, left=2)}{picture}{note}{absent}"


def tradeoffs(results: Results, pictures: Path) -> str:
    """Figure 3."""
    heading = "## Quality and diversity (figure 3)"
    for folder in results.seeds:
        points = {system: results.tradeoff(system, folder) for system in TRADED_OFF}
        known = {system: found for system, found in points.items() if found}
        if known:
            break
    else:
        return f"{heading}\n\nNot run yet."
    series = draw_tradeoffs(known, pictures / "tradeoffs.png")
    number_of = next(iter(next(iter(known.values())).values())).generation.sampling.number
    lines = [
        (
            one.name,
            ", ".join(
                f"{knob} {bleu:.3f} / {own:.3f}"
                for knob, bleu, own in zip(one.knobs or (), one.bleu, one.self_bleu, strict=True)
            ),
        )
        for one in series
    ]
    return (
        f"{heading}\n\nBLEU-4 of {number_of:,} samples and self-BLEU of as many others at each setting, bars of ± 1.96 "
        "standard errors; up and to the left is better. Real sentences are the star; they are shorter than the "
        "samples, and so no goal. Decoders are varied by temperature, the others by top-k, as in the paper.\n\n"
        "![quality and diversity](results/tradeoffs.png)\n\n"
        + grid(("system", "BLEU-4 / self-BLEU"), lines, left=2)
        + missing(system for system in TRADED_OFF if system not in known)
    )


def convergence(results: Results, pictures: Path) -> str:
    """Figure 4."""
    trained = results.experiments("seed0")
    known = [name for name in CONVERGING if name in trained]
    absent = missing(name for name in CONVERGING if name not in trained)
    if not known:
        return f"## While training (figure 4){absent}"
    curves = [curve(results.run(name), title(Row(name), trained[name])) for name in known]
    figures.convergence(curves, pictures / "convergence.png")
    more, longer = "", f"steps{LONG}"
    trained_longer = [name for name in CONVERGING if name in results.experiments(longer)]
    if trained_longer:
        runs = [curve(results.run(name, longer), title(Row(name), trained[name])) for name in trained_longer]
        figures.convergence(runs, pictures / "convergence-longer.png")
        more = f"\n\nTrained for {LONG:,} steps:\n\n![validation while training longer](results/convergence-longer.png)"
    sentences = trained[known[0]].training.validation_sentences
    ends = ", ".join(f"`{name}` {one.ys[-1]:.3f}" for name, one in zip(known, curves, strict=True))
    return (
        f"## While training (figure 4)\n\nThe bound on {sentences:,} held-out sentences, averaged weights, seed 0; "
        f"bands of ± 1.96 standard errors. At the end: {ends}; where lines lie on each other, the last drawn is seen."
        f"\n\n![validation while training](results/convergence.png){more}{absent}"
    )


# ---- figure 2, table 1 ----------------------------------------------------------------------------------------------


def spindle(results: Results, pictures: Path) -> str:
    """Figure 2."""
    path = next((path for path in sorted(results.root.glob("seed*/figure2.json"))), None)
    if path is None:
        return "## The spindle (figure 2)\n\nNot run yet."
    figures.survival_curves([figures.Survival(**one) for one in read_json(path)], pictures / "survival.png")
    middle = {
        one["word"]: one["survival"][len(one["survival"]) // 2] for one in read_json(path) if one["word"] != "linear"
    }
    first, last = min(middle, key=lambda word: middle[word]), max(middle, key=lambda word: middle[word])
    parts = [f"`{word}`" for word in middle if word.startswith("##")]
    split = f" The vocabulary splits a word, so that {' and '.join(parts)} is a part of one." if parts else ""
    return (
        "## The spindle (figure 2)\n\nHow likely each word of the paper's sentence is still visible, with the counts "
        f"of this training text and the mean of the sentence itself. Here `{first}` is hidden first and `{last}` last."
        f"{split} A line at 1 is clamped: the spindle would ask for more than that.\n\n"
        "![survival](results/survival.png)"
    )


def written(results: Results, _: Path) -> str:
    """Table 1."""
    path = next((path for path in sorted(results.root.glob("seed*/table1.json"))), None)
    if path is None:
        return "## A sentence being written (table 1)\n\nNot run yet."
    rows = denoising.to_markdown(denoising.from_json(read_json(path))).rstrip()
    return (
        "## A sentence being written (table 1)\n\nOne each, unselected; what is new is bold. t is the time, and for "
        "BERT-Mouth the share of words that are still hidden; when none is, it goes on rewriting. DiffusionBERT has "
        f"the spindle here, as in the paper, and no step is skipped.\n\n{rows}"
    )


def texts(results: Results, _: Path) -> str:
    """What each system writes."""
    rows = [row for row in MAIN if results.has(row.key) and any(results.evaluation(row.key).samples)]
    if not rows:
        return "## What they write\n\nNot run yet."
    lines = [(f"`{row.key}`", escaped_for_markdown(results.evaluation(row.key).samples[0])) for row in rows]
    table = grid(("system", "text"), lines, left=2)
    return (
        "## What they write\n\nThe first sample of each, unselected; more are in `docs/results/seed0/evaluations`."
        f"\n\n<details><summary>{len(rows)} samples</summary>\n\n{table}\n\n</details>"
    )
