"""The command: a server in a process of its own, under load, until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import uvicorn
from serve_load import answers_alone, items_of, load, load_until_stopped, start
from tiny_models import trained, trained_run

from diffusionbert.cli.main import main, parse_arguments
from diffusionbert.inference.choose import choose
from diffusionbert.likelihood.orders import Order
from diffusionbert.reporting import logger
from diffusionbert.serve.app import create_app
from diffusionbert.serve.gate import access
from diffusionbert.serve.run import GracefulServer, log_to_stderr
from diffusionbert.serve.server import Server
from diffusionbert.serve.settings import ServerSettings


@pytest.mark.slow
def test_no_answer_is_wrong_or_lost_under_load_and_sigterm():
    """Texts are the same alone and in the crowd, and whoever was accepted before SIGTERM gets an answer."""
    process, address = start("--model", str(trained_run()), "--running", "8", "--waiting", "64", "--texts", "8")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
    items = items_of(8, 8)

    async def run() -> None:
        expected = await answers_alone(address, items)
        tally = await load(address, expected, clients=64, requests=96, patience=0.2)
        assert not tally.wrong
        assert len(tally.seconds) + tally.num_gone == 96
        assert tally.num_gone
        ended, status = await load_until_stopped(process, address, expected, clients=16, seconds=0.5)
        assert not ended.wrong
        assert ended.seconds
        assert status == 0

    try:
        asyncio.run(run())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def _loggers_as_before() -> Iterator[None]:
    loggers = (logger, access, logging.getLogger("uvicorn"))
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for one, handlers, propagate, level in before:
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.mark.usefixtures("_loggers_as_before")
def test_logs_are_lines_of_json_without_the_texts_of_requests(capsys):
    server = Server(trained())  # which may be trained now, and say so
    log_to_stderr()
    logger.setLevel(logging.INFO)
    capsys.readouterr()
    try:
        options = ["king", "King"]  # which the model reads alike, as it warns
        order = Order.LEFT_TO_RIGHT
        [work] = server.scheduler.submit([lambda: choose(server.engine, ["the [BLANK] ."], [options], order=order)])
        work.future.result(timeout=60)
        access.info({"path": "/v1/choose", "status": 200})
        try:
            raise RuntimeError("it broke")
        except RuntimeError:
            logger.exception("a request failed")
    finally:
        server.scheduler.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["info", "error"]
    assert lines[0]["path"] == "/v1/choose"
    assert "it broke" in lines[1]["traceback"]


def test_with_a_delay_requests_are_accepted_after_sigterm(monkeypatch):
    timers: list[tuple] = []

    class Timer:
        def __init__(self, *given: object) -> None:
            timers.append(given)

        def start(self) -> None:
            pass

    monkeypatch.setattr("diffusionbert.serve.run.threading.Timer", Timer)
    server = Server(trained(), ServerSettings(drain_delay=5.0))
    running = GracefulServer(uvicorn.Config(create_app(server)), server)
    try:
        running.handle_exit(signal.SIGTERM, None)
        assert (server.status, running.should_exit) == ("draining", False)
        [(delay, stop, arguments)] = timers
        assert delay == 5
        stop(*arguments)
        assert running.should_exit
    finally:
        server.scheduler.close()


def test_a_client_that_has_connected_before_a_stop_is_answered(monkeypatch):
    monkeypatch.setattr("diffusionbert.serve.run.REQUEST_GRACE", 60.0)
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    server = Server(trained())
    running = GracefulServer(uvicorn.Config(create_app(server), log_config=None), server)

    async def accepts() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return False
        writer.close()
        return True

    async def run() -> bytes:
        serving = asyncio.create_task(running.serve(sockets=[listening]))
        while not running.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(host, port)
        running.should_exit = True
        while await accepts():
            await asyncio.sleep(0.01)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        line = await reader.readline()
        writer.close()
        await serving
        return line

    try:
        assert asyncio.run(run()) == b"HTTP/1.1 200 OK\r\n"
    finally:
        server.scheduler.close()


def test_a_client_that_connects_at_the_moment_of_a_stop_is_answered(monkeypatch):
    listening = socket.create_server(("127.0.0.1", 0))
    server, clients = Server(trained()), list[socket.socket]()
    running = GracefulServer(uvicorn.Config(create_app(server), log_config=None), server)

    async def connect() -> None:  # and stop, before the event loop has accepted the connection
        clients.append(socket.create_connection(listening.getsockname(), timeout=60))
        clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    monkeypatch.setattr(running, "main_loop", connect)
    try:
        asyncio.run(running.serve(sockets=[listening]))
        with clients[0] as client:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        server.scheduler.close()


def test_help_does_not_need_the_extra():
    code = (
        "import sys\nfor name in ('fastapi', 'uvicorn', 'pydantic', 'prometheus_client'): sys.modules[name] = None\n"
        "from diffusionbert.cli.main import main\nmain(['serve', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--api-key-file" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code.replace(", '--help'", "")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'diffusionbert[serve]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines; set an API key"),
        (["--port", "99999"], "--port must be between 0 and 65535"),
        (["--texts", "1000"], "--texts must be at most"),
        (["--max-steps", "3"], "must be >= 128"),
        (["--api-key-file", "nowhere"], "No such file"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys, monkeypatch):
    monkeypatch.delenv("DIFFUSIONBERT_API_KEY", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["serve", *options])
    printed = capsys.readouterr()
    assert end.value.code in (1, 2)
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    from diffusionbert.cli.serve import _key

    (tmp_path / "key").write_text("from a file\n")
    monkeypatch.setenv("DIFFUSIONBERT_API_KEY", "from the environment")
    assert _key(tmp_path / "key") == "from a file"
    assert _key(None) == "from the environment"
    monkeypatch.delenv("DIFFUSIONBERT_API_KEY")
    assert _key(None) is None
    assert "DIFFUSIONBERT_API_KEY" not in os.environ
    assert parse_arguments(["serve", "--port", "0"]).port == 0
