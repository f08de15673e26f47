"""Many requests share one network: they join and leave between forward passes.

Each piece of work (a text to generate, a score, …) is an ordinary function on an `Engine`, in a thread of its own. Its
network is a `SharedNetwork`, which hands every call to the scheduler and waits. The scheduler's thread owns the
network: it takes sequences from all waiting calls, one of each in turn, makes a forward pass of a fixed shape
(`serve.shapes`), and lets the work whose call is answered go on, one at a time, until it calls again or ends. So
threads never compete, and a text does not depend on its company.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffusionbert.diffusion.shapes import PositionMask, TargetLogProbs, Times, Tokens, Vectors
from diffusionbert.inference.engine import Engine
from diffusionbert.networks.masked import Denoiser
from diffusionbert.reporting import logger, reason_of
from diffusionbert.serve.metrics import Metrics
from diffusionbert.serve.settings import Limits
from diffusionbert.serve.shapes import FixedShapes, Row

LARGE = 256
"""With more target positions than this, answers to a call take much memory: one such call is answered at a time."""


WARM = 64
"""The positions of sequences whose shapes are tried out when the server starts; longer ones when they first come."""


class QueueFullError(Exception):
    """Too much is waiting; `seconds` is when to come again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {seconds} s")
        self.seconds = seconds


class CancelledWorkError(Exception):
    """Nobody waits for the result any more."""


class OvertimeError(Exception):
    """The work took longer than it may."""


@dataclass(eq=False)
class Work:
    """A function to be called, and its result."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    is_cancelled: bool = False
    started: float = 0.0

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # who waits may go away, and the result still has its place

    def cancel(self) -> None:
        """Stops it at its next call of the network, or before it begins."""
        self.is_cancelled = True


class _Call:
    """A call of the network: sequences, each answered in some forward pass."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.waiting = deque(enumerate(rows))
        self.answers: list[Tensor | None] = [None] * len(rows)
        self.num_left = len(rows)
        self.is_large = sum(0 if row.targets is None else int(row.targets.sum()) for row in rows) > LARGE
        self.error: BaseException | None = None

    def answer(self, index: int, found: Tensor) -> None:
        self.answers[index] = found
        self.num_left -= 1

    def result(self) -> list[Tensor]:
        if self.error is not None:
            raise self.error
        return [found for found in self.answers if found is not None]


class _Session:
    """A thread that does one piece of work after the other, and only while it has the turn."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.turn = threading.Semaphore(0)
        self.work: Work | None = None
        self.call: _Call | None = None
        self.thread = threading.Thread(target=self._run, name="diffusionbert-work", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _current.session = self
        torch.set_grad_enabled(False)
        while True:
            self.turn.acquire()
            if (work := self.work) is None:
                return
            try:
                if work.is_cancelled:
                    raise CancelledWorkError
                result = work.function()
            except BaseException as error:  # also of a plugin: whoever waits must learn of it
                work.future.set_exception(error)
            else:
                work.future.set_result(result)
            del work
            self.work = None
            self.scheduler.returned.release()

    def ask(self, call: _Call) -> list[Tensor]:
        """Gives the turn away until the call is answered."""
        self.call = call
        self.scheduler.returned.release()
        self.turn.acquire()
        self.call = None
        return call.result()


_current = threading.local()


def is_working() -> bool:
    """Whether this thread does the work of a request."""
    return getattr(_current, "session", None) is not None


def pause() -> None:
    """Lets others have a turn; for work that does not call a shared network."""
    if is_working():
        _current.session.ask(_Call([]))


class SharedNetwork(nn.Module):
    """A masked network whose calls the scheduler answers; it may be called from the scheduler's work alone."""

    def __init__(self, shapes: FixedShapes) -> None:
        super().__init__()
        self.network, self._shapes = (network := shapes.network), shapes
        self.backbone, self.allowed, self.max_length = network.backbone, network.allowed, network.max_length

    def forward(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        answers = self._asked(tokens, attention_mask, t, targets)
        if not answers:
            return torch.zeros(0, len(self.allowed), device=tokens.device)
        return torch.cat(answers) if len(answers) > 1 else answers[0]

    def hidden_states(self, tokens: Tokens, attention_mask: PositionMask, t: Times | None = None) -> Vectors:
        """As `Denoiser.hidden_states`; 0 at padding."""
        t = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device) if t is None else t
        answers = self._asked(tokens, attention_mask, t, None)
        found = answers[0].new_zeros(*tokens.shape, answers[0].shape[-1])
        for index, answer in enumerate(answers):
            found[index, : len(answer)] = answer
        return found

    def _asked(
        self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask | None
    ) -> list[Tensor]:
        lengths = attention_mask.sum(dim=1).tolist()
        rows = [
            Row(tokens[index, :length], t[index], None if targets is None else targets[index, :length], self._shapes)
            for index, length in enumerate(lengths)
            if targets is None or bool(targets[index].any())
        ]
        session: _Session = _current.session
        return session.ask(_Call(rows)) if rows else []


class Scheduler:
    """Does work on a model, at most `limits.running` pieces at once.

    Args:
        engine: The model; from now on, only the scheduler calls its network.
        limits: How much may run and wait, and for how long.
        metrics: What is counted.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        network = engine.masked_network
        self.engine = engine
        """What work is to use."""
        self._first: FixedShapes | None = None  # the shapes that are tried out before the first request
        if isinstance(network, Denoiser):
            shapes = self._first = FixedShapes(network, engine.vocabulary.pad_id)
            if engine.device.type == "cpu" and engine.sampling_network is not network:
                self._first = FixedShapes(engine.sampling_network, engine.vocabulary.pad_id)
            self.engine = engine.with_network(SharedNetwork(shapes).eval(), SharedNetwork(self._first).eval())
        self.returned = threading.Semaphore(0)
        """Released when a session gives its turn back."""
        self._limits, self._metrics = limits, metrics
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._idle: list[_Session] = []
        self._asking: deque[_Session] = deque()
        self._is_closing = False
        self._mean_seconds = 1.0
        self.is_warm = False
        """Whether the shapes of passes are known; what is submitted before waits for that."""
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: len(self._asking))
        self._thread = threading.Thread(target=self._run, name="diffusionbert-network", daemon=True)
        self._thread.start()

    def submit(self, functions: Sequence[Callable[[], Any]]) -> list[Work]:
        """Queues functions, all or none of them; raises QueueFullError."""
        with self._changed:
            num_before = len(self._waiting) + len(self._asking)
            if num_before + len(functions) > self._limits.running + self._limits.waiting or self._is_closing:
                rounds = 1 + len(self._waiting) / self._limits.running
                raise QueueFullError(max(1, min(60, round(rounds * self._mean_seconds))))
            works = [Work(function) for function in functions]
            self._waiting.extend(works)
            self._changed.notify()
        return works

    def close(self) -> None:
        """Ends the threads, once all work is done."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    # ---- the scheduler's own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        if self._first is not None:
            try:
                self._first.warm_up(WARM)
            except Exception as error:  # passes are then tried out as they are needed
                logger.warning("the sizes of passes could not be tried out: %s", reason_of(error))
        self.is_warm = True
        while True:
            with self._changed:
                while not (self._waiting or self._asking or self._is_closing):
                    self._changed.wait()
                if not (self._waiting or self._asking):
                    break
                free = self._limits.running - len(self._asking)
                starting = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            for work in starting:
                session = self._idle.pop() if self._idle else _Session(self)
                session.work, work.started = work, time.monotonic()
                self._give_turn(session)
            self._stop_unwanted()
            self._pass()
        for session in self._idle:
            session.turn.release()
            session.thread.join()  # threads that outlive the interpreter would abort its exit

    def _give_turn(self, session: _Session) -> None:
        """Lets a session go on until it calls the network again, or its work ends."""
        work = session.work
        assert work is not None
        session.turn.release()
        self.returned.acquire()
        if session.work is not None:
            self._asking.append(session)
            return
        self._idle.append(session)
        self._mean_seconds += 0.1 * (time.monotonic() - work.started - self._mean_seconds)

    def _stop_unwanted(self) -> None:
        """Ends the work for which nobody waits, or that takes too long."""
        for session in list(self._asking):
            assert session.work is not None
            assert session.call is not None
            is_late = time.monotonic() - session.work.started > self._limits.seconds
            if session.work.is_cancelled or is_late:
                self._asking.remove(session)
                session.call.error = OvertimeError() if is_late else CancelledWorkError()
                self._metrics.cancelled.inc()
                self._give_turn(session)

    def _pass(self) -> None:
        """One forward pass, after which those whose calls are answered go on."""
        rows, length = self._next_rows()
        if rows:
            shapes, num_rows = rows[0][2].shapes, len(rows)
            try:
                num_rows = shapes.rows_for(length, num_rows)
                for unserved, index, row in reversed(rows[num_rows:]):
                    unserved.waiting.appendleft((index, row))
                rows = rows[:num_rows]
                answers = shapes.run([row for _, _, row in rows], length, num_rows)
            except Exception as error:  # such as a lack of memory: those who asked learn of it, others go on
                for asking, _, _ in rows:
                    asking.error = error
            else:
                for (asking, index, _), answer in zip(rows, answers, strict=True):
                    asking.answer(index, answer)
            self._metrics.passes.inc()
            self._metrics.sequences.inc(len(rows))
            self._metrics.padding.inc(num_rows - len(rows))
        for session in list(self._asking):
            call = session.call
            assert call is not None
            if call.error is not None or not call.num_left:
                self._asking.remove(session)
                self._give_turn(session)

    def _next_rows(self) -> tuple[list[tuple[_Call, int, Row]], int]:
        """Sequences of one kind and length for the next pass: those of the call that waits longest, and others like
        them, one of each call in turn.
        """
        calls = [session.call for session in self._asking if session.call is not None and session.call.waiting]
        if not calls:
            return [], 0
        large = [call for call in calls if call.is_large]
        begun = [call for call in large if call.num_left < len(call.answers)]
        calls = [call for call in calls if call not in large or call is (begun or large)[0]]
        first = _kind(calls[0].waiting[0][1])
        shapes, _, length = first
        most, found = shapes.most_rows(length), list[tuple[_Call, int, Row]]()
        while len(found) < most:
            alike = [call for call in calls if call.waiting and _kind(call.waiting[0][1]) == first]
            if not alike:
                break
            for call in alike[: most - len(found)]:
                index, row = call.waiting.popleft()
                found.append((call, index, row))
        self._asking.rotate(-1)  # so that another kind has its turn next
        return found, length


def _kind(row: Row) -> tuple[FixedShapes, bool, int]:
    """What sequences of one pass have in common."""
    return row.shapes, row.targets is None, row.shapes.length_of(len(row.tokens))
