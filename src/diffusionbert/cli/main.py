"""The command line: parses a command, runs it, and reports errors in one line.

The exit code is 0 on success, 2 on wrong usage or unreadable input, 1 on failure, 130 when interrupted. `--plugin
MODULE` imports a module that registers schedules, samplers or objectives; `--verbosity LEVEL` sets the level of
messages on standard error. Both may appear anywhere. Under torchrun or `accelerate launch`, the processes share the
work, and the main one prints.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import tyro

from diffusionbert import __version__, parallel
from diffusionbert.reporting import fault_of, printable, set_verbosity

COMMANDS = (
    "generate",
    "fill",
    "rewrite",
    "score",
    "choose",
    "adapt",
    "train",
    "pretrain",
    "evaluate",
    "compare",
    "reproduce",
    "plot",
    "doctor",
    "audit",
    "info",
    "serve",
    "bench",
)
"""The commands; each is a class of that name in a module of that name."""
UNSHARED = ("compare", "plot", "doctor", "audit", "info", "serve")
"""Under a launcher, only the main process runs these."""
SECONDS_TO_REPORT = 10.0
"""How long the other processes of a launch wait for the main one to report an error that all of them have."""
LONGEST_MESSAGE = 2000
"""The maximum length of a message in characters, because names given by users may be longer."""
_ERRORS_OF_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
"""Errors for file names that do not fit their purpose: wrong usage, not a disk failure."""
ABOUT = """usage: diffusionbert COMMAND ...

Masked diffusion language models: train, generate, fill, score and compare.

{commands}

  diffusionbert COMMAND --help   show the options of a command, with an example
  --plugin MODULE                import a module that registers schedules, samplers or objectives
  --verbosity LEVEL              messages on standard error: debug, info (default), warning or error
  --version                      print the version
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; by default with the arguments of the process."""
    launch = parallel.launch()
    if launch.number > 1 and arguments is None:
        try:
            main(sys.argv[1:])
        except SystemExit as end:
            parallel.exit_at_once(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException:
            traceback.print_exc()
            parallel.exit_at_once(1)
        parallel.exit_at_once(0)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if launch.is_main:
        _run(words)
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123, no file
        _run(words)


def _run(words: list[str]) -> None:
    launch = parallel.launch()
    if words == ["--version"]:
        print(f"diffusionbert {__version__}")
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads spin between kernels. As long as they do by default, they block one another wherever another
        # program runs; if they sleep at once, waking them takes longer than the kernels. Read when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    command: Any = None
    try:
        plugins, levels = _take(words, "--plugin"), _take(words, "--verbosity")
        command = parse_arguments(words)
        set_verbosity(levels[-1] if levels else "info")
        if not launch.is_main:
            set_verbosity(logging.CRITICAL)
        for module in plugins:
            _import_plugin(module)
        if launch.number > 1 and words[0] not in UNSHARED:
            parallel.join()
            command.run()
            parallel.leave()
        elif launch.is_main:
            command.run()
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stderr.close()  # otherwise the interpreter reports it again at exit
        sys.exit(0)
    except KeyboardInterrupt:
        parallel.leave()
        sys.exit(130)
    except (ValueError, OSError, RuntimeError, FloatingPointError, MemoryError) as error:
        said = str(parallel.in_plain_words(error)) or "out of memory"
        message = printable(" ".join(said.split()))
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]}…{message[-LONGEST_MESSAGE // 2 :]}"
        if not launch.is_main:
            time.sleep(SECONDS_TO_REPORT)
        print(f"diffusionbert: {in_flags(message, _option_names(command))}", file=sys.stderr, flush=True)
        is_of_name = isinstance(error, OSError) and error.errno in _ERRORS_OF_NAMES
        sys.exit(2 if isinstance(error, ValueError) or is_of_name else 1)


def in_flags(message: str, options: Collection[str]) -> str:
    """A message of the library in terms of the command line: `top_k` becomes --top-k, `block=32` --block 32."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in options:
            return match[0]
        return f"--{name.replace('_', '-')}" + (f" {value}" if value else "")

    return re.sub(r"`(\w+)(?:=([^`]+))?`", flag, message)


def _option_names(command: Any) -> set[str]:
    """The options of a command, including those of its groups."""
    names = set()
    for field in fields(command) if is_dataclass(command) else ():
        value = getattr(command, field.name)
        names |= _option_names(value) if is_dataclass(value) else {field.name}
    return names


def _take(words: list[str], flag: str) -> list[str]:
    """Removes a flag from the words, wherever it appears, and returns its values."""
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
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--plugin {module[:60]} cannot be imported ({fault_of(error)}); give the name of a Python module"
        ) from error


def parse_arguments(arguments: list[str]) -> Any:
    """The command with its options; tyro's boxed errors become one line."""
    if "--output=" in arguments or ("--output", "") in pairwise(arguments):
        raise ValueError("--output is empty and would fill the current folder; give a name")
    if not arguments:
        raise ValueError(f"no command given; give one of {', '.join(COMMANDS)}; see diffusionbert --help")
    name, *options = arguments
    if name in ("-h", "--help"):
        print(ABOUT.format(commands="\n".join(f"  {name:<10} {_summary(name)}" for name in COMMANDS)), end="")
        sys.exit(0)
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name[:40]!r}{_suggestion(name, COMMANDS)}; see diffusionbert --help")
    program, printed = f"diffusionbert {name}", io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(_command(name), args=options, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{_message(printed.getvalue(), options)}; see {program} --help") from None


def _command(name: str) -> Any:
    return getattr(import_module(f"diffusionbert.cli.{name}"), name.capitalize())


def _summary(name: str) -> str:
    return str(_command(name).__doc__).split("\n", maxsplit=1)[0]


def _message(printed: str, options: list[str]) -> str:
    """What tyro's box says about these options, in one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)  # colors of a terminal
    title, *lines = [line.strip("│|╭╮╰╯─ -" if index == 0 else "│| ") for index, line in enumerate(plain.splitlines())]
    is_rule = re.compile("─+|-{4,}").fullmatch
    if title == "Unrecognized options":
        listed = plain.partition("Perhaps you meant")[0]
        flags = [word for word in options if word.startswith("-")]
        # Whole words only: a correct --validation may appear next to a wrong --validation-sentences.
        unknown = next((flag for flag in flags if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w=-])", listed)), None)
        known = re.findall(r"^[│|]?\s+(--[\w-]+)", plain.partition("Perhaps you meant")[2], flags=re.MULTILINE)
        if unknown is not None:
            return f"unknown option {unknown[:40]}{_suggestion(unknown, known)}"
        stray = next((word for word in options if word in plain), "")
        return f"{stray[:40]!r} is separated from the other arguments; put all of them before the options"
    # The message is between the title and the help of the option; without box characters, dashes separate them.
    body = lines[1:] if lines and is_rule(lines[0]) else lines
    message = " ".join(" ".join(takewhile(lambda line: not is_rule(line), body)).split())
    for pattern, plainer in _PLAINER:
        message = re.sub(pattern, plainer, message)
    return message


_PLAINER = [
    (r"^Error parsing (\S+): invalid literal for int\(\) .*('.*')$", r"\1 must be a whole number, got \2"),
    (r"^Error parsing (\S+): could not convert string to float: (.*)$", r"\1 must be a number, got \2"),
    (r"^Missing from [\w ]+: (--\S+ \S+).*$", r"\1 is required"),
    (r"^Missing from [\w ]+: \{([^}]+)\}.*$", r"an argument is missing, one of \1"),
    (r"^Missing value for argument '(\S+)'.*$", r"\1 needs a value"),
    (r"^invalid choice ('.*') for argument '(\S+)'. Expected one of \((.*)\).$", r"\2 must be one of \3, got \1"),
    (r"(?<=, )'None', |'None', |, 'None'(?=,|$)", ""),
]
"""Messages of tyro, and our wording of them."""


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
