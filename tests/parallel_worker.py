"""Runs commands one after another, with tiny batches; run by test_parallel.py in one process and under torchrun.

python tests/parallel_worker.py OUTPUT CORPUS RUN JUDGE
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from tiny_scale import SMALLER_THAN_SMOKE

from diffusionbert import parallel
from diffusionbert.cli import lines
from diffusionbert.cli import main as command_line
from diffusionbert.evaluation import judges
from diffusionbert.inference import engine
from diffusionbert.likelihood.estimate import estimate
from diffusionbert.reproduce import reproduction, targets

SAVE = lines._Output.save


def stopping(output: lines._Output, chunk: list[lines.Line]) -> None:
    """Stops after the fourth line."""
    SAVE(output, chunk)
    if any(line.number >= 4 for line in chunk):
        raise KeyboardInterrupt


def main() -> None:
    output, corpus, run, judge = map(Path, sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    engine.SEQUENCES_AT_ONCE["cpu"] = 3
    lines.MOST_AT_ONCE = 2
    judges._POSITIONS_PER_CALL = 30
    assert estimate.__kwdefaults__ is not None
    estimate.__kwdefaults__["batch_tokens"] = 100
    command_line.SECONDS_TO_REPORT = 0.0
    leave, parallel.leave = parallel.leave, lambda: None  # after the last command; a process cannot join twice
    reproduction.SCALES["smoke"] = SMALLER_THAN_SMOKE
    targets.MAIN = (targets.Row("diffusionbert-spindle"),)

    texts = corpus.read_text(encoding="utf-8").splitlines()
    file = output.parent / f"{output.name}.txt"
    model = ["--model", str(run), "--device", "cpu"]
    if parallel.launch().is_main:
        file.write_text("\n".join([*texts[:5], "", "a [MASK] b", *texts[5:9]]) + "\n", encoding="utf-8")
    seedless = "--file", str(file), "--steps", "4", "--json", "--output", str(output / "seedless.jsonl")
    commands = {
        "generate": ["generate", "-n", "7", "--steps", "4", "--seed", "1", "--json", *model],
        "prompts": ["generate", "the king", "a queen", "-n", "2", "--steps", "4", "--seed", "1", "--json", *model],
        "score": ["score", "--file", str(file), "--json", "--output", str(output / "score.jsonl"), *model],
        "interrupted": ["score", "--file", str(file), "--json", "--output", str(output / "resumed.jsonl"), *model],
        "resumed": ["score", "--file", str(file), "--json", "--output", str(output / "resumed.jsonl"), *model],
        "ordered": ["score", *texts[:5], "--order", "left-to-right", "--json", *model],
        "paired": ["score", *texts[:3], "--paired", "--precision", "1", "--json", *model],
        "rewrite": ["rewrite", "--file", str(file), "--steps", "4", "--seed", "1", *model],
        "seedless": ["rewrite", *seedless, *model],
        "evaluate": [
            *(
                "evaluate",
                "--data",
                str(corpus),
                "--split",
                "all",
                "--sentences",
                "30",
                "--samples",
                "5",
                "--length",
                "6",
            ),
            *("--steps", "4", "--max-draws", "8", "--conventions", "--judge", str(judge), "--output"),
            *(str(output / "evaluation"), *model),
        ],
        "reproduce": [
            *("reproduce", "all", "--data", str(corpus), "--output", str(output / "reproduction")),
            *("--cache", str(output / "cache"), "--device", "cpu"),
        ],
        "info": ["info", "--json"],
        "missing": ["evaluate", "--data", "missing.txt", *model],
    }
    all_targets = {name: targets.TARGETS[name] for name in ("figure2", "table2")}
    targets.TARGETS.clear()
    targets.TARGETS.update(all_targets)
    index = parallel.launch().index
    codes = {}
    for name, arguments in commands.items():
        with (output / f"{name}-{index}.txt").open("w", encoding="utf-8") as printed, redirect_stdout(printed):
            lines._Output.save = stopping if name == "interrupted" else SAVE
            try:
                command_line.main(arguments)
                codes[name] = 0
            except SystemExit as end:
                codes[name] = int(end.code or 0)
    (output / f"codes-{index}.json").write_text(json.dumps(codes), encoding="utf-8")
    logging.getLogger("diffusionbert").handlers.clear()

    def failing(number: int) -> int:
        if number == 3:
            raise ValueError(f"{number} is too much")
        return number

    processes, found = parallel.join(), []
    try:
        found.extend(processes.share(range(5), failing))
    except ValueError as error:
        found.append(str(error))
    found.append(processes.on_main(lambda: index))
    (output / f"share-{index}.json").write_text(json.dumps(found), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
