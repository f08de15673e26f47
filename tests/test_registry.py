"""Registered names and the typed JSON reader."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from diffusionbert.registry import Registry, register
from diffusionbert.storage.schema import from_json, to_json


class Warp(ABC):  # noqa: B024 - a family may have no method
    registry: ClassVar[Registry[Warp]] = Registry("shape", "diffusionbert.test_shapes", "diffusionbert.storage")


@register("circle", aliases=("disc",))
@dataclass(frozen=True)
class Circle(Warp):
    radius: float = 1.0

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(f"`radius` must be >= 0, got {self.radius}")


@register("square")
@dataclass(frozen=True)
class Square(Warp):
    side: int


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Drawing:
    title: str
    shape: Warp
    color: Color = Color.RED
    sizes: tuple[int, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)
    note: str | None = None
    width: int | str = 3
    by_name: dict[str, float] | None = None
    mode: Literal["a", "b"] = "a"
    path: Path = Path("x")


def test_values_survive_a_round_trip() -> None:
    drawing = Drawing("d", Square(2), sizes=(1, 2), span=(-math.inf, 2.0), note="n", width="w", by_name={"a": math.nan})
    plain = to_json(drawing)
    assert plain["shape"] == {"name": "square", "module": __name__, "side": 2}
    back = from_json(plain, Drawing)
    assert back.span == drawing.span
    assert math.isnan(back.by_name["a"])
    assert to_json(back) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": 3}, r"d\.title must be a string, got 3"),
        ({"sizes": [1, "x"]}, r"d\.sizes\[1\] must be a whole number, got 'x'"),
        ({"sizes": [True]}, r"d\.sizes\[0\] must be a whole number, got True"),
        ({"span": [1]}, r"d\.span must be a list of 2 values"),
        ({"color": "blue"}, r"d\.color must be one of 'red', got 'blue'"),
        ({"mode": "c"}, r"d\.mode must be 'a' or 'b', got 'c'"),
        ({"shape": {"name": "circel"}}, r"d\.shape: unknown shape 'circel'; did you mean 'circle'\?"),
        ({"shape": {"name": "hexagon", "module": "other.shapes"}}, r"--plugin other\.shapes"),
        ({"shape": {"radius": 1}}, r"d\.shape must be a shape with a name"),
        ({"shape": {"name": "square"}}, r"d\.shape: Square lacks the field 'side'"),
        ({"shape": {"name": "circle", "radius": -1}}, r"d\.shape: `radius` must be >= 0, got -1\.0"),
        ({"shape": {"name": "circle", "x": 1}}, r"d\.shape: Circle has no field 'x'; it has radius"),
        ({"other": 1}, r"d: Drawing has no field 'other'"),
        ({"width": 1.5}, r"d\.width must be a whole number or a string, got 1\.5"),
        ({"note": 1}, r"d\.note must be a string, got 1"),
        ({"by_name": {"a": "x"}}, r"d\.by_name\.a must be a number, got 'x'"),
    ],
)
def test_wrong_values_are_named_by_their_path(changes: dict[str, object], message: str) -> None:
    plain = to_json(Drawing("d", Circle())) | changes
    with pytest.raises(ValueError, match=message) as error:
        from_json(plain, Drawing, "d")
    assert "\n" not in str(error.value)


def test_aliases_are_understood() -> None:
    assert from_json({"name": "disc", "radius": 2}, Warp) == Circle(2.0)
    assert to_json(Circle(2.0))["name"] == "circle"


def test_a_taken_name_and_an_unregistered_class_are_refused() -> None:
    with pytest.raises(ValueError, match="the shape name 'circle' is taken"):

        @register("circle")
        @dataclass(frozen=True)
        class Other(Warp):
            pass

    @dataclass(frozen=True)
    class Unnamed(Warp):
        pass

    with pytest.raises(ValueError, match="is not a registered shape, so it could not be opened again"):
        to_json(Unnamed())
    with pytest.raises(TypeError, match="cannot be registered"):
        register("x")(int)


def test_entry_points_are_found_when_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Plugged(Warp):
        pass

    class Point:
        name = "plugged"

        def load(self) -> type:
            return Plugged

    def points(group: str, name: str = "plugged") -> list[Point]:
        return [Point()] if (group, name) == ("diffusionbert.test_shapes", "plugged") else []

    monkeypatch.setattr("diffusionbert.registry.entry_points", points)
    assert "plugged" in Warp.registry.names()
    assert Warp.registry.get("plugged") is Plugged
