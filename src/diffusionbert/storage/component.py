"""A schedule, sampler or objective as a record: its name and settings, readable without the class that it names.

Results and logs outlive plugins: an evaluation of a model with somebody's own schedule must open where that schedule is
not installed. The text form is the one of the command line, `spindle:strength=0.3,mean=corpus`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diffusionbert.storage.schema import to_json

Setting = bool | int | float | str | None


@dataclass(frozen=True)
class Component:
    """The name and settings of a schedule, sampler or objective."""

    name: str
    settings: dict[str, Setting] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object) -> Component:
        """Records a dataclass, by its registered name if it has one."""
        plain = to_json(value)
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(value).__name__).lower()
        name = plain.pop("name", words)
        plain.pop("module", None)
        return cls(str(name), {key: _setting(getattr(value, key), item) for key, item in plain.items()})

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.name}:{settings}" if settings else self.name


def _setting(value: object, plain: object) -> Setting:
    if isinstance(plain, dict):
        return str(Component.of(value))
    return plain if isinstance(plain, bool | int | float | str | None) else str(plain)
