"""No command opens a connection when the model and the data are local."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from shared import encoding_cache
from tiny_models import corpus, trained_run

from diffusionbert.cli.main import COMMANDS

WATCHED = """
import sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments
    else:
        return
    host = address[0] if isinstance(address, tuple) else address
    if host not in ("127.0.0.1", "localhost", "::1", None) and not str(host).startswith(("/", "\\0")):
        print("connection", event, address, file=sys.stderr, flush=True)
        raise RuntimeError(f"a connection was opened to {address}")

sys.addaudithook(watch)
"""
"""Put before a program, refuses every connection to another machine and says so; HF_HUB_OFFLINE is not needed."""
PROGRAM = (
    WATCHED
    + """
import contextlib, io, json, os, signal, threading, time, urllib.request

from tiny_scale import SMALLER_THAN_SMOKE

from diffusionbert.cli.main import main
from diffusionbert.reproduce.reproduction import SCALES
from diffusionbert.workflows import bench, timing
from diffusionbert.workflows.sampling_work import DecoderSampling, OurSampling, Texts

texts = Texts(1, 4, None)
bench.ROWS = (bench.Row("sample-tiny", OurSampling(texts), DecoderSampling(texts)),)
timing.SECONDS_PER_TURN = 0.0
SCALES["smoke"] = SMALLER_THAN_SMOKE

def stop_when_answered(port):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            body = json.dumps({"prompt": "the king", "max_tokens": 3}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            answered.append(urllib.request.urlopen(request, timeout=60).status)
            break
        except OSError:
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

answered = []
for command in json.loads(sys.argv[1]):
    if command[0] == "serve":
        port = command[command.index("--port") + 1]
        threading.Thread(target=stop_when_answered, args=(port,), daemon=True).start()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main(command)
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print(command[0], len(printed.getvalue()), *(answered if command[0] == "serve" else ()))
"""
)
SMALL = "--steps 2 --max-length 24 --layers 1 --width 16 --heads 2 --vocabulary 512 --seed 3"
BRIEF = "--minutes 0.01 --samples 1"
FEW = "--samples 4 --max-draws 2 --sentences 8"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def every_command(folder: Path) -> dict[str, list[str]]:
    """Each command at a tiny size, with a model and data of this machine."""
    model, data, text = ["--model", str(trained_run())], str(corpus()), "the king saw a river ."
    cached = ["--data", data, "--cache", str(encoding_cache())]
    small, evaluation = [*cached, *SMALL.split()], str(folder / "evaluation")
    return {
        "generate": [*model, "--length", "6", "--steps", "2"],
        "fill": ["the [MASK] saw [BLANK] .", *model],
        "rewrite": [text, *model],
        "score": [text, *model, "--max-draws", "4"],
        "choose": ["the king saw [BLANK] .", "a river", "the sea", *model],
        "train": [*small, "--output", str(folder / "run"), "--validate-every", "1"],
        "pretrain": [*small, "--output", str(folder / "masked")],
        "evaluate": [*model, "--data", data, *FEW.split(), "--output", evaluation],
        "adapt": [data, *model, *BRIEF.split(), "--cache", str(folder / "cache"), "--output", str(folder / "adapted")],
        "audit": ["pseudo-likelihood"],
        "compare": [evaluation],
        "reproduce": ["figure2", *cached, "--scale", "smoke", "--output", str(folder / "paper")],
        "plot": [str(folder / "run"), "--output", str(folder / "curve.png")],
        "doctor": [*model, "-n", "4"],
        "info": model,
        "bench": ["--rounds", "1", "--device", "cpu"],
        "serve": [*model, "--port", str(free_port())],
    }


def run(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user does, who has not set HF_HUB_OFFLINE as the tests have."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        check=False,
    )


@pytest.mark.slow
def test_no_command_opens_a_connection_with_a_local_model(tmp_path):
    """In one process, which must end the server by SIGTERM and therefore serves last."""
    options = every_command(tmp_path)
    assert set(options) == set(COMMANDS)
    done = run(PROGRAM, json.dumps([[name, *words] for name, words in options.items()]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "connection" not in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(options)
    assert lines[-1][-1] == "200"


def test_the_watch_sees_a_connection():
    """So that its silence means something."""
    code = "from huggingface_hub import hf_hub_download\nhf_hub_download('gpt2', 'config.json', force_download=True)"
    done = run(WATCHED + code)
    assert done.returncode
    assert "connection socket." in done.stderr
