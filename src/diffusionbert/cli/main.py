"""The command line: parses a command, runs it, and reports errors in one line.

Exit code 0 on success, 2 on wrong use or unreadable input, 1 on failure, 130 when stopped. `--plugin MODULE` imports a
module that registers schedules, samplers or objectives, `--verbosity LEVEL` chooses the messages on standard error;
both may stand anywhere.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

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
Command = (
    Annotated[Generate, subcommand(name="generate")]
    | Annotated[Fill, subcommand(name="fill")]
    | Annotated[Rewrite, subcommand(name="rewrite")]
    | Annotated[Score, subcommand(name="score")]
    | Annotated[Train, subcommand(name="train")]
    | Annotated[Pretrain, subcommand(name="pretrain")]
    | Annotated[Evaluate, subcommand(name="evaluate")]
    | Annotated[Compare, subcommand(name="compare")]
    | Annotated[Reproduce, subcommand(name="reproduce")]
    | Annotated[Plot, subcommand(name="plot")]
    | Annotated[Doctor, subcommand(name="doctor")]
    | Annotated[Info, subcommand(name="info")]
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command.

    Args:
        arguments: The arguments of the command line; None takes them from the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"diffusionbert {__version__}")
        return
    # Threads that wait by spinning block those that compute. This must be set before torch starts.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        words, (plugins, levels) = _taken(words, "--plugin", "--verbosity")
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
    except ValueError as error:
        sys.exit(_report(error, code=2))
    except (OSError, RuntimeError, FloatingPointError, MemoryError) as error:
        sys.exit(_report(error, code=1))


def _taken(words: list[str], *flags: str) -> tuple[list[str], list[list[str]]]:
    """The words without these flags and their values, and the values of each flag."""
    rest: list[str] = []
    values: dict[str, list[str]] = {flag: [] for flag in flags}
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag not in values:
            rest.append(word)
            continue
        given = value if equals else next(remaining, None)
        if not given:
            raise ValueError(f"{flag} needs a value")
        values[flag].append(given)
    return rest, [values[flag] for flag in flags]


def _import_plugin(module: str) -> None:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        import_module(module)
    except ImportError as error:
        raise ValueError(f"--plugin {module} cannot be imported ({error}); give the name of a Python module") from None


def parse_arguments(arguments: list[str] | None) -> Any:
    """The command with its options; tyro's error in a box becomes one line."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            command: Any = tyro.cli(
                Command,
                prog="diffusionbert",
                args=arguments,
                description=ABOUT,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if not end.code:
            raise
        plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())  # colours of a terminal
        lines = [line.strip("│| ") for line in plain.splitlines()]
        # The message stands below the title, with a rule between them on terminals without box characters, and above
        # the rule that precedes the help of the command.
        below = itertools.dropwhile(_is_rule, lines[1:])
        message = itertools.takewhile(lambda line: not _is_rule(line), below)
        raise ValueError(f"{' '.join(message)}; see diffusionbert --help") from None
    return command


def _is_rule(line: str) -> bool:
    return re.fullmatch("─+|-{4,}", line) is not None


def _report(error: Exception, code: int) -> int:
    print(f"diffusionbert: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
