"""Turns a user's own text into a corpus for `train`: files are used as they are, all else becomes lines in the run
directory.

The model reads one sentence, or a short passage, per line. Paragraphs are split into sentences, because training skips
lines longer than the model can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import TextIO

from diffusionbert.data.corpus import Report, parse_source
from diffusionbert.data.files import Flaw, Item
from diffusionbert.data.sources import Files, Split
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.reporting import logger, require_type

FEWEST = 10
"""The minimum number of lines; with fewer, there is nothing to hold out and little to learn."""
PEEKED = 2000
"""The number of lines inspected to see whether they are paragraphs."""
_FILE = "text.txt"
_END = re.compile(r"""([.!?…]["'”’)\]]*) (?![a-z])""")
_EXPECTED = "there is no text to adapt to; give a text file, a folder, or - for standard input"


def own_corpus(
    texts: str | Path | Iterable[str] | None,
    folder: Path,
    vocabulary: Vocabulary,
    max_length: int,
    *,
    most: int | None = None,
    seed: int = 0,
) -> str:
    """A corpus of single texts that `train` accepts.

    Args:
        texts: A file, folder or glob; or texts.
        folder: The run directory, where lines are written unless the text is already a suitable file.
        vocabulary: The model's tokenizer.
        max_length: The most tokens that the model can read, including special tokens.
        most: The approximate number of lines to draw at random from large files; None takes all.
        seed: The seed for drawing lines.
    """
    if isinstance(texts, str | Path):
        source = parse_source(str(texts))
        if source.paired:
            raise ValueError(f"{source} has pairs of source and target: use train; or text:FILE to read plain lines")
        if not isinstance(source, Files):
            return str(texts)
        peeked = (item.content for item in source.items(Split.ALL) if isinstance(item.content, str))
        lines = list(islice(peeked, PEEKED))
        are_paragraphs = _are_paragraphs(lines, vocabulary, max_length)
        size = sum(shard.size for shard in source.shards)
        is_large = most is not None and size > most * max(1, sum(map(len, lines)) // max(1, len(lines)))
        if not (is_large or are_paragraphs):
            if lines:  # otherwise training will report the problem
                _require_enough(len(lines), str(source))
            return str(texts)
        if are_paragraphs:
            logger.info(f"{source} has lines of more than {max_length} tokens: splitting them into sentences")
        texts = texts_of(source.items(Split.ALL))
        if is_large and most is not None:
            logger.info(f"{source} has more text than there is time for: drawing {most:,} lines at random")
            texts = drawn_lines(texts, most, seed)
    if texts is None:
        raise ValueError(_EXPECTED)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _FILE
    try:
        stream = file.open("x", encoding="utf-8")
    except FileExistsError:
        raise ValueError(f"{str(file)!r} exists, where the text would be written; give another folder") from None
    try:
        with stream:
            _write_lines(texts, stream, vocabulary, max_length)
    except BaseException:
        file.unlink()
        with suppress(OSError):  # not empty if the user's own folder has other files
            folder.rmdir()
        raise
    return str(file)


def _write_lines(texts: Iterable[str], stream: TextIO, vocabulary: Vocabulary, max_length: int) -> None:
    number = 0
    for text in texts:
        require_type("each text", text, str, "a string")
        for line in sentences_that_fit(text, vocabulary, max_length):
            number += 1
            stream.write(f"{line}\n")
    _require_enough(number, "the text")


def _require_enough(number: int, what: str) -> None:
    if number == 0:
        raise ValueError(_EXPECTED)
    if number < FEWEST:
        raise ValueError(f"{what} has too few sentences to adapt to: {number}; give at least {FEWEST}, better hundreds")


def folder_for(texts: str | Path | Iterable[str] | None) -> Path:
    """A run directory that does not exist yet, named after the text."""
    if texts is None:
        raise ValueError(_EXPECTED)
    stem = Path(texts).name.partition(".")[0] if isinstance(texts, str | Path) else ""
    name = "-".join(["adapted", *(re.findall(r"\w+", stem) or ["text"])])
    number, folder = 1, Path(name)
    while folder.exists():
        number += 1
        folder = Path(f"{name}-{number}")
    return folder


def sentences_that_fit(text: str, vocabulary: Vocabulary, max_length: int) -> Iterator[str]:
    """A text as one line; if it is longer than the model can read, its sentences, halved if necessary."""
    line = " ".join(text.encode(errors="replace").decode().split())
    if _fits(line, vocabulary, max_length):
        yield from filter(None, [line])
        return
    for sentence in _END.sub(r"\1\n", line).split("\n"):
        yield from _halves(sentence.split(), vocabulary, max_length)


def _halves(words: list[str], vocabulary: Vocabulary, max_length: int) -> Iterator[str]:
    line, middle = " ".join(words), len(words) // 2
    if middle == 0 or _fits(line, vocabulary, max_length):
        yield line
        return
    yield from _halves(words[:middle], vocabulary, max_length)
    yield from _halves(words[middle:], vocabulary, max_length)


def _fits(line: str, vocabulary: Vocabulary, max_length: int) -> bool:
    # No tokenizer produces more tokens than bytes, so short lines need not be encoded.
    is_short = len(line.encode()) + vocabulary.num_special(paired=False) <= max_length
    return is_short or len(vocabulary.encode([line])[0]) <= max_length


def drawn_lines(lines: Iterable[str], number: int, seed: int) -> list[str]:
    """Lines drawn at random without replacement, in one pass (Vitter 1985, "Random sampling with a reservoir")."""
    draw, remaining = Random(seed).random, iter(lines)
    chosen = list(islice(remaining, number))
    for seen, line in enumerate(remaining, start=number + 1):
        place = int(seen * draw())
        if place < number:
            chosen[place] = line
    return chosen


def texts_of(items: Iterable[Item]) -> Iterator[str]:
    """The texts of lines; those that cannot be used are counted, and reported at the end."""
    report = Report()
    for item in items:
        if isinstance(item.content, str):
            report.kept += 1
            yield item.content
        elif isinstance(item.content, Flaw) and item.content is not Flaw.EMPTY:
            report.skip(item.content.value, item.location)
    if report.skipped:
        logger.warning(f"your text: {report.summary()}")


def _are_paragraphs(texts: list[str], vocabulary: Vocabulary, max_length: int) -> bool:
    """Whether more than a tenth of the text is in overlong lines; if there are only a few, they are better skipped."""
    sizes = [len(tokens) for tokens in vocabulary.encode(texts)]
    return 10 * sum(size for size in sizes if size > max_length) > sum(sizes)
