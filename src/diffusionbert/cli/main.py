"""The command line: picks a command, runs it, and says errors in one line.

Exit code 0 on success, 2 on wrong use, 1 on failure, 130 if it was told to stop. Names in strings end in `commands/`.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from contextlib import redirect_stderr
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from diffusionbert import __version__
from diffusionbert.cli.compare import Compare
from diffusionbert.cli.doctor import Doctor
from diffusionbert.cli.evaluate import Evaluate
from diffusionbert.cli.generate import Fill, Generate
from diffusionbert.cli.info import Info
from diffusionbert.cli.reproduce import Plot, Reproduce
from diffusionbert.cli.score import Score
from diffusionbert.cli.train import Pretrain, Train

ABOUT = "Masked language models that write; --version says which version this is."
Command = (
    Annotated[Generate, subcommand(name="generate")]
    | Annotated[Fill, subcommand(name="fill")]
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
    """Runs a command, or says which version this is."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"diffusionbert {__version__}")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 loses nothing
    try:
        _parsed(arguments).run()
    except BrokenPipeError:  # whoever read our output has read enough
        sys.stderr.close()  # the interpreter would complain once more
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        sys.exit(_say(error, code=2))
    except (OSError, RuntimeError, FloatingPointError, MemoryError) as error:
        sys.exit(_say(error, code=1))


def _parsed(arguments: list[str] | None) -> Any:
    """The command with its options; what tyro says of wrong ones in a box is said in one line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            command: Any = tyro.cli(Command, prog="diffusionbert", args=arguments, description=ABOUT)
    except SystemExit as end:
        if not end.code:
            raise
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())  # colours, on a terminal
        lines = [line.strip("│| ") for line in plain.splitlines()]
        # Below its title, which a terminal without box characters has a rule under, and up to the rule below which
        # tyro shows the help of the command.
        below = itertools.dropwhile(_is_rule, lines[1:])
        told = itertools.takewhile(lambda line: not _is_rule(line), below)
        raise ValueError(f"{' '.join(told)}; see diffusionbert --help") from None
    return command


def _is_rule(line: str) -> bool:
    return re.fullmatch("─+|-{4,}", line) is not None


def _say(error: Exception, code: int) -> int:
    print(f"diffusionbert: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
