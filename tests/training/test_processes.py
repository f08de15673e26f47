"""Training in processes: exact resumption after a kill, and the same losses in one process and in two."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared import shared

pytestmark = pytest.mark.slow

MUON = ["--dropout=0", "--optimizer=muon", "--in-double", "--steps=10"]
WORKER = Path(__file__).parent.parent / "training_worker.py"


def work(folder: Path, *options: str, processes: int = 1, expect: int = 0) -> str:
    command = [sys.executable, str(WORKER), str(folder), *options]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launcher, *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor([event["loss"] for event in log(folder) if "loss" in event])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = json.loads((folder / "last.json").read_text())["checkpoint"]
    files = sorted((folder / "checkpoints" / last).glob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(folder: Path, other: Path) -> None:
    mine, theirs = weights(folder), weights(other)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 100
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert [{k: v for k, v in event.items() if k not in ("time", "tokens_per_second")} for event in log(folder)] == [
        {k: v for k, v in event.items() if k not in ("time", "tokens_per_second")} for event in log(other)
    ]


@pytest.fixture(scope="module")
def straight() -> Path:
    """An undisturbed run with dropout."""
    return shared("processes-straight", work)


def test_training_lowers_the_bound_and_logs_it(straight):
    validations = [event for event in log(straight) if event["event"] == "validation"]
    assert [event["step"] for event in validations] == [0, 10, 20, 30]
    assert validations[-1]["nats_per_token"] < 0.9 * validations[0]["nats_per_token"]
    assert {event["kind"] for event in validations} == {"bound"}
    steps = [event for event in log(straight) if "loss" in event]
    assert [event["step"] for event in steps] == list(range(1, 31))
    assert set(steps[0]) >= {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "tokens_seen", "epoch"}
    assert (straight / "model" / "weights.safetensors").exists()


@pytest.mark.parametrize("kill_at", [3, 17, 20])
def test_a_killed_run_resumes_exactly(straight, tmp_path, kill_at):
    work(tmp_path, f"--kill-at={kill_at}", expect=-signal.SIGKILL)
    work(tmp_path, "--resume")
    assert_same_run(tmp_path, straight)


def test_a_kill_while_writing_leaves_the_previous_checkpoint(straight, tmp_path):
    work(tmp_path, "--kill-at=15", "--kill-while-saving", expect=-signal.SIGKILL)
    assert json.loads((tmp_path / "last.json").read_text())["checkpoint"] == "step-00000010"
    work(tmp_path, "--resume")
    assert_same_run(tmp_path, straight)
    assert not list(tmp_path.rglob("*.unfinished"))


def test_sigterm_writes_a_checkpoint(straight, tmp_path):
    said = work(tmp_path, "--terminate-at=13")
    assert "stopped at step 14" in said
    work(tmp_path, "--resume")
    assert_same_run(tmp_path, straight)


@pytest.fixture(scope="module")
def alone() -> Path:
    """A run in one process, without dropout, which depends on the process."""
    return shared("processes-alone", lambda output: work(output, "--dropout=0"))


@pytest.mark.parametrize(
    ("processes", "options"),
    [(1, ["--micro-tokens=50"]), (2, []), (2, ["--sharded"]), (2, ["--sharded", "--micro-tokens=30"])],
    ids=["accumulated", "copied", "sharded", "sharded and accumulated"],
)
def test_the_split_of_a_batch_changes_nothing(alone, tmp_path, processes, options):
    """Two processes (gloo, CPU), copied or sharded, reach the losses and parameters of one."""
    work(tmp_path, "--dropout=0", *options, processes=processes)
    torch.testing.assert_close(losses(tmp_path), losses(alone), atol=1e-4, rtol=1e-4)
    expected = weights(alone)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=1e-2)


@pytest.fixture(scope="module")
def alone_with_muon() -> Path:
    """The same with Muon; in bfloat16, rounding alone would move the parameters of two runs apart."""
    return shared("processes-muon", lambda output: work(output, *MUON))


@pytest.mark.parametrize("options", [[], ["--sharded"]], ids=["copied", "sharded"])
def test_muon_updates_whole_matrices(alone_with_muon, tmp_path, options):
    work(tmp_path, *MUON, *options, processes=2)
    torch.testing.assert_close(losses(tmp_path), losses(alone_with_muon), atol=1e-4, rtol=1e-4)
    expected = weights(alone_with_muon)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=1e-2)


def test_a_sharded_run_stops_after_a_signal_to_one_process_and_resumes_in_one(alone, tmp_path):
    work(tmp_path, "--dropout=0", "--sharded", "--terminate-at=12", "--terminate-rank=1", processes=2)
    assert json.loads((tmp_path / "last.json").read_text())["checkpoint"] == "step-00000013"
    work(tmp_path, "--dropout=0", "--resume")
    torch.testing.assert_close(losses(tmp_path), losses(alone), atol=1e-4, rtol=1e-4)
