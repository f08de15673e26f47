"""Progress on long work: a live line on a terminal, plain lines of what matters elsewhere, always on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressLine:
    """A bar with a text of figures beside it; says nothing on processes other than the main one."""

    def __init__(self, total: int, unmasked: bool, completed: int = 0):
        self.console = Console(stderr=True, quiet=not unmasked, highlight=False)
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not (unmasked and self.console.is_terminal),
        )
        self.task: TaskID = self.progress.add_task("", total=total, completed=completed)

    def __enter__(self) -> ProgressLine:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, completed: int, description: str) -> None:
        """Moves the bar."""
        self.progress.update(self.task, completed=completed, description=description)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, soft_wrap=True)
