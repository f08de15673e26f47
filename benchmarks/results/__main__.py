"""The experiment: keeps what runs on a GPU left behind, and writes docs/results.md from it.

    python benchmarks/results keep experiment
    python benchmarks/results hash news.*.txt.xz lm1b.heldout.txt.xz masked/*.safetensors decoder/*.safetensors
    python benchmarks/results report

`keep` copies settings, logs, scores and some samples into docs/results, without weights; `hash` notes which files the
experiment was given. `report` needs neither models nor corpora: every table, picture and verdict of the page comes from
the kept files, and what is not there yet is named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the plan

from kept import note_hashes, pack
from page import PAGE, report

parser = argparse.ArgumentParser(
    prog="results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
actions = parser.add_subparsers(dest="action", required=True)
keeping = actions.add_parser("keep", help="copy what a report needs")
keeping.add_argument("source", type=Path, help="the folder that benchmarks/experiment.py wrote")
hashing = actions.add_parser("hash", help="note the files that the experiment was given")
hashing.add_argument("files", type=Path, nargs="+")
actions.add_parser("report", help="write docs/results.md")
options = parser.parse_args()
try:
    if options.action == "keep":
        pack(options.source, PAGE.with_suffix(""))
    elif options.action == "hash":
        note_hashes(options.files, PAGE.with_suffix(""))
    else:
        report()
except ValueError as error:
    parser.exit(1, f"{error}\n")
