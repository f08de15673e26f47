"""Puts a server under load: 64 concurrent clients, some of which disconnect. Checks answers, speed and memory.

    python benchmarks/serve_load.py --seconds 60

This starts `diffusionbert serve`, requests each text once alone, and then lets all clients request texts at random.
Every answer must be complete and equal to the one given alone. At the end, SIGTERM arrives while all clients wait:
every accepted request must be answered. The same texts are then generated in one process, in batches, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = ["the", "king", "of", "france", "and", "his", "old", "friend", "saw", "a", "river", "near", "the", "city"]


@dataclass(frozen=True)
class Item:
    """A text to request."""

    prompt: str
    max_tokens: int
    seed: int

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed}


def items_of(number: int, most_tokens: int, seed: int = 0) -> list[Item]:
    """Texts of different lengths after different prompts."""
    chance = random.Random(seed)
    return [
        Item(
            " ".join(WORDS[: chance.randint(1, most_tokens // 2)]),
            chance.randint(max(1, most_tokens // 4), most_tokens // 2),
            chance.randrange(2**32),
        )
        for _ in range(number)
    ]


@dataclass
class Tally:
    """The outcomes of requests."""

    seconds: list[float] = field(default_factory=list)
    """The seconds until each complete answer."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """The time at which each was complete, and its generated tokens."""
    num_refused: int = 0
    """Responses 429 and 503, after which the client tries again."""
    num_gone: int = 0
    """Requests whose client disconnected."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from those given alone, or that are not complete."""

    def quantile(self, fraction: float) -> float:
        ranked = sorted(self.seconds)
        return ranked[min(len(ranked) - 1, int(fraction * len(ranked)))] if ranked else float("nan")


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a server in a separate process; returns it and its address."""
    command = [sys.executable, "-m", "diffusionbert", "serve", "--port", "0", *options]  # a later port overrides it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the server did not start")
    return process, line.split()[-1]


def memory_of(process: subprocess.Popen[str]) -> float:
    """The resident memory of a process, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def answers_alone(address: str, items: list[Item]) -> dict[Item, str]:
    """The text of each item, one after the other."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        return {
            item: (await client.post("/v1/completions", json=item.body)).json()["choices"][0]["text"] for item in items
        }


async def ask(client: httpx.AsyncClient, item: Item, expected: str, tally: Tally, leave: float | None = None) -> None:
    """Requests a text, again if it is refused; disconnects after `leave` seconds if given.

    Raises:
        httpx.ConnectError: The server no longer accepts requests.
    """
    began = time.monotonic()
    while True:
        try:
            asked = client.post("/v1/completions", json=item.body)
            response = await (asked if leave is None else asyncio.wait_for(asked, leave))
        except (TimeoutError, asyncio.TimeoutError):
            tally.num_gone += 1
            return
        except httpx.ConnectError:
            raise
        except httpx.HTTPError as error:
            tally.wrong.append(f"{type(error).__name__}: {error}")
            return
        if response.status_code not in (429, 503):
            break
        tally.num_refused += 1
        await asyncio.sleep(min(1.0, float(response.headers.get("retry-after", 1))))
    if response.status_code != 200 or response.json()["choices"][0]["text"] != expected:
        tally.wrong.append(response.text[:200])
        return
    tally.seconds.append(time.monotonic() - began)
    tally.tokens.append((time.monotonic(), item.max_tokens))


async def load(
    address: str,
    expected: dict[Item, str],
    *,
    clients: int,
    seconds: float | None = None,
    requests: int | None = None,
    leaving: float = 0.1,
    patience: float = 2.0,
    seed: int = 0,
) -> Tally:
    """Lets clients request texts for some time or until enough requests are made, then waits for all answers."""
    chance, tally, items = random.Random(seed), Tally(), list(expected)
    end, num_left = time.monotonic() + (seconds or 1e9), requests or 10**9

    async def run(client: httpx.AsyncClient) -> None:
        nonlocal num_left
        while time.monotonic() < end and num_left > 0:
            num_left -= 1
            item = chance.choice(items)
            leave = chance.uniform(0, patience) if chance.random() < leaving else None
            await ask(client, item, expected[item], tally, leave)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        await asyncio.gather(*(run(client) for _ in range(clients)))
    return tally


async def load_until_stopped(
    process: subprocess.Popen[str], address: str, expected: dict[Item, str], *, clients: int, seconds: float
) -> tuple[Tally, int]:
    """Lets clients send requests until the server, stopped after some seconds, accepts no more; returns its status."""
    tally, items = Tally(), list(expected)

    async def run(number: int, client: httpx.AsyncClient) -> None:
        chance = random.Random(number)
        while True:
            item = chance.choice(items)
            try:
                await ask(client, item, expected[item], tally)
            except httpx.ConnectError:
                return

    async def stop() -> None:
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGTERM)

    # Each request has its own connection: a connection that is kept open may be closed while a request is on its way,
    # which is then not accepted. A load balancer retries such a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        await asyncio.gather(stop(), *(run(number, client) for number in range(clients)))
    return tally, await asyncio.to_thread(process.wait)


def offline(model: str | None, items: list[Item], number: int) -> float:
    """Generated tokens per second without a server, for `number` randomly drawn items, in batches."""
    from diffusionbert.inference.generate import generate_together
    from diffusionbert.inference.tasks import Task
    from diffusionbert.model import TOP_P, load, sampling_request

    engine, request = load(model, device="cpu").engine, sampling_request(None, 128, 1.0, None, TOP_P, None)
    drawn = random.Random(0).choices(items, k=number)
    tasks = [
        Task(prompt=item.prompt, max_new_tokens=item.max_tokens, seed=item.seed, capitalize=True) for item in drawn
    ]
    generate_together(engine, tasks[:4], request)
    began = time.monotonic()
    generate_together(engine, tasks, request)
    return sum(item.max_tokens for item in drawn) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; the bundled model by default")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--items", type=int, default=24, help="different texts")
    parser.add_argument("--tokens", type=int, default=40, help="the maximum number of tokens of a text")
    given = parser.parse_args()
    items = items_of(given.items, given.tokens)
    options = ["--model", given.model] if given.model else []
    process, address = start(*options)
    try:
        found = asyncio.run(measure(process, address, items, given))
    finally:
        process.kill()
    rate = offline(given.model, items, max(64, given.items))
    found["offline tokens per second"] = round(rate, 1)
    found["served / offline"] = round(found["tokens per second"] / rate, 2)
    print(json.dumps(found, indent=2))


async def measure(
    process: subprocess.Popen[str], address: str, items: list[Item], given: argparse.Namespace
) -> dict[str, Any]:
    """The figures of a server."""
    expected = await answers_alone(address, items)
    # A first round fills caches and the pools of threads and connections; after it, memory should not grow.
    await load(address, expected, clients=given.clients, seconds=given.seconds / 4, seed=1)
    memory, began = [memory_of(process)], time.monotonic()

    async def watch_memory() -> None:
        for _ in range(4):
            await asyncio.sleep(given.seconds / 4)
            memory.append(memory_of(process))

    loaded = load(address, expected, clients=given.clients, seconds=given.seconds, seed=2)
    total, _ = await asyncio.gather(loaded, watch_memory())
    steady = [tokens for moment, tokens in total.tokens if given.seconds / 4 < moment - began < given.seconds]
    ended, status = await load_until_stopped(process, address, expected, clients=given.clients, seconds=5.0)
    return {
        "clients": given.clients,
        "seconds": given.seconds,
        "complete answers": len(total.seconds),
        "clients that went away": total.num_gone,
        "answers 429": total.num_refused,
        "wrong or lost answers": len(total.wrong),
        "p50 seconds": round(total.quantile(0.5), 2),
        "p99 seconds": round(total.quantile(0.99), 2),
        "tokens per second": round(sum(steady) / (0.75 * given.seconds), 1),  # after a quarter: all clients wait
        "memory in MB, at the start and after each quarter": [round(one) for one in memory],
        "under SIGTERM": {
            "complete answers": len(ended.seconds),
            "wrong or lost answers": len(ended.wrong),
            "exit status": status,
            "examples": ended.wrong[:3],
        },
    }


if __name__ == "__main__":
    main()
