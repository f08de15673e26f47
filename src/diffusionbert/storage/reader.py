"""What all readers of files from outside share: regular files only, sizes before contents, one-line errors.

A file may be damaged or hostile. Types, shapes and sizes come from the header of a safetensors file, which cannot claim
more than the file holds, and are compared with what is expected before a tensor is allocated; values are checked after
that. Whatever other libraries raise becomes one ValueError, including Rust panics.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor

from diffusionbert.reporting import reason_of
from diffusionbert.storage.limits import require_regular

FLOATS = frozenset(["F64", "F32", "F16", "BF16"])
"""The dtypes of weights, in safetensors' names."""
INTEGERS = frozenset(["I64", "I32", "I16", "U32", "U16"])
_RESTORE = "restore it, or create its folder again"


@contextmanager
def foreign(refusal: Callable[[BaseException], ValueError]) -> Iterator[None]:
    """Turns whatever a library raises while it reads something from outside into one ValueError.

    A Rust panic, such as that of a regular expression that backtracks endlessly, is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or _is_panic(error):
            raise refusal(error) from error
        raise


_stderr = threading.RLock()


@contextmanager
def without_panic_lines() -> Iterator[None]:
    """Keeps what Rust prints about a panic, which is raised anyway, off standard error; other output still appears.

    It costs some 50 µs, and only one thread at a time can do it, so use it for calls that may well panic.
    """
    with _stderr, TemporaryFile() as printed:
        try:
            own = os.dup(2)
        except OSError:  # standard error is closed
            yield
            return
        os.dup2(printed.fileno(), 2)
        is_panic = False
        try:
            yield
        except BaseException as error:
            is_panic = _is_panic(error) or _is_panic(error.__cause__)
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)
            printed.seek(0)
            if not is_panic and (kept := printed.read()):
                os.write(2, kept)


def _is_panic(error: BaseException | None) -> bool:
    return type(error).__name__ == "PanicException"


class StoredTensor(NamedTuple):
    """What the header of a file says about a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file; raises ValueError if the file is missing or damaged."""
    require_regular(path)
    with foreign(lambda error: ValueError(f"{str(path)!r} cannot be read ({reason_of(error)}); {_RESTORE}")):
        if not path.exists():
            raise FileNotFoundError("no such file")
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@dataclass(frozen=True)
class TensorRule:
    """What a tensor in a file must be."""

    shape: tuple[int | None, ...]
    """None is any size but 0."""
    dtypes: frozenset[str]
    least: float | None = None
    """The smallest value allowed; all values must be finite in any case."""
    is_required: bool = True

    def fits(self, stored: StoredTensor) -> bool:
        """Whether dtype and shape are right."""
        pairs = zip(self.shape, stored.shape, strict=False)
        is_shaped = len(stored.shape) == len(self.shape) and all(given in (None, found) for given, found in pairs)
        return is_shaped and stored.size > 0 and stored.dtype in self.dtypes

    def __str__(self) -> str:
        shape = ", ".join("n" if extent is None else str(extent) for extent in self.shape)
        least = "" if self.least is None else f", at least {self.least:g}"
        return f"[{shape}] of {'/'.join(sorted(self.dtypes))}{least}"


def require_stored(path: Path, found: Mapping[str, StoredTensor], rules: Mapping[str, TensorRule]) -> None:
    """Raises ValueError if a tensor is missing, or has the wrong dtype or shape."""
    for name, rule in rules.items():
        if name not in found and not rule.is_required:
            continue
        if name not in found or not rule.fits(found[name]):
            got = f"{list(found[name].shape)} of {found[name].dtype}" if name in found else "none"
            raise ValueError(f"{str(path)!r} must hold {name} {rule}, got {got}; export it again")


def require_values(path: Path, tensors: Mapping[str, Tensor], rules: Mapping[str, TensorRule]) -> None:
    """Raises ValueError if a value is not finite, or too small."""
    for name, rule in rules.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        is_finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        if not is_finite or (rule.least is not None and bool((tensor < rule.least).any())):
            raise ValueError(f"{str(path)!r} must hold finite {name} {rule}, got other values; export it again")
