"""Settings of the server: where it listens, who may use it, and the limits on requests."""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass, field

from diffusionbert.samplers.base import SamplerConfig

DAY = 86_400
"""A day, in seconds."""


@dataclass(frozen=True)
class Limits:
    """Limits on each request, and on the number of requests."""

    body_bytes: int = 1_000_000
    texts: int = 32
    """Texts per request: prompts times `n`, texts to fill, score or embed, options to choose from."""
    characters: int = 20_000
    """Characters per request, over all its texts."""
    steps: int = 1024
    alternatives: int = 100
    """Ranked fillings per text."""
    draws: int = 4096
    """Sequences evaluated for the score of a text."""
    running: int = 64
    """Sequences processed at once."""
    waiting: int = 128
    """Sequences waiting for their turn; further requests are answered with 429."""
    seconds: float = 300.0
    """The time that work on a sequence may take once it has begun."""
    requests: int = 512
    """Requests open at once, of any kind; further ones are answered with 429."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 if name == "waiting" else 1) <= value < sys.maxsize:
                least = 0 if name == "waiting" else 1
                raise ValueError(f"the limit `{name}` must be >= {least} and less than 2⁶³, got {value}")
        if self.steps < SamplerConfig.steps:
            raise ValueError(f"the limit `steps` must be >= {SamplerConfig.steps}, the default, got {self.steps}")
        if self.texts > self.running + self.waiting:
            raise ValueError(
                f"the limit `texts` must be at most `running` + `waiting`, got {self.texts} and "
                f"{self.running} + {self.waiting}: such a request would never be accepted"
            )


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    """Whether other machines may use it without a key."""
    cors_origins: tuple[str, ...] = ()
    """The origins whose pages may use it; its own page always may."""
    drain_delay: float = 0.0
    """The seconds after SIGTERM in which `/ready` returns 503 while requests are still accepted."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.api_key is not None and len(self.api_key.strip()) < 16:
            raise ValueError("the API key must have 16 characters or more; create one with `openssl rand -hex 32`")
        if not self.is_local and self.api_key is None and not self.insecure:
            raise ValueError(
                f"`host` {self.host} can be reached from other machines; set an API key (DIFFUSIONBERT_API_KEY or "
                "`api_key_file`), or give `insecure` to let everyone in"
            )
        if not 0 <= self.drain_delay <= DAY:
            raise ValueError(f"`drain_delay` must be between 0 and {DAY} seconds, got {self.drain_delay}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"`port` must be between 0 and 65535, got {self.port}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The host names that a browser may use, to prevent DNS rebinding by other pages; None allows any."""
        return ("localhost", "127.0.0.1", "[::1]", self.host) if self.is_local and self.api_key is None else None
