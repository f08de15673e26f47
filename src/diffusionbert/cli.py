"""The command line: picks a command, runs it, and says errors in one line.

Exit code 0 on success, 2 on wrong use, 1 on failure. Names in strings end in `commands/`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from diffusionbert.commands.info import Info
from diffusionbert.commands.scoring import Score
from diffusionbert.commands.training import Pretrain, Train
from diffusionbert.commands.writing import Fill, Generate

Command = (
    Annotated[Generate, subcommand(name="generate")]
    | Annotated[Fill, subcommand(name="fill")]
    | Annotated[Score, subcommand(name="score")]
    | Annotated[Train, subcommand(name="train")]
    | Annotated[Pretrain, subcommand(name="pretrain")]
    | Annotated[Info, subcommand(name="info")]
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command."""
    try:
        command: Any = tyro.cli(Command, prog="diffusionbert", args=arguments)
        command.run()
    except BrokenPipeError:  # whoever read our output has read enough
        sys.stderr.close()  # the interpreter would complain once more
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        sys.exit(_say(error, code=2))
    except (OSError, RuntimeError, FloatingPointError) as error:
        sys.exit(_say(error, code=1))


def _say(error: Exception, code: int) -> int:
    print(f"diffusionbert: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
