"""The gate that every request passes first: checks who may ask for how much, and logs and counts, but never text."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from diffusionbert.reporting import logger
from diffusionbert.serve.errors import RequestError, of_exception
from diffusionbert.serve.metrics import Metrics
from diffusionbert.serve.settings import ServerSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

access = logging.getLogger("diffusionbert.access")
"""Gets one dictionary per request."""
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
]


class Gate:
    """An ASGI middleware that checks, logs and counts requests.

    Args:
        app: The application for requests that pass.
        settings: Who may use the server, and the limits.
        metrics: The metrics to update.
    """

    def __init__(self, app: Any, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._num_open = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, num_bytes = time.monotonic(), 499, 0
        body = _Body(receive, self._settings.limits.body_bytes)

        async def counted(message: Message) -> None:
            nonlocal status, num_bytes
            if body.is_exceeded and status == 499:
                status = 413
                await _refuse(self._too_large(), send)
            if body.is_exceeded:
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *SECURITY]
            num_bytes += len(message.get("body", b""))
            await send(message)

        self._num_open += 1
        try:
            if (refusal := self._refusal(scope)) is not None:
                await _refuse(refusal, counted)
            else:
                await self._app(scope, body, counted)
        except Exception as error:
            refusal = of_exception(error)
            if refusal.status == 500:
                logger.error("a request failed", exc_info=error)
            if status == 499:  # otherwise the response has begun, and ends here
                await _refuse(refusal, counted)
        finally:
            self._num_open -= 1
            seconds = time.monotonic() - began
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.seconds.labels(endpoint).observe(seconds)
            if endpoint not in ("/health", "/ready", "/metrics"):
                line = {"method": scope["method"], "path": endpoint, "status": status, "bytes": num_bytes}
                access.info(line | {"milliseconds": round(1000 * seconds)})

    def _refusal(self, scope: Message) -> RequestError | None:
        headers = dict(scope["headers"])
        path: str = scope["path"]
        name = headers.get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        hosts = self._settings.hosts
        if hosts is not None and name not in hosts and headers.get(b"host", b"").decode("latin-1") not in hosts:
            return RequestError(400, f"this server does not answer to the host {name[:40]!r}", code="wrong_host")
        if self._num_open > self._settings.limits.requests and path.startswith("/v1/"):
            return RequestError(429, "too many requests are open; try again in 1 s", code="queue_full", retry=1)
        if path.startswith("/v1/") or path == "/metrics":
            key = self._settings.api_key
            given = headers.get(b"authorization", b"")
            if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
                message = "the API key is missing or wrong; send `Authorization: Bearer KEY`"
                return RequestError(401, message, code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":  # a form on another page cannot send this
                return RequestError(
                    415, "the body must be JSON; send `Content-Type: application/json`", code="not_json"
                )
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > self._settings.limits.body_bytes:
                return self._too_large()
        return None

    def _too_large(self) -> RequestError:
        most = self._settings.limits.body_bytes
        return RequestError(413, f"the body must have at most {most} bytes; send less", code="too_large")


class _Body:
    """Receives the messages of a request; cuts the body off where it becomes too large."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._left = receive, most
        self.is_exceeded = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        self.is_exceeded = self._left < 0
        return {"type": "http.request", "body": b"", "more_body": False} if self.is_exceeded else message


async def _refuse(error: RequestError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
