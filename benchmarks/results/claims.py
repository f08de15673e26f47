"""The claims of He et al. 2022, "DiffusionBERT", one by one, each with its check (see checks.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import final

from checks import (
    COMPARABLE,
    Check,
    all_of,
    behind_exact,
    budget,
    converges_faster,
    faster_and_better,
    few_steps_suffice,
    if_learnt,
    known,
    loses_more,
    lower,
    spindle_gains,
    trades_off,
    writes_better,
)
from kept import Results
from plan import LONG
from verdicts import Finding, above, below, within

FEWER_STEPS = "Diffusion-LM writes in fewer steps than in the paper, which takes all 2,000"


@final
@dataclass(frozen=True)
class Claim:
    """What the paper says, where, and how it is checked."""

    words: str
    where: str
    check: Check
    note: str | None = None
    """What a reader of the verdict should know."""

    def judge(self, results: Results) -> Finding:
        """The finding; if rows are missing, which."""
        found = known(self.check, results)
        return replace(found, measured=(*found.measured, f"note: {self.note}")) if self.note else found


CLAIMS = (
    Claim(
        "Pretraining converges faster and further",
        "§4.5, figure 4",
        all_of(
            converges_faster,
            lower("diffusionbert", "d3pm"),
            lower("diffusionbert", "d3pm-tad"),
            lower("diffusionbert", "d3pm", steps=LONG),
        ),
        "further at every budget that was run, but by less and less: where both end was not seen",
    ),
    Claim("30 % of the budget matches all of it", "§4.5", budget(0.3, "diffusionbert", matches=True)),
    Claim("30 % of the budget beats D3PM's full one", "figure 4", budget(0.3, "d3pm", matches=False)),
    Claim(
        "Pretrained, TAD beats PTE, and LTE lags far behind",
        "§4.3, table 2",
        all_of(lower("diffusionbert", "diffusionbert-pte"), lower("diffusionbert-pte", "diffusionbert-lte", far=True)),
        "here what is added to the layers starts at zero, so that LTE starts as the pretrained network itself; the "
        "paper does not say how its own starts, and one that starts at random may well lag behind",
    ),
    Claim(
        "The same in generation quality",
        "§4.3, table 2",
        all_of(
            writes_better("diffusionbert", "diffusionbert-pte", as_diverse=True),
            writes_better("diffusionbert-pte", "diffusionbert-lte", as_diverse=True),
        ),
    ),
    Claim("From scratch, TAD is quite harmful", "§4.3, table 2", lower("d3pm", "d3pm-tad", far=True)),
    Claim(
        "The spindle gains 19 % for DiffusionBERT",
        "§4.3, table 2",
        spindle_gains("diffusionbert", 0.19, "diffusionbert-spindle-paper"),
    ),
    Claim("The spindle gains 18 % for D3PM", "§4.3, in words", spindle_gains("d3pm", 0.18, "d3pm-spindle-paper")),
    Claim("The spindle gains something for D3PM", "table 2: 5.9 %", lower("d3pm-spindle", "d3pm")),
    Claim(
        "The spindle improves generation quality",
        "§4.3",
        all_of(
            writes_better("d3pm-spindle", "d3pm", as_diverse=True),
            writes_better("diffusionbert-spindle-paper", "diffusionbert", as_diverse=True),
            writes_better("diffusionbert-spindle", "diffusionbert", as_diverse=True),
        ),
    ),
    Claim(
        "More steps bring no substantial improvement",
        "§4.2; its table 3 says otherwise",
        all_of(few_steps_suffice("diffusionbert"), few_steps_suffice("diffusionbert-spindle")),
    ),
    Claim(
        "Fewer steps cost Diffusion-LM more than DiffusionBERT",
        "§4.2",
        if_learnt(loses_more("diffusion-lm", "diffusionbert"), "diffusion-lm"),
    ),
    Claim(
        "DiffusionBERT beats Diffusion-LM",
        "§4.3, table 2",
        if_learnt(
            all_of(
                lower("diffusionbert", "diffusion-lm", "grid", "vectors"),
                writes_better("diffusionbert", "diffusion-lm"),
            ),
            "diffusion-lm",
        ),
        FEWER_STEPS,
    ),
    Claim(
        "Diffusion-LM does not profit from BERT's weights",
        "§4.3, table 2",
        if_learnt(
            all_of(
                lower("diffusion-lm", "diffusion-lm-bert", "vectors"),
                writes_better("diffusion-lm", "diffusion-lm-bert"),
            ),
            *("diffusion-lm", "diffusion-lm-bert"),
        ),
        FEWER_STEPS,
    ),
    Claim(
        "DiffusionBERT beats BERT-Mouth in perplexity",
        "§4.3, table 2",
        lower("diffusionbert", "bert-mouth", "continuous"),
    ),
    Claim(
        "DiffusionBERT beats BERT-Mouth in BLEU",
        "§4.3, table 2",
        writes_better("diffusionbert", "bert-mouth"),
        "of BLEU-4 alone, as the paper puts it; the samples have more in common, too",
    ),
    Claim(
        "DiffusionBERT is better than BERT-Mouth in as little time",
        "§4.5, table 3",
        faster_and_better("diffusionbert", "bert-mouth"),
    ),
    Claim(
        "BERT-Mouth performs better in random order than from left to right",
        "§4.2",
        writes_better("bert-mouth", "bert-mouth-left-to-right", as_diverse=True),
    ),
    Claim("A better trade-off than D3PM's", "§4.4, figure 3", trades_off("diffusionbert", "d3pm", above)),
    Claim(
        "Comparable with a decoder from scratch",
        "§4.4, figure 3",
        trades_off("diffusionbert", "decoder", lambda found: within(found, -COMPARABLE, COMPARABLE)),
    ),
    Claim(
        "Behind a pretrained decoder",
        "§4.4, figure 3",
        trades_off("diffusionbert", "decoder-pretrained", below),
    ),
    Claim("Behind a pretrained decoder in perplexity", "table 3", behind_exact("diffusionbert", "decoder-pretrained")),
    Claim(
        "Behind a decoder from scratch in perplexity (not in the paper)", "–", behind_exact("diffusionbert", "decoder")
    ),
)
"""In the order of the paper's argument."""


@cache
def judged(results: Results) -> tuple[Finding, ...]:
    """What becomes of each: once, though several sections say it."""
    return tuple(claim.judge(results) for claim in CLAIMS)
