"""Restarts two servers behind nginx one after the other under load: no request may be lost.

    python benchmarks/serve_rolling.py

This needs nginx (Debian's `nginx-light`) and tests the configuration in docs/serving.md, with other ports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from serve_load import Item, Tally, answers_alone, ask, items_of, start

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def documented(ports: dict[int, int]) -> str:
    """The configuration in the documentation, with these ports instead of its own."""
    [block] = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL)
    for old, new in ports.items():
        block = block.replace(str(old), str(new))
    return f"pid nginx.pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{block}}}\n"


async def rolling(address: str, expected: dict[Item, str], restart: list[Any], clients: int) -> Tally:
    """Lets clients send requests continuously while one server after the other is restarted."""
    tally, items, is_over = Tally(), list(expected), False

    async def run(number: int, client: httpx.AsyncClient) -> None:
        count = number
        while not is_over:
            count += 1
            item = items[count % len(items)]
            await ask(client, item, expected[item], tally)

    async with httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        running = [asyncio.create_task(run(number, client)) for number in range(clients)]
        for one in restart:
            await asyncio.sleep(2)
            await asyncio.to_thread(one)
        await asyncio.sleep(2)
        is_over = True
        await asyncio.gather(*running)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; the bundled model by default")
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed; on Debian: apt-get install nginx-light")
    options = ["--model", given.model] if given.model else []
    front, *ports = [free_port() for _ in range(3)]
    servers = {port: start("--port", str(port), *options)[0] for port in ports}

    def restart(port: int) -> None:
        servers[port].send_signal(signal.SIGTERM)
        servers[port].wait()
        servers[port], address = start("--port", str(port), *options)
        while httpx.get(f"{address}/ready").status_code != 200:
            time.sleep(0.1)

    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "nginx.conf"
        configuration.write_text(documented({8000: front, 8001: ports[0], 8002: ports[1]}), encoding="utf-8")
        command = ["nginx", "-p", folder, "-c", str(configuration), "-g", "daemon off;"]
        proxy = subprocess.Popen(command)
        try:
            address = f"http://127.0.0.1:{front}"
            items = items_of(8, 12)
            expected = asyncio.run(answers_alone(address, items))
            restarts = [lambda port=port: restart(port) for port in ports]
            tally = asyncio.run(rolling(address, expected, restarts, given.clients))
        finally:
            for process in (proxy, *servers.values()):
                process.terminate()
                process.wait()
    found = {"complete answers": len(tally.seconds), "wrong or lost": len(tally.wrong), "examples": tally.wrong[:3]}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
