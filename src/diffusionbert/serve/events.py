"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from diffusionbert.reporting import logger
from diffusionbert.serve.errors import of_exception
from diffusionbert.serve.scheduler import CancelledWorkError
from diffusionbert.serve.schema import ErrorResponse
from diffusionbert.serve.server import ClientGoneError, disconnected


def event(value: BaseModel, *, exclude: set[str] | None = None) -> str:
    """Formats one event."""
    return f"data: {value.model_dump_json(exclude=exclude)}\n\n"


async def stream(request: Request, events: AsyncGenerator[str, None]) -> StreamingResponse:
    """A response that begins with the first event, so that an earlier error still has its own status."""
    first = await _first(request, events)

    async def body() -> AsyncIterator[str]:
        try:
            yield first
            async for following in events:
                yield following
            yield "data: [DONE]\n\n"
        except CancelledWorkError:
            pass
        except Exception as error:
            refused = of_exception(error)
            if refused.status == 500:
                logger.exception("a stream failed")
            yield event(ErrorResponse.model_validate(refused.body))
        finally:
            await events.aclose()

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def _first(request: Request, events: AsyncGenerator[str, None]) -> str:
    """The first event; raises ClientGoneError if nobody is waiting for it anymore."""
    first, gone = asyncio.ensure_future(anext(events)), asyncio.ensure_future(disconnected(request))
    try:
        either: set[asyncio.Future[Any]] = {first, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return first.result()
        first.cancel()
        await asyncio.wait({first})
        raise ClientGoneError
    finally:
        gone.cancel()
