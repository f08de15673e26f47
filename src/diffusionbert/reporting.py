"""Errors in one line: what other libraries say, and values of a kind that nobody can use."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def require_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises TypeError unless a value is of some kind; for what people give, who need not read a traceback."""
    if not isinstance(value, kinds):
        shown = " ".join(repr(value).split())
        raise TypeError(f"{name} must be {expected}, given {shown[:60]} ({type(value).__name__})")
