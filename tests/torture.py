"""Faults in a short training run: a call on its files fails, or the process is killed there; then the run is resumed
and must be, byte for byte, the run that nothing disturbed.

A shim in C (`faults.c`) stands between the process and its files, so that calls of Rust and numpy are met as well. A
case is a kind of call, its number, and what happens there: an error (ENOSPC stays, as on a full disk; the others
happen once) or a kill before, in the middle of, or after it. It happens while training or while resuming, with one
thread or two. An error must be reported in one line. Cases run in forks of one process:

    python tests/torture.py 10              # minutes; `make torture`
    python tests/torture.py 10 --sample 20  # so many cases, always the same
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = "read", "open", "write", "fsync", "rename", "remove", "mkdir"
"""Opening a file to read, opening one to write, …; in the order of `faults.c`."""
FATES = "ENOSPC", "EIO", "EPERM", "kill before", "kill after"
"""A write that fails, or after which the process is killed, has written its first half."""
SECONDS = 120
"""After which a case counts as a hang."""
OPTIONS = [
    *("--steps=4", "--validate-every=2", "--save-every=1", "--log-every=1", "--batch-tokens=160", "--ema=0.9"),
    *("--layers=1", "--width=16", "--heads=2", "--vocabulary=512", "--max-length=24"),
]


@dataclass(frozen=True)
class Case:
    """A fault, and when it happens."""

    kind: str
    number: int
    fate: str
    threads: int = 1
    resuming: bool = False
    """While a run that was killed is resumed; else in the first process."""

    def __str__(self) -> str:
        when = "resuming" if self.resuming else "training"
        return f"{self.fate} at {self.kind} {self.number} while {when}, {self.threads} thread(s)"


def arm(folder: Path, case: Case | None) -> None:
    """Counts calls below a folder from here on, and lets the fault of a case happen."""
    case = case or Case("read", 0, "EIO")  # calls are counted from 1
    action = {"kill before": 1, "kill after": 2}.get(case.fate, 0)
    code, stays = getattr(errno, case.fate, 0), case.fate == "ENOSPC"
    ctypes.CDLL(None).faults_arm(os.fsencode(folder), KINDS.index(case.kind), case.number, action, code, stays)


@dataclass(frozen=True)
class End:
    """How a process ended."""

    code: int
    """Negative: the signal that killed it."""
    printed: str
    calls: dict[str, int]
    """On files by kind; empty if it was killed."""

    @property
    def flaw(self) -> str | None:
        """What is wrong with this end; None if nothing."""
        *_, last = ["", *self.printed.splitlines()]
        is_told = last.startswith("diffusionbert: ") and self.printed.count("diffusionbert: ") == 1
        if "Traceback" in self.printed:
            return f"a traceback: {last}"
        if self.code in (0, -signal.SIGKILL) or (is_told and self.code in (1, 2)):
            return None
        return f"exit code {self.code} and {last!r}"


class Torture:
    """Runs cases in a folder, and compares them with undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write_texts(folder)
        self.expected: dict[int, dict[str, object]] = {}
        self.calls: dict[bool, dict[str, int]] = {}
        for threads in (1, 2):  # so small a network does not depend on their number
            whole = self.train(folder / f"whole-{threads}", threads)
            assert whole.code == 0, whole.printed
            self.expected[threads] = contents(folder / f"whole-{threads}" / "run")
        self.calls[False] = whole.calls
        # A run that was killed halfway, for faults while it is resumed.
        middle = Case("rename", whole.calls["rename"] // 2, "kill before")
        assert self.train(folder / "half", 1, middle).code == -signal.SIGKILL
        shutil.copytree(folder / "half", folder / "resumed")
        resumed = self.train(folder / "resumed", 1, resume=True)
        assert resumed.code == 0, resumed.printed
        self.calls[True] = resumed.calls

    @staticmethod
    def write_texts(folder: Path) -> None:
        """Writes a text to train on and one to validate on."""
        words = itertools.product(("king", "dog"), ("saw", "met"), "xyz")
        names = [f"the {one} {verb} a {other} ." for one, verb, other in words]
        (folder / "text.txt").write_text("\n".join(names * 7) + "\n", encoding="utf-8")
        (folder / "validation.txt").write_text("\n".join(names[::2]) + "\n", encoding="utf-8")

    def train(self, output: Path, threads: int, case: Case | None = None, *, resume: bool = False) -> End:
        """Trains in a fork of this process; the run and its cache lie in `output`."""
        printed, calls = self.folder / "printed.txt", self.folder / "calls.json"
        calls.unlink(missing_ok=True)
        new = [f"--data={self.folder}/text.txt", f"--validation={self.folder}/validation.txt", *OPTIONS]
        words = [*(["--resume"] if resume else new), f"--output={output}/run", f"--cache={output}/cache"]
        child = os.fork()
        if child == 0:
            in_fork(words, output, threads, case, printed, calls)
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGABRT)
            time.sleep(0.005)
        counted = json.loads(calls.read_text()) if calls.exists() else {}
        return End(os.waitstatus_to_exitcode(ended[1]), printed.read_text(errors="replace"), counted)

    def attempt(self, case: Case) -> tuple[str, str | None]:
        """How the disturbed process ended, and what is wrong with that or with the run resumed; None if nothing."""
        output = self.folder / "case"
        shutil.rmtree(output, ignore_errors=True)
        if case.resuming:
            shutil.copytree(self.folder / "half", output)
        disturbed = self.train(output, case.threads, case, resume=case.resuming)
        outcome = {0: "went on", -signal.SIGKILL: "killed"}.get(disturbed.code, "one line")
        if disturbed.flaw:
            return outcome, disturbed.flaw
        resumed = self.train(output, case.threads, resume=True)
        if resumed.code == 2:  # there is nothing to resume yet: the first command must do
            resumed = self.train(output, case.threads)
        if resumed.flaw or resumed.code:
            return outcome, f"then: {resumed.flaw or resumed.printed.splitlines()[-1]}"
        found, expected = contents(output / "run"), self.expected[case.threads]
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return outcome, f"then other files: {', '.join(differing)}" if differing else None

    def cases(self, chance: random.Random) -> Iterator[Case]:
        """All cases in a random order that takes kinds, fates and times in turn."""
        by_kind = [list(itertools.product([kind], FATES, (False, True))) for kind in KINDS]
        for several in by_kind:
            chance.shuffle(several)
        groups = [group for turn in zip(*by_kind, strict=True) for group in turn]
        numbers = {group: list(range(1, self.calls[group[2]][group[0]] + 1)) for group in groups}
        for several in numbers.values():
            chance.shuffle(several)
        for turn in itertools.count():
            left = [group for group in groups if turn < len(numbers[group])]
            if not left:
                return
            for index, group in enumerate(left):
                kind, fate, resuming = group
                yield Case(kind, numbers[group][turn], fate, 1 + (turn + index) % 2, resuming)


def in_fork(words: list[str], output: Path, threads: int, case: Case | None, printed: Path, calls: Path) -> None:
    """Trains in this process, reports its calls, and exits."""
    import torch

    from diffusionbert.cli.main import main

    code = 70
    try:
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(threads)
        arm(output, case)
        try:
            main(["train", *words])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print(f"Traceback: {error!r}", file=sys.stderr)
        seen = {kind: ctypes.CDLL(None).faults_seen(number) for number, kind in enumerate(KINDS)}
        calls.write_text(json.dumps(seen))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def contents(run: Path) -> dict[str, object]:
    """The files of a run by name, without what depends on the clock."""
    found: dict[str, object] = {}
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if file.name == "log.jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [
                {key: value for key, value in row.items() if key not in ("time", "tokens_per_second")} for row in rows
            ]
        elif file.is_file() and file.name != ".lock":
            found[name] = file.read_bytes()
    return found


def compiled(folder: Path) -> Path | None:
    """The shim; None where it cannot be compiled."""
    source, shim = Path(__file__).with_name("faults.c"), folder / "faults.so"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
    return shim


def share_imports() -> None:
    """Does once what every fork would do by itself."""
    from importlib import import_module

    from transformers import BertConfig, BertForMaskedLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    for module in ("cli.train", "recipes", "training.run"):
        import_module(f"diffusionbert.{module}")
    sizes = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 2}
    with tempfile.TemporaryDirectory() as folder:
        BertForMaskedLM(BertConfig(vocab_size=8, **sizes)).save_pretrained(folder)


def main() -> int:
    """Tries cases, prints their figures, and returns the number of flaws."""
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="diffusionbert-torture-") as name:
        torture = Torture(Path(name))
        tried: Counter[tuple[str, str]] = Counter()
        flaws = 0
        for case in itertools.islice(torture.cases(random.Random(options.seed)), options.sample):
            if time.monotonic() > deadline:
                break
            outcome, flaw = torture.attempt(case)
            tried[case.kind, outcome] += 1
            if flaw:
                flaws += 1
                print(f"FLAW {case}: {flaw}", flush=True)
        print(f"calls of a run: {torture.calls[False]}; of resuming it: {torture.calls[True]}")
    outcomes = "killed", "one line", "went on"
    print(f"{'fault at':10}" + "".join(f"{outcome:>10}" for outcome in outcomes))
    for kind in KINDS:
        print(f"{kind:10}" + "".join(f"{tried[kind, outcome]:10}" for outcome in outcomes))
    print(f"{sum(tried.values())} cases, {flaws} flaws")
    return flaws


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as place:
            if (library := compiled(Path(place))) is None:
                sys.exit("the shim needs Linux and a C compiler; install gcc")
            environment = {**os.environ, "LD_PRELOAD": str(library), "HF_HUB_OFFLINE": "1"}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    share_imports()
    sys.exit(min(main(), 1))
