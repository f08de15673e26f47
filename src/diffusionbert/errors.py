"""What is said of errors that come from other libraries: one line."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
