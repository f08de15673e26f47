"""The processes of a launch, by torchrun or `accelerate launch`: they share work and gather its results in order.

After `join`, which the command line calls, every process must make the same calls with the same arguments, as in
training: `share` splits their items, and all processes get all results. Before it, a process works alone, even under a
launcher, so that a script may use a model in one process of several. Results travel as objects over gloo, on GPUs too,
and may take days. A process that was killed closes its connections, which ends the others; one that was stopped, or
whose machine hangs, does not, so that processes watch each other. torch is imported under a launcher only.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar, final

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = timedelta(days=30)
"""How long a process waits for another. It does not wait for one that has died: its connections are closed."""
SECONDS_PER_BEAT = 5.0
MOST_MISSED = 60
"""After so many beats without a sign of life, five minutes, a process counts as stopped."""


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
_watch: _Watch | None = None


def current() -> Processes:
    """The processes that share their work with this one; itself alone unless it has joined."""
    return _current


def join() -> Processes:
    """Joins the processes of this launch, each with a GPU of its own where there are any; nothing without a launcher.

    From here on, all of them must call `generate`, `score`, `evaluate` and so on alike, each call in all processes.
    """
    global _current, _watch
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
        _watch = _Watch(own)
        _watch.start()
    return _current


def leave() -> None:
    """Ends what `join` began.

    Threads of a group that still exists when Python exits may abort it, so that nothing may refer to the group.
    """
    global _current, _watch
    if _watch is not None:
        _watch.end()
        _watch = None
    if _current is not ALONE:
        from torch import distributed

        _current._group, _current._is_alone, _current = None, True, ALONE
        gc.collect()  # networks that were trained together
        if distributed.is_initialized():
            distributed.destroy_process_group()


def exit_at_once(code: int) -> NoReturn:
    """Ends this process with all that it has printed, but without the interpreter's shutdown.

    There, threads of gloo have aborted a process now and then, after its work was done ("terminate called without an
    active exception"), as long as a sharded network refers to its group.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


@final
class _Watch(threading.Thread):
    """Ends this process with a message when another one of its launch gives no sign of life.

    Each process increases a number of its own in the launch's store, and looks at those of the others. Time is counted
    in own beats, so that nothing happens when all processes sleep.
    """

    def __init__(self, own: Launch) -> None:
        super().__init__(name="diffusionbert-watch", daemon=True)
        self._own, self._over = own, threading.Event()
        self._beating = threading.Thread(target=self._beat, name="diffusionbert-beat", daemon=True)
        self._beats, self._stopped = 0, list[int]()
        # Read here: accelerate clears the environment for a moment.
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def end(self) -> None:
        """Tells the others that this process ends as it should."""
        self._over.set()
        self._beating.join(SECONDS_PER_BEAT)

    def run(self) -> None:
        """Watches until `end` is called, or until the store is gone with the process that kept it."""
        self._beating.start()
        beats = missed = 0
        while not self._over.wait(SECONDS_PER_BEAT) and self._beating.is_alive():
            missed = missed + 1 if beats == self._beats else 0
            beats = self._beats
            # Without a launcher of its own, the first process keeps the store; its answers are waited for without end.
            self._report(self._stopped if missed < MOST_MISSED else [0])

    def _beat(self) -> None:
        from torch import distributed

        names = [f"diffusionbert/{self._attempt}/{index}" for index in range(self._own.number)]
        seen, missed = [0] * len(names), [0] * len(names)
        with suppress(RuntimeError):  # the store is gone
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                self._address, self._port, is_master=False, wait_for_workers=False
            )
            while not self._over.wait(SECONDS_PER_BEAT):
                store.add(names[self._own.index], 1)
                for index, name in enumerate(names):
                    number = store.add(name, 0)
                    missed[index] = missed[index] + 1 if number == seen[index] and number >= 0 else 0
                    seen[index] = number
                self._stopped = [index for index, number in enumerate(missed) if number >= MOST_MISSED]
                self._beats += 1
            store.add(names[self._own.index], -(10**12))  # below 0: it has left

    def _report(self, stopped: list[int]) -> None:
        """Ends this process if there are such; the first of the others says so."""
        if not stopped:
            return
        if self._own.index == min({*range(self._own.number)} - {*stopped}):
            seconds = SECONDS_PER_BEAT * MOST_MISSED
            print(
                f"diffusionbert: process {stopped[0]} of this launch gave no sign of life for {seconds:.0f} s, so the "
                "others end; start the command again, with --resume if it trains",
                file=sys.stderr,
            )
        else:
            threading.Event().wait(2 * SECONDS_PER_BEAT)  # a launcher ends all when one ends
        exit_at_once(1)


@contextmanager
def _connected() -> Iterator[None]:
    """Says what it means that a connection has broken."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_ENDED.format(str(error)[:80])) from None


_ENDED = "another process of this launch has ended ({}); see its message"


def in_plain_words(error: BaseException) -> BaseException:
    """An error of gloo, in training, as what it means; any other as it is."""
    if isinstance(error, RuntimeError) and re.match(r"\[[^]]*gloo[^]]*\] ", str(error)):
        reason = str(error).partition("] ")[2].partition(".")[0]
        return RuntimeError(_ENDED.format(reason.partition(" [")[0][:80]))
    return error


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
