"""`serve`: serves a model through an OpenAI-compatible HTTP API and a web page."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from diffusionbert.cli.common import Flag, GeneratingModel, OptionalPath, option

KEY = "DIFFUSIONBERT_API_KEY"
"""The environment variable with the API key."""


@dataclass(frozen=True)
class LimitOptions:
    """Limits on requests."""

    body_bytes: int = 1_000_000
    """The maximum size of a request body, in bytes."""
    characters: int = 20_000
    """The maximum number of characters per request, over all its texts."""
    texts: int = 32
    """The maximum number of texts per request: prompts times n, or texts to fill, score or embed."""
    max_steps: int = 1024
    """The maximum number of sampling steps."""
    running: int = 64
    """The number of sequences processed at once."""
    waiting: int = 128
    """The number of sequences that may wait; further requests are answered with 429."""
    seconds: float = 300.0
    """The maximum number of seconds of work on one sequence."""


@dataclass(frozen=True)
class Serve:
    """Serve a model: an API for OpenAI's clients, and a page to watch it generate (needs the extra `serve`).

    Example: diffusionbert serve --port 8000
    """

    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """The address to listen on. Any but a loopback address needs an API key or --insecure. Default: 127.0.0.1."""
    port: int = 8000
    """The port to listen on; 0 picks a free one."""
    api_key_file: OptionalPath = None
    """A file with the API key that clients must send. Default: the environment variable DIFFUSIONBERT_API_KEY."""
    insecure: Flag = False
    """Accept requests without an API key from everyone who can reach the address."""
    cors_origin: Annotated[tuple[str, ...], option("[ORIGIN ...]")] = ()
    """Other origins whose pages may use the server from a browser, such as https://example.org. Default: none."""
    drain_delay: float = 0.0
    """The number of seconds after SIGTERM in which requests are still accepted while /ready returns 503."""
    limits: tyro.conf.OmitArgPrefixes[LimitOptions] = field(default_factory=LimitOptions)
    model: tyro.conf.OmitArgPrefixes[GeneratingModel] = field(default_factory=GeneratingModel)

    def run(self) -> None:
        """Serves until it is stopped."""
        try:
            from diffusionbert.serve.run import run
            from diffusionbert.serve.server import Server
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f"serving needs {error.name}, which is not installed; run pip install 'diffusionbert[serve]'"
            ) from None
        from diffusionbert.serve.settings import Limits, ServerSettings

        given = {one.name.removeprefix("max_"): getattr(self.limits, one.name) for one in fields(self.limits)}
        settings = ServerSettings(
            host=self.host,
            port=self.port,
            api_key=_key(self.api_key_file),
            insecure=self.insecure,
            cors_origins=self.cors_origin,
            drain_delay=self.drain_delay,
            limits=Limits(**given),
        )
        run(Server(self.model.loaded(compile=self.model.compile), settings))


def _key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(KEY) or None
    from diffusionbert.storage.limits import read_text

    return read_text(file).strip()
