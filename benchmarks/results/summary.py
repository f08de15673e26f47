"""The first section of docs/results.md: what was found, in a few lines, each from the sections below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from checks import known, lower
from claims import CLAIMS, judged
from kept import NotRun, Results
from sections import lead_of
from verdicts import Verdict, against_exact
from wording import number, primary, share, times

OWN, RIVAL = "diffusionbert-bell", "decoder"


def summary(results: Results, _: Path) -> str:
    """As many lines as there are results for."""
    found = [_if_run(line, results) for line in (_ahead, _judged, _recipe, _against_decoder, _elsewhere)]
    return "\n".join(["## In short", "", *(f"- {line}" for line in found if line)])


def _if_run(line: Callable[[Results], str], results: Results) -> str | None:
    try:
        return line(results)
    except NotRun:
        return None


def _ahead(results: Results) -> str:
    found = []
    for steps, folder in results.budgets.items():
        lead = lead_of(results, folder)
        if lead is not None:
            words = f"{number(lead.own)} against {number(lead.theirs)} after {steps:,} steps"
            found.append(f"{words} (ratio {times(lead.apart)})")
    if not found:
        raise NotRun("`diffusionbert` and `d3pm`")
    return (
        "**Pretrained against from scratch**, DiffusionBERT and the best D3PM, perplexity a token by the same bound: "
        f"{'; '.join(found)}. [More](#how-far-ahead)"
    )


def _judged(results: Results) -> str:
    count = Counter(finding.verdict for finding in judged(results))
    words = ", ".join(f"*{verdict.value}* {count[verdict]}" for verdict in Verdict if count[verdict])
    return f"**Of {len(CLAIMS)} claims**, one of them ours: {words}. [More](#the-papers-claims)"


def _recipe(results: Results) -> str:
    finding = known(lower(OWN, "diffusionbert"), results)
    if finding.verdict is Verdict.NOT_RUN:
        raise NotRun(OWN)
    return (
        f"**Times drawn from a bell** in training, perplexity a token by the same bound: {finding.measured[0]}. "
        "[More](#beyond-the-paper-the-best-recipe)"
    )


def _against_decoder(results: Results) -> str:
    found = []
    for steps, folder in results.budgets.items():
        if results.has(OWN, folder) and results.has(RIVAL, folder):
            apart = against_exact(results.scores(OWN, "grid", folder), results.scores(RIVAL, "exact", folder))
            found.append(f"{share(apart)} after {steps:,} steps")
    if not found:
        raise NotRun(RIVAL)
    return (
        f"**Against a decoder from scratch** of the same size, `{OWN}`'s bound as a share of its exact perplexity, the "
        f"length given and the length paid for: {'; '.join(found)}. The second below 1 (bold) proves the pretrained "
        "network better; the decoder had no pretraining. [More](#at-equal-steps)"
    )


def _elsewhere(results: Results) -> str:
    own, theirs = (results.evaluation(f"{key}-other-text") for key in (OWN, RIVAL))
    found = against_exact(own.scores[primary(own)], theirs.scores["exact"])
    return f"**Out of domain** that share is {share(found)} after the training of table 2. [More](#out-of-domain)"
