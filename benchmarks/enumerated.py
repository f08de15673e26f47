"""Prints the tables of docs/mathematics.md: bounds and the paper's quantity on enumerable languages.

python benchmarks/enumerated.py          # about a minute
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "objectives"))

from languages import PAPER, SKEWED, Bayes, exact_nats
from released_spindle import ReleasedProcess
from rich.console import Console
from rich.table import Table
from test_bounds import best, expectation, total_probability

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle, uniform_grid
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.discrete_time import DiscreteTime, Quantity

SCHEDULES = {
    "linear": Linear(),
    "spindle, corpus mean": Spindle(0.3, Mean.CORPUS, floor=0.05),
    "spindle, sentence mean": Spindle(0.3, Mean.SENTENCE, floor=0.05),
}


def totals() -> Table:
    """Σ exp(-nats) and expected nats with the Bayes denoiser, 16 steps, λ = 0.3, 5 % linear floor.

    The released code has no floor, and its frequencies are those of 10,000 sentences.
    """
    table = Table(title=f"The Bayes denoiser on a language of entropy {PAPER.entropy:.4f}, T = 16")
    for column in ("schedule", "quantity", "Σ exp(-nats)", "expected nats", "kind"):
        table.add_column(column)
    rows = []
    for name, schedule in SCHEDULES.items():
        process = Absorbing(schedule, PAPER.mask_id, PAPER.information(), reweighted=False)
        rows += [(name, quantity.value, process, quantity) for quantity in Quantity]
    statistics = TokenStatistics(PAPER.mask_id, -1, PAPER.allowed, (), PAPER.counts(1e4))
    rows.append(("spindle, as released", "released", ReleasedProcess(0.3, statistics), Quantity.PAPER))
    for name, shown, process, quantity in rows:
        objective = DiscreteTime(process, uniform_grid(16), quantity)
        nats = exact_nats(objective, Bayes(PAPER, process), PAPER.batch())
        figures = (f"{total_probability(nats):.4f}", f"{expectation(PAPER, nats):.4f}")
        table.add_row(name, shown, *figures, objective.likelihood.value)
    return table


def best_agnostic() -> Table:
    """Expected nats of the best time-agnostic network, λ = 0.3, no floor."""
    steps = (16, 64, 256)
    table = Table(title=f"The best time-agnostic network on a language of entropy {SKEWED.entropy:.4f}")
    for column in ("schedule", "quantity", *(f"T = {n}" for n in steps), "continuous"):
        table.add_column(column)
    for name, schedule in (("linear", Linear()), ("spindle, corpus mean", Spindle(0.3))):
        for reweighted in (True, False) if schedule.by_token else (True,):
            process = Absorbing(schedule, SKEWED.mask_id, SKEWED.information(), reweighted)
            figures = [f"{best(SKEWED, DiscreteTime(process, uniform_grid(n)))[1]:.4f}" for n in steps]
            limit = f"{best(SKEWED, ContinuousTime(process))[1]:.4f}" if reweighted else "infinite"
            table.add_row(name, f"strict{'' if reweighted else ', not reweighted'}", *figures, limit)
    process = Absorbing(Spindle(0.3), SKEWED.mask_id, SKEWED.information(), reweighted=False)
    paper = [f"{best(SKEWED, DiscreteTime(process, uniform_grid(n), Quantity.PAPER))[1]:.4f}" for n in steps]
    table.add_row("spindle, corpus mean", "paper (no bound)", *paper, "")
    return table


if __name__ == "__main__":
    console = Console()
    console.print(totals())
    console.print(best_agnostic())
