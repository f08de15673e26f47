"""What messages of `train`, `evaluate`, `compare`, `doctor` and `reproduce` advise is carried out, and works.

Those of the commands on texts are in `test_commands.py`.
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_models import corpus, run_of

from diffusionbert import model as model_module
from diffusionbert.cli.main import main
from diffusionbert.reproduce.figures import Survival
from diffusionbert.storage.files import write_json

pytestmark = pytest.mark.slow

TRAIN = "train --data={corpus} --width=16 --layers=1 --vocabulary=512 --steps=1 --cache={cache} --output={new}"
EVALUATE = (
    "evaluate --model={run} --data={corpus} --sentences=4 --samples=4 --length=6 --steps=4 --max-draws=32 "
    "--output={new}"
)
START = "train --data={corpus} --start={run} --steps=1 --cache={cache} --output={new}"
REPRODUCE = "reproduce figure2 --data={corpus} --scale=smoke --cache={cache} --output={reproduced}"
EVALUATED = EVALUATE.replace("{new}", "{evaluated}")
REMEDIES = {
    "train --output={new}": ("--data is missing; give a text file", TRAIN),
    TRAIN.replace("{corpus}", "nofile.txt"): ("give a file, a folder or a glob", TRAIN),
    f"{TRAIN} --compile --no-compile": ("give one of them", f"{TRAIN} --no-compile"),
    f"{TRAIN} --packing --no-packing": ("give one of them", f"{TRAIN} --packing"),
    f"{TRAIN} --batch-tokens=64 --batch-sequences=2": ("give one of them", f"{TRAIN} --batch-sequences=2"),
    f"{TRAIN} --start=bundled": ("leave them out, or start from scratch", TRAIN),
    f"{TRAIN} --objective=sundae --schedule=cosine": ("leave it out", f"{TRAIN} --objective=sundae"),
    f"{TRAIN} --max-length=1": ("128 is usual", f"{TRAIN} --max-length=128"),
    f"{START} --max-length=9999": ("set --max-length 25 or less", f"{START} --max-length=25"),
    f"{TRAIN} --mixed-precision=fp16": ("use bf16 or no", f"{TRAIN} --mixed-precision=no"),
    f"{TRAIN} --system=d3pm --start={{run}}": ("leave it out", f"{TRAIN} --system=d3pm"),
    f"{TRAIN} --config={{run}}/run.json --preset=tiny": ("give one of them", f"{TRAIN} --preset=tiny"),
    TRAIN.replace("{new}", "{run}"): ("choose another --output", TRAIN),
    "train --resume --output={new}": ("give a run directory", "train --resume --output={run}"),
    "evaluate --model={run}": ("--data is missing; give a test corpus: a text file", EVALUATE),
    f"{EVALUATE} --length=99": ("give less, or 'corpus'", f"{EVALUATE} --length=corpus"),
    f"{EVALUATE} --sentences=1": ("at least two", f"{EVALUATE} --sentences=2"),
    f"{EVALUATE} --samples=1": ("--samples must be 2", f"{EVALUATE} --samples=2"),
    f"{EVALUATE} --precision=high": ("0.5% or 0.005", f"{EVALUATE} --precision=0.5%"),
    f"{EVALUATE} --precision=0": ("0.005 is 0.5 %", f"{EVALUATE} --precision=0.005"),
    EVALUATED: ("give --overwrite", f"{EVALUATED} --overwrite"),
    "compare": ("give run folders that were evaluated", "compare {evaluated}"),
    "compare {new}": ("give run folders, or folders that evaluate wrote", "compare {evaluated}"),
    "compare {evaluated} {evaluated}": ("give each once", "compare {evaluated}"),
    "compare {evaluated} --json --format=latex": ("give one of them", "compare {evaluated} --format=latex"),
    "doctor --samples={new}": ("give samples, one per line", "doctor --samples={corpus}"),
    "doctor --model={run} -n 4 --length=99": ("ask for fewer", "doctor --model={run} -n 4 --length=6 --steps=4"),
    REPRODUCE.replace(" figure2", ""): ("one of table1,table2,table3,figure2", REPRODUCE),
    REPRODUCE.replace("smoke", "huge"): ("'smoke'", REPRODUCE),
    "plot {new}": ("give a run directory", "plot {run} --output={new}.png"),
    "plot {run} --output={new}.gif": (".png", "plot {run} --output={new}.png"),
}
"""What is refused, the remedy that the message names, and the remedy carried out."""


@pytest.fixture(autouse=True)
def _models_are_opened_once(monkeypatch):
    monkeypatch.setattr(model_module, "load", functools.cache(model_module.load))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> dict[str, Path]:
    """What exists before a command: a corpus, a run, an evaluation, and the numbers of a figure."""
    folder = tmp_path_factory.mktemp("remedies")
    places = {"corpus": corpus(), "run": run_of("linear"), "cache": folder / "cache", "evaluated": folder / "evaluated"}
    places["reproduced"] = folder / "reproduced"
    places["reproduced"].mkdir()
    write_json(places["reproduced"] / "figure2.json", [asdict(Survival("king", [0.0, 1.0], [1.0, 0.0]))])
    main(shlex.split(EVALUATED.format(**places)))
    return places


@pytest.mark.parametrize("command", REMEDIES, ids=lambda command: command.removeprefix(TRAIN)[-60:])
def test_the_remedy_of_a_message_works(shared, tmp_path, capsys, command):
    advice, remedy = REMEDIES[command]
    places = {**shared, "new": tmp_path / "new"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(command.format(**places)))
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("diffusionbert: ")]
    assert caught.value.code == 2
    assert advice in said
    main(shlex.split(remedy.format(**places)))
