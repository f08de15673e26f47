"""Runs a server until it is told to stop; then it finishes what it has accepted."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from diffusionbert.reporting import logger
from diffusionbert.serve.app import create_app
from diffusionbert.serve.gate import access
from diffusionbert.serve.scheduler import is_working
from diffusionbert.serve.server import Server

REQUEST_GRACE = 2.0
"""Seconds that a client which has connected before a stop has for sending its request."""
SETUP_ROUNDS = 5
"""Rounds of the event loop without a new connection after which all are set up; asyncio takes three.

If the socket that it came from is closed before, a connection fails, and nobody closes it.
"""


class GracefulServer(uvicorn.Server):
    """Goes on accepting requests for a while after SIGTERM, while `/ready` says that it will not."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._served = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops accepting at SIGTERM or SIGINT; a second SIGINT does not wait for what runs."""
        delay = self._served.settings.drain_delay
        if sig == signal.SIGTERM and delay and not self._served.is_draining:
            self._served.is_draining = True
            threading.Timer(delay, super().handle_exit, (sig, frame)).start()
            return
        self._served.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, and closes connections whose requests are answered.

        A client that has just connected may not have sent its request: that is waited for, since closing its connection
        would lose it. Connections that wait to be accepted are accepted first, since closing the socket resets them.
        """
        end = time.monotonic() + REQUEST_GRACE
        for listening in self.servers:
            quiet = 0
            while quiet < SETUP_ROUNDS and time.monotonic() < end:
                await asyncio.sleep(0)  # the event loop accepts, and sets up what it has accepted
                quiet = 0 if select.select(listening.sockets, [], [], 0)[0] else quiet + 1
            listening.close()
        while not self.force_exit and self._has_new_connections() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _has_new_connections(self) -> bool:
        """Whether there are connections on which no request has come yet."""
        return any(getattr(one, "cycle", None) is None for one in self.server_state.connections)


def run(server: Server) -> None:
    """Serves until SIGTERM or SIGINT, then answers what was accepted, and returns."""
    settings = server.settings
    log_to_stderr()
    config = uvicorn.Config(
        create_app(server),
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=75,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
    )
    listening = _listening(settings.host, settings.port)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {server.name} at http://{shown}:{port}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when all is answered
    GracefulServer(config, server).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens; raises ValueError if the port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        raise ValueError(f"cannot listen at `host` {host} `port` {port} ({error.strerror}); choose another") from None
    return found


class _JsonLines(logging.Formatter):
    """One line of JSON per request or message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        if isinstance(record.msg, dict):
            return json.dumps(line | record.msg)
        line["message"] = record.getMessage()
        return json.dumps(line | ({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}))


def log_to_stderr() -> None:
    """Writes lines of JSON; not what the package says about the texts of requests."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    handler.addFilter(lambda _: not is_working())
    for one in (logger, access, logging.getLogger("uvicorn")):
        one.handlers, one.propagate = [handler], False
