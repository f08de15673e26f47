"""Training in two processes of a launch, of which one is killed or stopped, and how processes of a launch exit.

The processes are forks with the environment of torchrun, which take a second where torchrun takes ten:

    python tests/launched.py --exits 50 --load 2    # `make exits`: two sharded processes end so often, under load
    python tests/launched.py --faults 4             # one is killed, or stopped; the run is resumed on one and on two
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from torture import OPTIONS, Torture, share_imports

STEPS = ("--steps=6", "--dropout=0")  # dropout depends on the process
LIMIT = 120.0
"""Seconds, after which a launch counts as a hang."""


class Launcher:
    """Trains in forks of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Torture.write_texts(folder)

    def train(
        self, output: Path, *options: str, processes: int = 2, fault: tuple[int, int] | None = None, at: int = 3
    ) -> tuple[list[int], list[str]]:
        """The exit codes of the processes and what they print.

        Args:
            output: The folder of the run and its cache.
            options: Beside the run's own.
            processes: Their number.
            fault: A process and the signal that it gets.
            at: The step before which it gets that.
        """
        new = [f"--data={self.folder}/text.txt", f"--validation={self.folder}/validation.txt", *OPTIONS, *STEPS]
        words = ["train", *([] if "--resume" in options else new), *options]
        words += [f"--output={output}/run", f"--cache={output}/cache"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for index in range(processes):
            child = os.fork()
            if child == 0:
                names = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": processes, "MASTER_PORT": port}
                if processes > 1:
                    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
                own = fault[1] if fault and fault[0] == index else None
                in_fork(words, self.folder / f"printed-{index}.txt", own, at)
            children.append(child)
        codes: dict[int, int] = {}
        deadline = time.monotonic() + LIMIT
        while len(codes) < processes:
            time.sleep(0.01)
            left = [child for child in children if child not in codes]
            for child in left:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
            # As a launcher does when a process has failed; one that is stopped ends by SIGKILL alone.
            if time.monotonic() > deadline or any(codes.values()):
                time.sleep(0.5 if time.monotonic() < deadline else 0.0)
                for child in left:
                    if child not in codes and (time.monotonic() > deadline or is_stopped(child)):
                        os.kill(child, signal.SIGKILL)
        printed = [(self.folder / f"printed-{index}.txt").read_text(errors="replace") for index in range(processes)]
        return [codes[child] for child in children], printed


def is_stopped(process: int) -> bool:
    """Whether a process got SIGSTOP."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def in_fork(words: list[str], printed: Path, own: int | None, at: int) -> None:
    """Runs the command as a process of a launch, and never returns."""
    import torch

    from diffusionbert import parallel
    from diffusionbert.cli import main as command_line
    from diffusionbert.training.step import TrainingStep

    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    parallel.SECONDS_PER_BEAT, parallel.MOST_MISSED, command_line.SECONDS_TO_REPORT = 0.25, 12, 0.5
    taken = TrainingStep.__call__

    def step(self, batch):
        if own is not None and batch.step == at:
            os.kill(os.getpid(), own)
        return taken(self, batch)

    TrainingStep.__call__ = step
    sys.argv = ["diffusionbert", *words]
    if os.environ.get("PLAIN_EXIT"):  # as before processes of a launch left at once
        command_line.main(words)
        sys.exit(0)  # of a fork at the top level of this module
    try:
        command_line.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    os._exit(code)


def losses(output: Path) -> dict[int, float]:
    """The losses of a run by step."""
    rows = [json.loads(line) for line in (output / "run" / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def require_same(output: Path, whole: Path) -> None:
    """The split over processes changes rounding alone."""
    mine, theirs = losses(output), losses(whole)
    assert mine.keys() == theirs.keys(), (mine, theirs)
    assert all(abs(mine[step] - theirs[step]) < 1e-4 for step in theirs), (mine, theirs)


def faults(launcher: Launcher, number_of_cases: int) -> None:
    """One of two processes is killed or stopped; the other says so and ends; the run goes on in one and in two."""
    whole = launcher.folder / "whole"
    codes, printed = launcher.train(whole, processes=1)
    assert codes == [0], printed
    cases = [
        ("killed", 1, signal.SIGKILL, 1),
        ("stopped", 1, signal.SIGSTOP, 2),
        ("main killed", 0, signal.SIGKILL, 2),
        ("main stopped", 0, signal.SIGSTOP, 1),
    ]
    for name, which, number, resumed in cases[:number_of_cases]:
        output = launcher.folder / name
        codes, printed = launcher.train(output, "--save-every=2", fault=(which, number))
        other = 1 - which
        print(f"{name}: exit codes {codes}; {printed[other].splitlines()[-1]}", flush=True)
        assert codes[which] == -signal.SIGKILL, (codes, printed)
        assert codes[other] == 1, (codes, printed)
        assert "Traceback" not in printed[other], printed
        assert printed[other].splitlines()[-1].startswith("diffusionbert: "), printed
        said = "has ended" if number == signal.SIGKILL else "no sign of life"
        assert said in printed[other].splitlines()[-1], printed
        codes, printed = launcher.train(output, "--resume", processes=resumed)
        assert codes == [0] * resumed, printed
        require_same(output, whole)


def exits(launcher: Launcher, repetitions: int, load: int) -> int:
    """Lets two sharded processes train and exit again and again; returns how many did not exit as they should."""
    parent, burners = os.getpid(), []
    for _ in range(load):
        child = os.fork()
        if child == 0:
            while True:
                sum(range(10**6))
        burners.append(child)
    failed = 0
    try:
        for number in range(repetitions):
            if number and number % 10 == 0:
                print(f"{number} times, {failed} bad exits", flush=True)
            output = launcher.folder / "exit"
            shutil.rmtree(output, ignore_errors=True)
            codes, printed = launcher.train(output, "--sharded", "--steps=1")
            assert (output / "run" / "model" / "model.safetensors").exists(), printed
            if codes != [0, 0] or any("terminate called" in each for each in printed):
                failed += 1
                print(f"exit codes {codes}: {printed[0][-200:]!r} {printed[1][-200:]!r}", flush=True)
    finally:
        for child in burners if os.getpid() == parent else ():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    print(f"{repetitions} times two sharded processes, {load} other busy processes: {failed} bad exits")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--exits", type=int, default=0)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    options = parser.parse_args()
    share_imports()
    parent, place = os.getpid(), tempfile.mkdtemp(prefix="diffusionbert-launched-")
    bad = 0
    try:
        launched = Launcher(Path(place))
        if options.faults:
            faults(launched, options.faults)
        if options.exits:
            bad = exits(launched, options.exits, options.load)
    finally:
        if os.getpid() == parent:
            shutil.rmtree(place)
    sys.exit(min(bad, 1))
