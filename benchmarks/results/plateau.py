"""The section of docs/results.md on training from scratch: when a BERT begins to use context, by learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kept import NotRun, Results
from wording import broken, grid

from diffusionbert.checkpoints import read_json

LEFT = 6.5
"""Nats a token. A network that knows how frequent words are, and nothing else, needs about 6.9 on this text."""


def plateau(results: Results, _: Path) -> str:
    """Probes that chose the learning rate, one row each."""
    file = results.root / "plateau" / "probes.json"
    if not file.exists():
        raise NotRun("probes of the learning rate")
    probes = read_json(file)
    rows = [_row(probe) for probe in probes]
    header = ("system", "tokens a step", "learning rate", "warm-up", f"below {LEFT} nats from step", "at the end", "of")
    left = [step for probe in probes if (step := _left_at(probe)) is not None]
    highest = max(probe["learning_rate"] for probe in probes if _left_at(probe) is not None)
    stuck = sorted({probe["learning_rate"] for probe in probes if _left_at(probe) is None})
    return (
        "## From scratch: a plateau\n\n"
        "Short probes on the training text, from random weights, by which the learning rate was chosen. A BERT first "
        "learns how frequent words are, rests there, and then begins to use context. Here the rest ended between steps "
        f"{min(left)} and {max(left)}, with {_tokens(probes)} tokens a step, at learning rates up to {highest:g}; at "
        f"{', '.join(f'{rate:g}' for rate in stuck)} it did not within the probe. Probes are few, and some differ in "
        "more than the rate: the rate of the tables, between two that worked, may not be D3PM's best. Figures are "
        "training losses where the rate was held (the bound, at one draw each), else validation bounds."
        f"\n\n{grid(header, rows, left=1)}\n\n"
        f"The first row is\n\n```\n{_command(probes[0], results.settings())}\n```"
    )


def _command(probe: dict[str, Any], settings: dict[str, Any]) -> str:
    steps = max(map(int, probe["nats_per_token"]))
    command = (
        f"diffusionbert train --system {probe['system']} --preset wiki-small --data '{settings['data']}' "
        f"--validation {settings['validation']} --vocabulary {settings['masked']} --hybrid {probe['hybrid']:g} "
        f"--batch-tokens {probe['tokens_a_step']} --learning-rate {probe['learning_rate']:g} --warmup "
        f"{probe['warmup']} --decay {probe['decay']} --steps {steps} --no-compile --output probe"
    )
    return "\n".join(broken(command))


def _row(probe: dict[str, Any]) -> tuple[str, ...]:
    last, left = max(map(int, probe["nats_per_token"])), _left_at(probe)
    words = [f"`{probe['system']}`"]
    words += ["bell-shaped steps"] if probe["bell"] else []
    return (
        ", ".join(words),
        f"{probe['tokens_a_step']:,}",
        f"{probe['learning_rate']:g}",
        f"{probe['warmup']}",
        "not in these" if left is None else f"{left:,}",
        f"{probe['nats_per_token'][str(last)]:.2f} ({probe['figure']})",
        f"{last:,} steps",
    )


def _left_at(probe: dict[str, Any]) -> int | None:
    return next((int(step) for step, nats in probe["nats_per_token"].items() if nats < LEFT), None)


def _tokens(probes: list[dict[str, Any]]) -> str:
    sizes = sorted({probe["tokens_a_step"] for probe in probes if _left_at(probe) is not None})
    return " or ".join(f"{size:,}" for size in sizes)
