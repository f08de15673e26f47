"""A real server on a free port of this machine, with a tiny model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from tiny_models import trained

from diffusionbert.model import Model
from diffusionbert.serve.app import create_app
from diffusionbert.serve.run import GracefulServer
from diffusionbert.serve.server import Server
from diffusionbert.serve.settings import ServerSettings


@contextmanager
def serving(settings: ServerSettings | None = None, model: Model | None = None) -> Iterator[tuple[str, Server]]:
    """The address of a server, and the server."""
    server = Server(model or trained(), settings or ServerSettings())
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(server), log_config=None, access_log=False, lifespan="on")
    running = GracefulServer(config, server)
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        running.should_exit = True
        thread.join()
