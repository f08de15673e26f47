"""The processes of a launch by torchrun or `accelerate launch`: they share work and gather its results in order.

After `join`, which the command line calls, every process must make the same calls with the same arguments, as in
training: `share` splits the items, and all processes get all results. Before it, a process works alone, even under a
launcher, so a script may use a model in just one of several processes. Results are sent as objects over gloo, on GPUs,
too, and may take days. A process that is killed closes its connections, which ends the others; one that is suspended,
or whose machine hangs, does not, so processes watch each other. torch is imported only under a launcher.
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
"""How long a process waits for another one; not for one that has died, since its connections are closed."""
SECONDS_PER_BEAT = 5.0
MOST_MISSED = 60
"""A process that misses this many beats, five minutes' worth, counts as stopped."""


@final
@dataclass(frozen=True)
class Launch:
    """This process's place among those started by a launcher; index 0 of 1 without a launcher."""

    index: int = 0
    number: int = 1
    local_index: int = 0
    """The index among the processes of its machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.index == 0


def launch() -> Launch:
    """The launch, from the launcher's environment variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {*names, "MASTER_ADDR"} <= os.environ.keys():
        return Launch()
    return Launch(*(int(os.environ[name]) for name in names))


@final
class Processes:
    """Processes that make the same calls.

    Args:
        launch: This process's place among them.
        group: Their torch.distributed group, for sending objects; None for a process that works alone.
    """

    def __init__(self, launch: Launch, group: Any = None) -> None:
        self.index, self.number, self.is_main = launch.index, launch.number, launch.is_main
        self._group = group
        self._is_alone = group is None

    def share(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """Yields the results of the work on each item, in order; each item is processed by one process.

        Results must be on the CPU. An error in one process is raised in all. Work that calls `share` again runs alone.
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
        """The result of work done by the main process while the others wait."""
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
        outcomes[self.index] = outcome  # keeps the traceback of its own error
        return [one.result() for one in outcomes]


ALONE = Processes(Launch())
_current = ALONE
_watch: _Watch | None = None


def current() -> Processes:
    """The processes that share work with this one; only this one unless it has joined."""
    return _current


def join() -> Processes:
    """Joins the processes of this launch, each with its own GPU if there are any; does nothing without a launcher.

    From here on, all of them must make the same calls of `generate`, `score`, `evaluate` and so on.
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
    """Leaves the group that `join` entered.

    Nothing may refer to the group afterwards: if it still exists when Python exits, its threads may abort the process.
    """
    global _current, _watch
    if _watch is not None:
        _watch.end()
        _watch = None
    if _current is not ALONE:
        from torch import distributed

        _current._group, _current._is_alone, _current = None, True, ALONE
        gc.collect()  # frees networks that were trained together
        if distributed.is_initialized():
            distributed.destroy_process_group()


def exit_at_once(code: int) -> NoReturn:
    """Ends this process after flushing its output, but without the interpreter's shutdown.

    During shutdown, gloo's threads have occasionally aborted a process whose work was done ("terminate called without
    an active exception"), if a sharded network still refers to its group.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it anymore
            stream.flush()
    os._exit(code)


@final
class _Watch(threading.Thread):
    """Ends this process with a message when another one of its launch shows no sign of life.

    Each process increments its own counter in the launch's store, and checks those of the others. Time is counted in a
    process's own beats, so nothing happens if all processes are suspended.
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
        """Tells the others that this process is ending normally."""
        self._over.set()
        self._beating.join(SECONDS_PER_BEAT)

    def run(self) -> None:
        """Watches until `end` is called, or until the store is gone together with the process that kept it."""
        self._beating.start()
        beats = missed = 0
        while not self._over.wait(SECONDS_PER_BEAT) and self._beating.is_alive():
            missed = missed + 1 if beats == self._beats else 0
            beats = self._beats
            # Without a separate launcher, the first process keeps the store, and requests to it would wait forever.
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
            store.add(names[self._own.index], -(10**12))  # a negative count means that it has left

    def _report(self, stopped: list[int]) -> None:
        """Ends this process if any have stopped; the first of the others prints the message."""
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
            threading.Event().wait(2 * SECONDS_PER_BEAT)  # a launcher ends all processes when one ends
        exit_at_once(1)


@contextmanager
def _connected() -> Iterator[None]:
    """Explains errors caused by a broken connection."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_ENDED.format(str(error)[:80])) from None


_ENDED = "another process of this launch has ended ({}); see its message"


def in_plain_words(error: BaseException) -> BaseException:
    """Replaces a gloo error during training with one that explains it; returns any other error as it is."""
    if isinstance(error, RuntimeError) and re.match(r"\[[^]]*gloo[^]]*\] ", str(error)):
        reason = str(error).partition("] ")[2].partition(".")[0]
        return RuntimeError(_ENDED.format(reason.partition(" [")[0][:80]))
    return error


@final
@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """A result, or the error raised instead."""

    value: Result | None = None
    error: Exception | None = None

    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Outcome, (self.value, self.error if self.error is None else _sendable(self.error))


def _sendable(error: Exception) -> Exception:
    """The error, or one with the same message if it cannot be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
