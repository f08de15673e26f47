"""Compares the cost and results of two search budgets for fillings: the default, and one that ranks many candidates.

python benchmarks/filling.py sentences.txt 200          # about ten minutes on two threads

Each sentence loses one to six tokens, or one span of unknown length. The best fillings of both budgets are scored by
the same estimate: all subsets of up to six blanks, and 48 orders of the context.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import pad

import diffusionbert
from diffusionbert.data.canvas import batch_of
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.inference.filling import Gap, TokenFilling, fill_gaps
from diffusionbert.inference.filling_nats import SearchBudget, filling_nats

ENGINE = diffusionbert.load().engine
VOCABULARY, MASK = ENGINE.vocabulary, ENGINE.vocabulary.mask_id
SPECIAL = pad(VOCABULARY.special, (0, len(ENGINE.statistics.allowed) - VOCABULARY.size))
BUDGETS = {"all": SearchBudget(beams=32, draws=16, ranked=200, context_orders=4), "default": SearchBudget()}
EXACT = SearchBudget(exact_up_to=6, orders=48)
CALLS: list[int] = []
ENGINE.network.register_forward_pre_hook(lambda _, inputs: CALLS.append(len(inputs[0])))


def gap(tokens: list[int]) -> Gap:
    batch = batch_of(VOCABULARY, [tokens])
    canvas = replace(batch, editable=batch.tokens == MASK)
    context = ~canvas.editable & ~VOCABULARY.special[canvas.tokens]
    return Gap(canvas, context, ENGINE.length_nats((canvas.editable | context).sum(dim=1)))


def request(tokens: list[int], number: int) -> list[Gap]:
    """The gaps of a sentence; three of five requests have masks, two a blank of up to four tokens."""
    rng = random.Random(number)
    if number % 5 < 3:
        masked = set(rng.sample(range(1, len(tokens) - 1), 1 + number % 6))
        return [gap([MASK if position in masked else token for position, token in enumerate(tokens)])]
    start, size = rng.randint(1, len(tokens) - 5), rng.randint(1, 4)
    return [gap([*tokens[:start], *[MASK] * length, *tokens[start + size :]]) for length in range(1, 5)]


def found(gaps: list[Gap], budget: SearchBudget) -> tuple[TokenFilling, tuple[int, int, float]]:
    """The best filling, and the calls, sequences and seconds it took."""
    CALLS.clear()
    start, warper = time.perf_counter(), LogitsWarper(forbidden=ENGINE.statistics.never_sampled)
    [[best]] = fill_gaps(ENGINE.network, [gaps], MASK, 1, 0, warper, special=SPECIAL, budget=budget)
    return best, (len(CALLS), sum(CALLS), time.perf_counter() - start)


def nats(gaps: list[Gap], best: TokenFilling) -> float:
    """The nats of a filling by an estimate that neither search has used."""
    filled = replace(gaps[best.gap].canvas, tokens=best.tokens[None])
    blank = [replace(one.canvas, editable=one.context) for one in gaps]
    scored = [
        float(filling_nats(ENGINE.network, x0, MASK, 99, special=SPECIAL, budget=EXACT)) for x0 in (filled, *blank)
    ]
    log_p = -torch.tensor([own + float(one.length_nats) for own, one in zip(scored[1:], gaps, strict=True)])
    return scored[0] - float(log_p.log_softmax(dim=0)[best.gap])


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    texts = [tokens for tokens in VOCABULARY.encode(lines[: 20 * int(sys.argv[2])]) if 10 <= len(tokens) <= 18]
    requests = [request(tokens, number) for number, tokens in enumerate(texts[: int(sys.argv[2])])]
    results = [[found(gaps, budget) for budget in BUDGETS.values()] for gaps in requests]
    costs = torch.tensor([[cost for _, cost in row] for row in results]).mean(dim=0)
    for name, (calls, sequences, seconds) in zip(BUDGETS, costs.tolist(), strict=True):
        print(f"{name}: {calls:.1f} calls, {sequences:.0f} sequences, {seconds:.2f} s per text")
    scores = [[nats(gaps, best) for best, _ in row] for gaps, row in zip(requests, results, strict=True)]
    more = torch.tensor([new - old for old, new in scores])
    error = 1.96 * float(more.std()) / len(more) ** 0.5
    print(f"nats of the best filling, default - all: {float(more.mean()):.4f} ± {error:.4f}")
