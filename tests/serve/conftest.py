"""A server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from serving import serving

from diffusionbert.serve.server import Server
from diffusionbert.serve.settings import Limits, ServerSettings


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Server]]:
    """Its address, and itself."""
    with serving(ServerSettings(limits=Limits(characters=2000, texts=8, steps=128, body_bytes=100_000))) as found:
        yield found


@pytest.fixture
def client(served) -> Iterator[httpx.Client]:
    """Asks it."""
    with httpx.Client(base_url=served[0], timeout=60) as found:
        yield found
