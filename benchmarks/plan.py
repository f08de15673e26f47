"""What the experiment of docs/results.md consists of: read by `experiment.py`, which does it, and by `results`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diffusionbert.paper.targets import MAIN, TRADED_OFF, Row

SEEDS = (1, 2)
"""Beside 0, for the rows that carry a claim."""
LOOKED_AT = f"seed{SEEDS[0]}"
"""Whose models write for table 1, table 3 and figure 3: those rows are all among the claims."""
CLAIMED = (
    *("diffusionbert", "d3pm-tad", "d3pm", "diffusionbert-spindle", "diffusionbert-lte", "diffusionbert-pte"),
    *("diffusionbert-spindle-paper", "d3pm-spindle", "decoder", "diffusion-lm", "diffusion-lm-bert", "bert-mouth"),
    *("diffusionbert-bell", "decoder-pretrained", "d3pm-spindle-paper"),
)
SHORT, LONG, LONGEST = 600, 6000, 16_000
"""Training steps beside the preset's. The last are for a decoder alone: as long as pretraining and fine-tuning take."""
SCALED = ("diffusionbert", "diffusionbert-bell", "genmd4", "d3pm", "decoder", "decoder-pretrained")
"""The systems that are trained shorter and longer."""
LONGER = (*SCALED, "d3pm-spindle")
"""Those that are trained longer: with the best row of D3PM."""
LARGER = ("diffusionbert-bell", "decoder")
"""A good recipe and a decoder, of twice the weights and longer."""
Changes = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Variation:
    """A folder in which some systems are trained in another way."""

    systems: tuple[str, ...]
    training: Changes = ()
    """Settings that differ from the preset's."""
    objective: Changes = ()
    """Settings that differ from the system's."""


VARIATIONS = {
    "unaveraged": Variation(("diffusionbert-bell", "d3pm", "decoder"), (("ema", None),)),
    "faster": Variation(("diffusionbert", "diffusionbert-bell", "d3pm-spindle"), (("learning_rate", 6e-4),)),
    "narrower": Variation(("diffusion-lm",), objective=(("width", 16),)),
}
"""By folder. The faster one is for D3PM, too: its best learning rate may be another; so may Diffusion-LM's width."""
FREQUENCIES = "frequencies.json"
"""What word frequencies alone need for the tested text."""
TIMED = ("diffusionbert", "d3pm", "genmd4", "decoder")
"""The systems whose training steps are timed: a masked one, told the time, of two passes a step; a causal one."""


@dataclass(frozen=True)
class Job:
    """One row of a folder, or a line of figure 3."""

    folder: str
    row: Row
    seed: int = 0
    steps: int | None = None
    is_line: bool = False
    is_larger: bool = False
    """Whether its network is, and is pretrained first."""
    variation: Variation | None = None

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.folder}/{self.row.key}{'-line' if self.is_line else ''}"

    @property
    def needs(self) -> str | None:
        """The job that trains its model, unless it does so itself."""
        return f"{self.folder}/{self.row.system}" if self.is_line or self.row.note else None

    @property
    def writes(self) -> bool:
        """Whether its samples are for BLEU."""
        return self.folder.startswith("seed")

    def seconds(self, output: Path) -> Path:
        """What it took; the file is written when it is done."""
        folder, _, name = self.name.partition("/")
        return output / folder / "seconds" / f"{name}.json"


def jobs() -> list[Job]:
    """All of them: the longest first, or others would wait for them in the end; then the most important."""
    order = {name: number for number, name in enumerate(CLAIMED)}
    return [
        Job(f"steps{LONGEST}", Row("decoder"), steps=LONGEST),
        *(Job("larger", Row(name), steps=LONG, is_larger=True) for name in LARGER),
        *(Job(f"steps{LONG}", Row(name), steps=LONG) for name in LONGER),
        *(Job("seed0", row) for row in sorted(MAIN, key=lambda row: order.get(row.system, len(order)))),
        *(Job(LOOKED_AT, Row(name), seed=SEEDS[0]) for name in CLAIMED),
        *(Job(f"steps{SHORT}", Row(name), steps=SHORT) for name in SCALED),
        *(Job(LOOKED_AT, Row(name), seed=SEEDS[0], is_line=True) for name in TRADED_OFF),
        *(Job(f"seed{seed}", Row(name), seed=seed) for seed in SEEDS[1:] for name in CLAIMED),
        *(
            Job(folder, Row(name), variation=variation)
            for folder, variation in VARIATIONS.items()
            for name in variation.systems
        ),
    ]
