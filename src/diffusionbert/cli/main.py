"""The command line: parses a command, runs it, and reports errors in one line.

Exit code 0 on success, 2 on wrong use or unreadable input, 1 on failure, 130 when stopped. `--plugin MODULE` imports a
module that registers schedules, samplers or objectives, `--verbosity LEVEL` chooses the messages on standard error;
both may stand anywhere.
"""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stderr
from importlib import import_module
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import tyro

from diffusionbert import __version__
from diffusionbert.cli.compare import Compare
from diffusionbert.cli.doctor import Doctor
from diffusionbert.cli.evaluate import Evaluate
from diffusionbert.cli.fill import Fill
from diffusionbert.cli.generate import Generate
from diffusionbert.cli.info import Info
from diffusionbert.cli.plot import Plot
from diffusionbert.cli.pretrain import Pretrain
from diffusionbert.cli.reproduce import Reproduce
from diffusionbert.cli.rewrite import Rewrite
from diffusionbert.cli.score import Score
from diffusionbert.cli.train import Train
from diffusionbert.reporting import set_verbosity

ABOUT = (
    "Masked diffusion language models: train, generate, fill, score and compare. Options of all commands: --plugin "
    "MODULE imports a module that registers schedules, samplers or objectives; --verbosity debug|info|warning|error "
    "chooses the messages on standard error (default: info). --version prints the version."
)
Command = Generate | Fill | Rewrite | Score | Train | Pretrain | Evaluate | Compare | Reproduce | Plot | Doctor | Info


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; without arguments, that of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"diffusionbert {__version__}")
        return
    # Threads that wait by spinning block those that compute. This must be set before torch starts.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        plugins, levels = _take(words, "--plugin"), _take(words, "--verbosity")
        command = parse_arguments(words)
        set_verbosity(levels[-1] if levels else "info")
        for module in plugins:
            _import_plugin(module)
        command.run()
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stderr.close()  # else the interpreter reports it again at exit
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, RuntimeError, FloatingPointError, MemoryError) as error:
        print(f"diffusionbert: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


def _take(words: list[str], flag: str) -> list[str]:
    """Removes a flag from the words, wherever it stands, and returns its values."""
    remaining, others, values = iter(words), [], []
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == flag:
            values.append(value if equals else next(remaining, ""))
        else:
            others.append(word)
    if not all(values):
        raise ValueError(f"{flag} needs a value")
    words[:] = others
    return values


def _import_plugin(module: str) -> None:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        import_module(module)
    except ImportError as error:
        raise ValueError(f"--plugin {module} cannot be imported ({error}); give the name of a Python module") from None


def parse_arguments(arguments: list[str]) -> Any:
    """The command with its options; tyro's error in a box becomes one line."""
    options = {"prog": "diffusionbert", "description": ABOUT, "config": (tyro.conf.FlagCreatePairsOff,)}
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(Command, args=arguments, **options)  # type: ignore[call-overload]
    except SystemExit as end:
        if not end.code:
            raise
        plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())  # colours of a terminal
        # The message stands between the title and the help of the command; without box characters, dashes part them.
        is_rule = re.compile("─+|-{4,}").fullmatch
        below = dropwhile(is_rule, [line.strip("│| ") for line in plain.splitlines()][1:])
        message = " ".join(takewhile(lambda line: not is_rule(line), below))
        raise ValueError(f"{message}; see diffusionbert --help") from None
