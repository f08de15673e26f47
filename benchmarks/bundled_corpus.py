"""Makes the training text of the bundled model: drops lines that would teach it typical flaws.

    python benchmarks/bundled_corpus.py wiki.train-*.txt.xz plain.train.txt.xz --output text/

A line is dropped if it ends with an abbreviation (a sentence that was cut there), has unbalanced quotation marks or
brackets or an empty pair of them (where markup was removed), contains a slur, or matches one of the blanks in
everyday.txt, on which the model is tested. One file is written per source, under the same name.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from diffusionbert.data.capitals import ABBREVIATIONS

EVERYDAY = Path(__file__).parent / "everyday.txt"
_WORDS = {"no", "co", "ca", "mar", "min", "est", "oz"}
_SHORT = "|".join(sorted(ABBREVIATIONS - _WORDS))
_ABBREVIATED = re.compile(rf"\b(?:{_SHORT}|[^\W\d](?:\.\w)*)\.$", re.IGNORECASE)
_EMPTY = re.compile(r"\"\"|\(\s*[,;]?\s*\)|\[\s*\]|\(\s*[,;]|,\s*,")
_SLURS = "nigg(?:er|a)|fagg?ot|kike|chink|spic|wetback|raghead|tranny"
_SLUR = re.compile(rf"\b(?:{_SLURS})s?\b", re.IGNORECASE)


def blanks() -> list[tuple[str, re.Pattern[str]]]:
    """The test sentences as patterns, each preceded by its longest lower-case part, which is searched for first."""
    found = []
    for line in EVERYDAY.read_text(encoding="utf-8").splitlines():
        if "[MASK]" in line and not line.startswith("#"):
            parts = line.lower().split("[mask]")
            found.append((max(parts, key=len), re.compile(r"[\w']+".join(map(re.escape, parts)))))
    return found


def is_cut(line: str) -> bool:
    """Whether a line ends at an abbreviation: "Mr.", "J.", "the U.S."."""
    return bool(_ABBREVIATED.search(line)) and not line.endswith((" I.", "'s.", "'t."))


def is_unbalanced(line: str) -> bool:
    opened, closed = line.count("(") + line.count("["), line.count(")") + line.count("]")
    smiles = len(re.findall(r"[:;]-?[()]", line))
    return line.count('"') % 2 == 1 or (opened != closed and not smiles)


TESTED = blanks()


def is_tested(line: str) -> bool:
    lower = line.lower()
    return any(part in lower and pattern.search(lower) for part, pattern in TESTED)


RULES: dict[str, Callable[[str], object]] = {
    "ends with an abbreviation": is_cut,
    "unbalanced": is_unbalanced,
    "empty quotation or brackets": _EMPTY.search,
    "slur": _SLUR.search,
    "in the test": is_tested,
}


def clean(source: Path, target: Path) -> Counter[str]:
    """Writes the lines of a source that no rule drops, and counts the others by rule."""
    dropped: Counter[str] = Counter()
    with lzma.open(source, "rt", encoding="utf-8") as lines, lzma.open(target, "wt", encoding="utf-8") as kept:
        for line in lines:
            rule = next((name for name, applies in RULES.items() if applies(line.strip())), "kept")
            dropped[rule] += 1
            if rule == "kept":
                kept.write(line)
    return dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for source in options.sources:
        counts = clean(source, options.output / source.name)
        print(source.name, ", ".join(f"{name} {number:,}" for name, number in counts.most_common()), flush=True)


if __name__ == "__main__":
    main()
