"""The processes of a launch, by torchrun or `accelerate launch`: they share work and gather its results in order.

After `join`, which the command line calls, every process must make the same calls with the same arguments, as in
training: `share` splits their items, and all processes get all results. Before it, a process works alone, even under a
launcher, so that a script may use a model in one process of several. Results travel as objects over gloo, on GPUs too,
and may take days. torch is imported under a launcher only.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Generic, TypeVar, final

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = timedelta(days=30)
"""How long a process waits for another. It does not wait for one that has died: its connections are closed."""


@final
@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started; index 0 of 1 without a launcher."""

    index: int = 0
    number: int = 1
    local_index: int = 0
    """Among the processes of its machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.index == 0


def launch() -> Launch:
    """What the launcher's environment variables say."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {*names, "MASTER_ADDR"} <= os.environ.keys():
        return Launch()
    return Launch(*(int(os.environ[name]) for name in names))


@final
class Processes:
    """Processes that make the same calls.

    Args:
        launch: This process among them.
        group: Their group in torch.distributed, for objects; None for a process that works alone.
    """

    def __init__(self, launch: Launch, group: Any = None) -> None:
        self.index, self.number, self.is_main = launch.index, launch.number, launch.is_main
        self._group = group
        self._is_alone = group is None

    def share(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """Yields the results of some work on each item, in order; each item is worked on by one process.

        Results must be on the CPU. What fails in one process fails in all. Work that shares again does so alone.
        """
        if self._is_alone:
            yield from map(work, items)
            return
        remaining = iter(items)
        while several := list(islice(remaining, self.number)):
            own = several[self.index : self.index + 1]
            outcome = self._attempt(lambda own=own: [work(item) for item in own])  # type: ignore[misc]
            for found in self._gathered(outcome):
                yield from found

    def on_main(self, work: Callable[[], Result]) -> Result:
        """The result of some work that the main process does while the others wait."""
        if self._is_alone:
            return work()
        from torch import distributed

        outcome = self._attempt(work) if self.is_main else None
        received = [outcome]
        with _connected():
            distributed.broadcast_object_list(received, src=0, group=self._group)
        result: Result = (outcome or received[0]).result()  # type: ignore[union-attr]
        return result

    def _attempt(self, work: Callable[[], Result]) -> _Outcome[Result]:
        self._is_alone = True
        try:
            return _Outcome(work())
        except Exception as error:
            return _Outcome(error=error)
        finally:
            self._is_alone = False

    def _gathered(self, outcome: _Outcome[Result]) -> list[Result]:
        from torch import distributed

        outcomes: list[Any] = [None] * self.number
        with _connected():
            distributed.all_gather_object(outcomes, outcome, group=self._group)
        outcomes[self.index] = outcome  # its own error has a traceback
        return [one.result() for one in outcomes]


ALONE = Processes(Launch())
_current = ALONE


def current() -> Processes:
    """The processes that share their work with this one; itself alone unless it has joined."""
    return _current


def join() -> Processes:
    """Joins the processes of this launch, each with a GPU of its own where there are any; nothing without a launcher.

    From here on, all of them must call `generate`, `score`, `evaluate` and so on alike, each call in all processes.
    """
    global _current
    own = launch()
    if own.number > 1 and _current is ALONE:
        import torch
        from torch import distributed

        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(own.local_index % torch.cuda.device_count())
        if not distributed.is_initialized():
            has_nccl = has_gpu and distributed.is_nccl_available()
            distributed.init_process_group("cpu:gloo,cuda:nccl" if has_nccl else "gloo")
        _current = Processes(own, distributed.new_group(backend="gloo", timeout=PATIENCE))
    return _current


def leave() -> None:
    """Ends what `join` began.

    Threads of a group that still exists when Python exits may abort it, so that nothing may refer to the group.
    """
    global _current
    if _current is not ALONE:
        from torch import distributed

        _current._group, _current._is_alone, _current = None, True, ALONE
        gc.collect()  # networks that were trained together
        if distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """Says what it means that a connection has broken."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"another process of this launch has ended ({str(error)[:80]}); see its message") from None


@final
@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """A result, or the error in its place."""

    value: Result | None = None
    error: Exception | None = None

    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Outcome, (self.value, self.error if self.error is None else _sendable(self.error))


def _sendable(error: Exception) -> Exception:
    """The error, or one with its message if other processes could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
