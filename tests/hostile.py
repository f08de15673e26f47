"""Commands on damaged and hostile files, in processes of their own with a limit on memory and time.

A fork has everything imported, so a case takes milliseconds. The outcome says what the user sees: `refused` is one
line and exit code 2; everything else that is not `fine` is a flaw.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from diffusionbert.cli.main import main

MEMORY = 1 << 30
"""Bytes that a command may allocate beyond what the process has."""
SECONDS = 60
"""Of the watchdog."""


@dataclass(frozen=True)
class Outcome:
    """What became of a command."""

    code: int
    """The exit code; negative for a signal."""
    said: str
    """What it printed on standard error."""
    printed: str = ""

    @property
    def kind(self) -> str:
        if self.code < 0:
            return "killed" if self.code != -signal.SIGALRM else "hangs"
        if "Traceback" in self.said or self.code == 99:
            return "traceback"
        if self.code == 0:
            return "fine"
        if self.code == 2 and len(self.said.strip().splitlines()) == 1 and "\x1b" not in self.said:
            return "refused"
        return f"exit code {self.code}" if self.code != 2 else "not one line"


def attempt(
    *commands: Sequence[str], memory: int = MEMORY, seconds: int = SECONDS, folder: Path | None = None
) -> Outcome:
    """Runs commands one after the other in a fork, until one fails."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            _limited(commands, said.fileno(), printed.fileno(), memory, seconds, folder)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        printed.seek(0)
        texts = (file.read().decode(errors="replace") for file in (said, printed))
        return Outcome(os.waitstatus_to_exitcode(status), *texts)


def _limited(
    commands: Sequence[Sequence[str]], said: int, printed: int, memory: int, seconds: int, folder: Path | None
) -> None:
    """In the fork: runs commands under the limits, and ends the process."""
    code = 99
    try:
        os.dup2(said, 2)
        os.dup2(printed, 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.alarm(seconds)
        if folder is not None:
            os.chdir(folder)
        for command in commands:
            main(list(command))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _data_bytes() -> int:
    """The private memory that the process has by now."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return 1024 * int(line.split()[1])


# ---- damage ---------------------------------------------------------------------------------------------------------


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Changes the value in a JSON file: in place, or to what is returned."""
    value = json.loads(file.read_text(encoding="utf-8"))
    changed = change(value)
    file.write_text(json.dumps(value if changed is None else changed), encoding="utf-8")


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the tensors in a file in place."""
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
