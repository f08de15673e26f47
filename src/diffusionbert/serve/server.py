"""A served model: checks requests against its limits, runs their work, and streams the states it emits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastapi import Request

from diffusionbert.inference.engine import Engine
from diffusionbert.inference.trace import TracedState
from diffusionbert.model import Model
from diffusionbert.serve import schema
from diffusionbert.serve.errors import RequestError
from diffusionbert.serve.metrics import Metrics
from diffusionbert.serve.scheduler import Scheduler, Work
from diffusionbert.serve.settings import Limits, ServerSettings


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(eq=False)
class Server:
    """A served model."""

    model: Model
    settings: ServerSettings = ServerSettings()
    metrics: Metrics = field(default_factory=Metrics)
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.model.engine, self.settings.limits, self.metrics)
        name = self.model.name
        self.name = name if name == "bundled" else Path(name).name or name
        """The id of the model; for a folder, the last part of its path."""

    @property
    def engine(self) -> Engine:
        """The engine that work uses."""
        return self.scheduler.engine

    @property
    def limits(self) -> Limits:
        """The limits on requests."""
        return self.settings.limits

    @property
    def status(self) -> Literal["starting", "ready", "draining"]:
        """Whether a load balancer may send requests."""
        return "draining" if self.is_draining else "ready" if self.scheduler.is_warm else "starting"

    # ---- requests ---------------------------------------------------------------------------------------------------

    def require(self, request: schema.Named, texts: Sequence[str], number: int | None = None, **asked: int) -> None:
        """Raises RequestError if a request names another model or exceeds a limit."""
        if request.model is not None and request.model != self.name:
            message = f"the model {request.model[:40]!r} does not exist; this server has {self.name!r}"
            raise RequestError(404, message, param="model", code="model_not_found")
        number = len(texts) if number is None else number
        asked |= {"texts": number, "characters": sum(map(len, texts))}
        if isinstance(request, schema.Sampling):
            asked["steps"] = request.steps
        for name, value in asked.items():
            most = int(getattr(self.limits, name))
            if value > most:
                raise RequestError(422, f"at most {most} {name} per request, got {value}", param=name, code="limit")

    async def results(self, request: Request, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of some work; cancels it if the client disconnects."""
        works = self.scheduler.submit(functions)
        gathered = asyncio.gather(*(asyncio.wrap_future(work.future) for work in works))
        gone = asyncio.create_task(disconnected(request))
        try:
            either: set[asyncio.Future[Any]] = {gathered, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not gathered.done():
                raise ClientGoneError
            return gathered.result()
        finally:
            gone.cancel()
            _release(works, gathered)

    async def states(
        self, make: Callable[[int, Callable[[TracedState], None]], Callable[[], Any]], number: int
    ) -> AsyncIterator[tuple[int, TracedState | None, Any]]:
        """Runs work that emits states: yields index and state, and when a piece of work is done, None and its result.

        The first item comes before anything is sent to the client, so an error until then still has its own status.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, TracedState | None, Any]]()

        def emit(index: int, state: TracedState) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (index, state, None))

        def functions() -> list[Callable[[], Any]]:
            return [make(index, lambda state, index=index: emit(index, state)) for index in range(number)]  # type: ignore[misc]

        works = self.scheduler.submit(functions())
        for index, work in enumerate(works):
            work.future.add_done_callback(
                lambda future, index=index: loop.call_soon_threadsafe(queue.put_nowait, (index, None, future))  # type: ignore[misc]
            )
        try:
            num_left = number
            while num_left:
                index, state, future = await queue.get()
                num_left -= state is None
                yield index, state, future.result() if state is None else None
        finally:
            _release(works)


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _release(works: Sequence[Work], gathered: asyncio.Future[Any] | None = None) -> None:
    """Cancels unfinished work; errors it raises after that are ignored."""
    for work in works:
        work.cancel()
    if gathered is not None:
        gathered.add_done_callback(lambda done: done.cancelled() or done.exception())
