"""The registry of schedules, samplers, objectives and backbones by name.

A family is an abstract class with a `registry`. A member is a frozen dataclass of that family:

    @register("my-schedule")
    @dataclass(frozen=True)
    class MySchedule(NoiseSchedule): ...

The name is used on the command line, in JSON and in tables. Members from other packages are found through entry points
in the family's group (for example `diffusionbert.schedules`), or by importing the module that registers them. Entry
points are loaded when an unknown name is looked up. This module imports nothing else from the package.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable
from enum import Enum
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

FamilyT = TypeVar("FamilyT")
ClassT = TypeVar("ClassT", bound=type)


class Registry(Generic[FamilyT]):
    """The members of one family by name.

    Args:
        kind: What a member is called in messages, for example "schedule".
        group: The entry-point group in which other packages declare members.
        home: The module or package of the built-in members, imported when a name is first looked up.
    """

    def __init__(self, kind: str, group: str, home: str) -> None:
        self.kind, self.group, self.home = kind, group, home
        self._members: dict[str, type[FamilyT]] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, member: type[FamilyT], aliases: tuple[str, ...] = ()) -> None:
        """Registers a class under a name and, optionally, older names that are still accepted."""
        for each in (name, *aliases):
            taken = self._members.get(self._aliases.get(each, each))
            if taken is not None and _origin(taken) != _origin(member):
                raise ValueError(
                    f"the {self.kind} name {each!r} is taken by {_origin(taken)}; choose another for {_origin(member)}"
                )
        self._members[name] = member
        self._aliases |= dict.fromkeys(aliases, name)

    def get(self, name: str) -> type[FamilyT]:
        """Returns the class registered under a name; raises ValueError with the closest names if there is none."""
        found = self._find(name)
        if found is None:
            self._import_home()
            found = self._find(name)
        if found is None:
            self._load_entry_point(name)
            found = self._find(name)
        if found is None:
            known = self.names()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown {self.kind} {name!r}; {hint}known: {', '.join(known)}")
        return found

    def names(self) -> list[str]:
        """All names in alphabetical order, including those of entry points."""
        self._import_home()
        return sorted({*self._members, *(point.name for point in entry_points(group=self.group))})

    def name_of(self, member: type[FamilyT] | FamilyT) -> str:
        """Returns the name of a class or of an instance; raises ValueError if it is not registered."""
        cls: type = member if isinstance(member, type) else type(member)
        for name, known in self._members.items():
            if known is cls:
                return name
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is not a registered {self.kind}, so it could not be opened again; "
            f'put @register("a-name") above the class'
        )

    def _find(self, name: str) -> type[FamilyT] | None:
        return self._members.get(self._aliases.get(name, name))

    def _import_home(self) -> None:
        home = importlib.import_module(self.home)
        for module in pkgutil.iter_modules(getattr(home, "__path__", ())):
            importlib.import_module(f"{self.home}.{module.name}")

    def _load_entry_point(self, name: str) -> None:
        for point in entry_points(group=self.group, name=name):
            loaded = point.load()
            if isinstance(loaded, type) and name not in self._members:
                self.add(name, loaded)


def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[ClassT], ClassT]:
    """Registers a class in the registry of its family.

    Args:
        name: The name on the command line, in JSON and in tables.
        aliases: Older names that are still accepted.

    Returns:
        A class decorator.

    Examples:
        >>> from dataclasses import dataclass
        >>> from diffusionbert.diffusion.schedules import Linear, NoiseSchedule
        >>> @register("identity-example")
        ... @dataclass(frozen=True)
        ... class Identity(NoiseSchedule):
        ...     by_token = False
        ...     def survival(self, t, relative_information):
        ...         return Linear().survival(t, relative_information)
        ...     def masking_density(self, t, relative_information):
        ...         return Linear().masking_density(t, relative_information)
        >>> NoiseSchedule.registry.get("identity-example") is Identity
        True
    """

    def decorate(cls: ClassT) -> ClassT:
        registry: Any = getattr(cls, "registry", None)
        if not isinstance(registry, Registry):
            raise TypeError(
                f"{cls.__qualname__} cannot be registered as {name!r}: it must inherit from a schedule, sampler, "
                "objective configuration or another class with a registry"
            )
        registry.add(name, cls, aliases)
        return cls

    return decorate


def describe(member: Any) -> str:
    """A short text for tables and messages: the name of a registered dataclass, and its settings.

    Examples:
        >>> from diffusionbert.diffusion.time_sampling import Bell
        >>> describe(Bell(0.5))
        'bell (depth = 0.5, weighted = True)'
    """
    registry, shown = type(member).registry, []
    for field in dataclasses.fields(member):
        value = getattr(member, field.name)
        shown.append(f"{field.name} = {value.value if isinstance(value, Enum) else value}")
    try:
        name = registry.name_of(member)
    except ValueError:  # not registered yet
        name = type(member).__name__
    return f"{name} ({', '.join(shown)})" if shown else name


def _origin(cls: type) -> str:
    """Identifies a class across reloads of its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
