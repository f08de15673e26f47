"""Typed values ⇄ JSON: the one reader for everything that is opened (model and run folders, evaluations, settings).

The annotations are the schema: frozen dataclasses field by field, enums by value, unions, tuples, lists and dicts. A
member of a registered family (a schedule, a sampler, an objective) is {"name": its registered name, …fields}; one from
outside the package also names its module, which reading never imports. Numbers that JSON does not have are the strings
"inf", "-inf" and "nan". Every error is one ValueError that names the path, the value found and what is expected.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, overload

from diffusionbert.registry import Registry

T = TypeVar("T")
_MOST_INT = 1 << 63
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(value: Any) -> Any:
    """Converts a typed value to plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {**_header(value), **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form; use dataclasses, enums and plain values")


@overload
def from_json(plain: Any, expected: type[T], where: str = ...) -> T: ...


@overload
def from_json(plain: Any, expected: Any, where: str = ...) -> Any: ...


def from_json(plain: Any, expected: Any, where: str = "settings") -> Any:
    """Reads a typed value from plain JSON values.

    Args:
        plain: What `json.loads` returned.
        expected: The type: a dataclass, a registered family, or any annotation that a dataclass field may have.
        where: What the value is called in error messages, for example a file name.

    Returns:
        The value, checked against its annotations.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return plain
    if origin in (types.UnionType, typing.Union):
        return _from_union(plain, arguments, where)
    if origin is typing.Literal:
        return _require(plain in arguments, plain, " or ".join(map(repr, arguments)), where)
    if origin is tuple:
        return _from_tuple(plain, arguments, where)
    if origin is list:
        _require(isinstance(plain, list), plain, "a list", where)
        return [from_json(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(plain)]
    if origin is dict:
        _require(isinstance(plain, dict), plain, "an object", where)
        return {key: from_json(item, arguments[1], f"{where}.{key}") for key, item in plain.items()}
    if isinstance(registry := getattr(expected, "registry", None), Registry):
        return _from_registered(plain, registry, expected, where)
    if dataclasses.is_dataclass(expected):
        return _from_fields(plain, expected, where)
    return _from_scalar(plain, expected, where)


def from_text(text: str, family: type[T], where: str) -> T:
    """Reads a member of a registered family from its name, with settings that differ from the defaults.

    Args:
        text: `name` or `name:field=value,field=value`; values are numbers, true, false, none or strings.
        family: The registered family.
        where: What the value is called in error messages, for example "--schedule".

    Returns:
        The member.

    Examples:
        >>> from diffusionbert.diffusion.schedules import NoiseSchedule
        >>> str(from_text("spindle:strength=0.5,mean=sentence", NoiseSchedule, "--schedule"))
        'spindle (λ = 0.5, sentence mean)'
    """
    name, _, settings = text.partition(":")
    plain: dict[str, Any] = {"name": name}
    for setting in filter(None, settings.split(",")):
        field, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"{where} must be name or name:field=value,field=value, got {text!r}")
        try:
            plain[field] = json.loads("null" if value == "none" else value)
        except json.JSONDecodeError:
            plain[field] = value
    return from_json(plain, family, where)


def _header(value: Any) -> dict[str, str]:
    """The name of a member of a registered family, and its module if that is not ours."""
    registry = getattr(type(value), "registry", None)
    if not isinstance(registry, Registry):
        return {}
    module = type(value).__module__
    is_ours = module.partition(".")[0] == __name__.partition(".")[0]
    return {"name": registry.name_of(value)} | ({} if is_ours else {"module": module})


def _from_union(plain: Any, members: tuple[Any, ...], where: str) -> Any:
    """The first member of the union that the JSON value fits."""
    if plain is None and type(None) in members:
        return None
    errors = []
    for member in members:
        if member is not type(None):
            try:
                return from_json(plain, member, where)
            except ValueError as error:
                errors.append(error)
    if len(errors) == 1 or isinstance(plain, dict):
        raise errors[0]
    return _require(False, plain, " or ".join(map(_called, members)), where)


def _from_tuple(plain: Any, arguments: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _require(isinstance(plain, list | tuple), plain, "a list", where)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(plain)
    _require(len(plain) == len(arguments), plain, f"a list of {len(arguments)} values", where)
    pairs = zip(plain, arguments, strict=True)
    return tuple(from_json(item, each, f"{where}[{index}]") for index, (item, each) in enumerate(pairs))


def _from_registered(plain: Any, registry: Registry[Any], expected: type, where: str) -> Any:
    _require(
        isinstance(plain, dict) and isinstance(plain.get("name"), str), plain, f"a {registry.kind} with a name", where
    )
    try:
        cls = registry.get(plain["name"])
    except ValueError as error:
        module = plain.get("module")
        hint = f"; it was registered by the module {module!r}: import that first, or give --plugin {module}"
        raise ValueError(f"{where}: {error}{hint if isinstance(module, str) else ''}") from None
    if not issubclass(cls, expected):
        raise ValueError(f"{where}: {plain['name']!r} is a {registry.kind}, but {_called(expected)} is expected")
    rest = {key: value for key, value in plain.items() if key not in ("name", "module")}
    return _from_fields(rest, cls, where)


def _from_fields(plain: Any, cls: Any, where: str) -> Any:
    _require(isinstance(plain, dict), plain, f"an object with the fields of {_called(cls)}", where)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(plain) - set(fields))
    if unknown:
        raise ValueError(f"{where}: {_called(cls)} has no field {unknown[0]!r}; it has {', '.join(fields) or 'none'}")
    for name, known in fields.items():
        if name not in plain and known.default is known.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: {_called(cls)} lacks the field {name!r}")
    hints = _type_hints(cls)
    values = {name: from_json(plain[name], hints[name], f"{where}.{name}") for name in fields if name in plain}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _from_scalar(plain: Any, expected: Any, where: str) -> Any:
    if isinstance(expected, type) and issubclass(expected, Enum):
        values = [member.value for member in expected]
        _require(plain in values, plain, f"one of {', '.join(map(repr, values))}", where)
        return expected(plain)
    if expected is float:
        if isinstance(plain, str) and plain in _NON_FINITE:
            return _NON_FINITE[plain]
        _require(isinstance(plain, int | float) and not isinstance(plain, bool), plain, "a number", where)
        if isinstance(plain, int):
            _require(abs(plain) < _MOST_INT, plain, "a number of 64 bits", where)
        return float(plain)
    if expected is Path:
        return Path(_require(isinstance(plain, str), plain, "a path", where))
    # Exactly this type, because a bool is an int in Python.
    _require(type(plain) is expected, plain, _called(expected), where)
    if expected is int:
        _require(abs(plain) < _MOST_INT, plain, "a whole number of 64 bits", where)
    return plain


def _require(holds: bool, plain: Any, expected: str, where: str) -> Any:
    if not holds:
        shown = " ".join(repr(plain).split())
        shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
        raise ValueError(f"{where} must be {expected}, got {shown}")
    return plain


@lru_cache(maxsize=256)
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _called(annotation: Any) -> str:
    words = {int: "a whole number", str: "a string", bool: "true or false", float: "a number", type(None): "null"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


Setting = bool | int | float | str | None


@dataclass(frozen=True)
class Component:
    """The name and settings of a schedule, sampler or objective, readable without the class that it names.

    Results and logs outlive plugins: an evaluation of a model with a custom schedule must open where that schedule is
    not installed. The text form is that of the command line, `spindle:strength=0.3,mean=corpus`.
    """

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
