"""Texts in, results out: shared by the commands that print results per text.

Texts are arguments, or lines of a file or of standard input. Lines are read while earlier ones are being processed, and
results are printed as they become available, with an empty result for an empty line, so that output lines up with
input. A line that cannot be processed is reported with its number and does not stop the others. With `--output`, a
stopped command resumes where it was. This module does not depend on torch or on the kind of results.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from diffusionbert.cli.common import Flag, OptionalPath, finite, option
from diffusionbert.data.files import bounded_lines
from diffusionbert.parallel import current
from diffusionbert.reporting import logger, printable, progress_line, reason_of, shown_progress
from diffusionbert.storage.limits import read_text, require_regular

if TYPE_CHECKING:
    from rich.text import Text

LONGEST_LINE = 100_000
"""The maximum length of a line, in characters."""
MOST_AT_ONCE = 32
"""The most texts that share forward passes; the first ones are answered alone, so that something appears soon."""

Row = dict[str, Any]
"""A result as plain data."""
Answer = Callable[[list[str]], Sequence[Iterable[Any]]]
"""Returns the results of each text; None stands for one that is left out."""
Show = Callable[[Row], "str | Text"]
"""Formats a result as text; colored text keeps its colors on a terminal."""


@dataclass(frozen=True)
class TextOptions:
    """Where texts come from and where results go."""

    file: OptionalPath = None
    """Read texts from a file, one per line, instead of arguments; - is standard input.
    Empty lines give empty results."""
    format: Annotated[Literal["text", "jsonl", "csv"], option("{text,jsonl,csv}")] = "text"
    """The output format: one line per result, or JSON lines or CSV with all fields, including input, line and rank.
    Default: text."""
    json: Flag = False
    """The same as --format jsonl."""
    output: OptionalPath = None
    """Write results to this file; if the command is stopped, the same command continues it.
    Default: standard output."""

    @property
    def chosen_format(self) -> str:
        if self.json and self.format == "csv":
            raise ValueError("--json and --format csv contradict each other; give one of them")
        return "jsonl" if self.json else self.format


@dataclass(frozen=True)
class Line:
    """A text with its line number, starting at 1."""

    number: int
    text: str
    error: str | None = None
    """Why the line cannot be read."""


@dataclass
class SavedState:
    """The state that `--output` saves for a stopped command, as plain data: sums over all results and a random seed."""

    values: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return float(self.values.get(name, 0.0))

    def add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.values[name] = self[name] + number

    def share(self) -> None:
        """Sends the main process's state to all processes of a launch, with a seed, while they are still in step."""

        def completed() -> dict[str, Any]:
            self.seed(None)
            return self.values

        if current().number > 1:
            self.values.update(current().on_main(completed))

    def seed(self, given: int | None) -> int:
        """The given seed, or a random one that stays the same when the command is resumed."""
        if given is not None:
            return given
        from diffusionbert.model import fresh_seed

        if "seed" not in self.values:
            self.values["seed"] = fresh_seed()
        return int(self.values["seed"])


def run_lines(
    options: TextOptions,
    texts: Sequence[str],
    load: Callable[[], Answer],
    *,
    what: str,
    columns: Sequence[str],
    show: Show,
    settings: Row,
    state: SavedState | None = None,
    plain: Callable[[Any], Row] = dict,
    count: Callable[[Any], None] = lambda result: None,
    summary: Callable[[], tuple[str, Row]] | None = None,
) -> None:
    """Answers texts and writes one line per result.

    The main process reads the file, and the processes of a launch share its chunks; results keep the order of lines.

    Args:
        options: Where texts come from and where results go.
        texts: The texts given as arguments.
        load: Called once, as soon as there are texts. Returns the function that answers them, which raises ValueError
            or TypeError for a text it cannot process.
        what: What the texts are, for messages: "texts with [MASK] or [BLANK]".
        columns: The fields of a result, in the order of the CSV columns.
        show: Formats a result as text.
        settings: What the results depend on besides the texts; a file is continued only with the same settings.
        state: The sums that `count` adds up, and the seed that is drawn once.
        plain: Converts a result to plain data.
        count: Called with each result, in order.
        summary: Called at the end; returns a line for standard error and a row for JSON.
    """
    state, form, is_strict = state or SavedState(), options.chosen_format, options.file is None
    lines = _given(texts, options.file, what)
    answer = load()
    is_visible = _is_bar_wanted(options) and current().is_main

    def answered(chunk: list[Line]) -> list[tuple[Line, list[Any], str | None]]:
        return [(line, list(results), error) for line, results, error in _answered(chunk, answer, is_strict=is_strict)]

    def rows(results: Iterable[Any]) -> Iterator[Row]:
        for result in results:
            count(result)
            if result is not None:
                yield plain(result)

    with (
        _open_output(options, columns, show, settings, state) as output,
        progress_line(
            _count_lines(options.file) if is_visible else None, visible=is_visible, done=int(state["lines"])
        ) as show_progress,
        shown_progress(visible=is_strict and current().is_main),
    ):
        state.share()
        for chunks in _shared(_chunks(output.remaining(lines), at_once=is_strict)):
            # A single chunk is answered by all processes together, with results as they come; otherwise each process
            # gets a chunk of its own.
            alone = (_answered(chunk, answer, is_strict=is_strict) for chunk in chunks)
            for chunk, answers in zip(
                chunks, alone if len(chunks) == 1 else current().share(chunks, answered), strict=True
            ):
                for line, results, error in answers:
                    state.add(lines=1.0, failed=float(error is not None))
                    if error is not None:
                        logger.error(f"line {line.number}: {error}")
                    output.write(line, rows(results), error)
                output.save(chunk)
                show_progress(int(state["lines"]), "lines")
        if not state["lines"]:
            raise ValueError(f"{str(options.file)!r} is empty; give {what}, one per line")
        if summary is not None:
            message, row = summary()
            output.write_summary(row)
            if form != "jsonl":
                logger.info(message)
    if state["failed"]:
        raise RuntimeError(f"{state['failed']:.0f} of {state['lines']:.0f} lines failed; their results are empty")


def _is_bar_wanted(options: TextOptions) -> bool:
    """Whether lines are read from a file and the results do not go to the terminal."""
    return options.file is not None and (options.output is not None or not sys.stdout.isatty())


def _count_lines(file: Path | None) -> int | None:
    """The number of lines of a file, if it can be read twice."""
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def read_lines(file: Path, what: str) -> list[str]:
    """The non-empty lines of a file; raises ValueError if one cannot be read or there are none."""
    lines = [line for line in _read(file, what) if line.error or line.text.strip()]
    if bad := next((line for line in lines if line.error), None):
        raise ValueError(f"line {bad.number} of {str(file)!r}: {bad.error}")
    if not lines:
        raise ValueError(f"{str(file)!r} is empty; give {what}, one per line")
    return [line.text.strip() for line in lines]


# ---- input ----------------------------------------------------------------------------------------------------------


def _given(texts: Sequence[str], file: Path | None, what: str) -> Iterator[Line]:
    if texts and file is not None:
        raise ValueError(f"{what} are given both as arguments and by --file; give only one of them")
    if file is None and not texts:
        raise ValueError(f"no text given; give {what} in quotes, or --file NAME (- is standard input)")
    return _read(file, what) if file is not None else (Line(number, text) for number, text in enumerate(texts, start=1))


def _read(file: Path, what: str) -> Iterator[Line]:
    """Yields the lines of a file as they arrive."""
    try:
        if str(file) != "-":
            is_stream = str(file) == "/dev/stdin" or str(file).startswith("/dev/fd/")  # a shell's <(command)
            if not is_stream and not file.is_dir():
                require_regular(file)
            file.open("rb").close()
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read ({error.strerror}); give {what}, one per line") from None
    return _decoded(file)


def _decoded(file: Path) -> Iterator[Line]:
    with nullcontext(standard_input()) if str(file) == "-" else file.open("rb") as stream:
        for number, line in enumerate(bounded_lines(stream, 4 * LONGEST_LINE), start=1):
            try:
                text = (line or b"").removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield Line(number, "", f"not UTF-8 ({error.reason}); convert the file")
                continue
            if line is None or len(text) > LONGEST_LINE:
                yield Line(number, text[:40], f"more than {LONGEST_LINE} characters; split it")
            else:
                yield Line(number, text)


def standard_input() -> io.BufferedIOBase:
    """Standard input as bytes."""
    if sys.stdin is None:  # it was closed
        return io.BytesIO()
    own: io.BufferedIOBase | None = getattr(sys.stdin, "buffer", None)
    return io.BytesIO(sys.stdin.read().encode()) if own is None else own


def _chunks(lines: Iterator[Line], at_once: bool) -> Iterator[list[Line]]:
    """Yields the lines that have arrived so far, at most 1, 2, 4, … 32 at a time; arguments all at once."""
    if at_once:
        yield list(lines)
        return
    waiting: queue.Queue[Line | BaseException | None] = queue.Queue(2 * MOST_AT_ONCE)

    def read() -> None:
        try:
            for line in lines:
                waiting.put(line)
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    most, item = 1, waiting.get()
    while item is not None:
        chunk = []
        while item is not None:
            if isinstance(item, BaseException):
                raise item
            chunk.append(item)
            if len(chunk) == most:
                break
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                break
        yield chunk
        most = min(2 * most, MOST_AT_ONCE)
        item = None if item is None else waiting.get()


def _shared(chunks: Iterator[list[Line]]) -> Iterator[list[list[Line]]]:
    """Yields as many chunks at a time as there are processes, as the main process reads them."""
    processes = current()
    while several := processes.on_main(lambda: list(islice(chunks, processes.number))):
        yield several


def _answered(
    chunk: list[Line], answer: Answer, *, is_strict: bool
) -> Iterator[tuple[Line, Iterable[Any], str | None]]:
    """The results of each line, or why there are none; if a chunk fails, its lines are tried one by one."""
    if is_strict:
        for line, rows in zip(chunk, answer([line.text for line in chunk]), strict=True):
            yield line, rows, None
        return
    texts = [line for line in chunk if line.error is None and line.text.strip()]
    found: dict[int, tuple[Iterable[Any], str | None]] = {}
    try:
        answers = [list(rows) for rows in answer([line.text for line in texts])] if texts else []
        found = {line.number: (rows, None) for line, rows in zip(texts, answers, strict=True)}
    except (ValueError, TypeError) as error:
        if len(texts) == 1:
            found = {texts[0].number: ((), reason_of(error))}
        else:
            for line in texts:
                found |= {line.number: outcome for line, *outcome in _answered([line], answer, is_strict=False)}  # type: ignore[misc]
    for line in chunk:
        yield (line, *found.get(line.number, ((), line.error)))


# ---- output ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open_output(
    options: TextOptions, columns: Sequence[str], show: Show, settings: Row, state: SavedState
) -> Iterator[_Output]:
    if options.output is None or not current().is_main:
        yield _Output(sys.stdout, options.chosen_format, columns, show, None)
        return
    name = str(options.output)
    if options.output.is_dir():
        raise ValueError(f"--output {name!r} is a folder; give the name of a file in it")
    progress = _Progress.open(options.output, {**settings, "format": options.chosen_format}, state)
    try:
        stream = options.output.open("a", encoding="utf-8", newline="")
    except OSError as error:
        raise ValueError(f"--output {name!r} cannot be written ({error.strerror}); give another name") from None
    with stream:
        stream.truncate(progress.num_bytes)  # drops the results of an unfinished chunk
        progress.save((), progress.num_bytes)
        try:
            yield _Output(stream, options.chosen_format, columns, show, progress)
        except KeyboardInterrupt:
            logger.info(f"stopped after line {progress.num_lines}; the same command continues {name!r}")
            raise
    progress.file.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Rows:
    """Ends rows of CSV with a line feed; a writer told to do so would not quote carriage returns."""

    stream: Any

    def write(self, row: str) -> None:
        self.stream.write(row.removesuffix("\r\n") + "\n")


class _Output:
    """Writes results as text, JSON lines or CSV; for a file, it records how far it got."""

    def __init__(
        self,
        stream: Any,
        format: str,
        columns: Sequence[str],
        show: Show,
        progress: _Progress | None,
    ) -> None:
        self.stream, self.format, self.show, self.progress = stream, format, show, progress
        self.is_terminal = stream.isatty()
        names = ["line", "input", "rank", *columns, "error"]
        self.table = csv.DictWriter(_Rows(stream), names, extrasaction="ignore")
        if format == "csv" and (progress is None or not progress.num_lines):
            self.table.writeheader()

    def remaining(self, lines: Iterator[Line]) -> Iterator[Line]:
        """The lines that have not been answered yet."""
        return lines if self.progress is None else self.progress.skip_done(lines)

    def write(self, line: Line, rows: Iterable[Row], error: str | None) -> None:
        """Writes the results of a line as they arrive, or an empty one if there are none."""
        head, rank = {"line": line.number, "input": line.text}, 0
        for rank, row in enumerate(rows, start=1):
            self._write_row({**head, "rank": rank, **row}, self.show(row) if self.format == "text" else "")
            self.stream.flush()
        if not rank:
            self._write_row(head if error is None else {**head, "error": error}, "")

    def write_summary(self, row: Row) -> None:
        if self.format == "jsonl":
            self._write_row(row, "")
        self.stream.flush()

    def _write_row(self, row: Row, text: str | Text) -> None:
        row = finite(row)
        if self.format == "text" and isinstance(text, str):
            self.stream.write((printable(text) if self.is_terminal else text) + "\n")
        elif self.format == "text":
            from rich.console import Console

            Console(file=self.stream, highlight=False).print(text, soft_wrap=True)
        elif self.format == "csv":
            nested = {name: json.dumps(value, ensure_ascii=False) for name, value in row.items() if _is_nested(value)}
            self.table.writerow({**row, **nested})
        else:
            self.stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")

    def save(self, chunk: Iterable[Line]) -> None:
        """Flushes, so that a reader gets the results at once, and records the progress."""
        self.stream.flush()
        if self.progress is not None:
            os.fsync(self.stream.fileno())  # so that no result is missing that the record counts
            self.progress.save(chunk, self.stream.tell())


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | tuple | dict)


@dataclass
class _Progress:
    """How far an output file got; stored next to it until it is complete."""

    file: Path
    settings: Row
    state: SavedState
    num_lines: int = 0
    num_bytes: int = 0
    digest: str = ""
    """The hash of the lines answered so far."""

    @classmethod
    def open(cls, output: Path, settings: Row, state: SavedState) -> _Progress:
        progress = cls(output.with_name(output.name + ".progress"), json.loads(json.dumps(settings)), state)
        if not output.exists():
            return progress
        if not progress.file.exists():
            raise ValueError(f"--output {str(output)!r} exists; delete it, or give another name")
        try:
            saved = json.loads(read_text(progress.file))
            found = saved["settings"], int(saved["lines"]), int(saved["bytes"]), str(saved["digest"])
            values = dict(saved["state"].items())
            if min(found[1:3]) < 0:
                raise ValueError("a negative number")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{str(progress.file)!r} is damaged ({reason_of(error)}); delete it and --output to start over"
            ) from None
        if found[0] != progress.settings:
            raise ValueError(
                f"--output {str(output)!r} was begun with other options; give the same, or delete it to start over"
            )
        if (size := output.stat().st_size) < found[2]:
            raise ValueError(
                f"--output {str(output)!r} has {size:,} bytes, but {found[2]:,} were written; results are missing, so "
                f"delete it and {progress.file.name!r} to start over"
            )
        _, progress.num_lines, progress.num_bytes, progress.digest = found
        state.values.update(values)
        logger.info(f"continuing {str(output)!r} after line {progress.num_lines}")
        return progress

    def skip_done(self, lines: Iterator[Line]) -> Iterator[Line]:
        digest = ""
        for _ in range(self.num_lines):
            if (line := next(lines, None)) is None:
                digest = ""
                break
            digest = _extended(digest, line)
        if digest != self.digest:
            raise ValueError("the input lines already answered in --output have changed; start a new --output")
        return lines

    def save(self, chunk: Iterable[Line], num_bytes: int) -> None:
        from diffusionbert.storage.files import write_json

        for line in chunk:
            self.num_lines, self.digest = self.num_lines + 1, _extended(self.digest, line)
        self.num_bytes = num_bytes
        write_json(
            self.file,
            {
                "settings": self.settings,
                "lines": self.num_lines,
                "bytes": num_bytes,
                "digest": self.digest,
                "state": self.state.values,
            },
        )


def _extended(digest: str, line: Line) -> str:
    return hashlib.blake2b((digest + line.text).encode(errors="surrogateescape"), digest_size=16).hexdigest()
