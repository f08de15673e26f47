"""The documents: commands parse or run, links resolve, and everything that is named exists."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import MAX_LENGTH, bundled, toy_sentences, trained_run

import diffusionbert
from diffusionbert import model
from diffusionbert.cli.main import COMMANDS, main, parse_arguments
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.objectives.autoregressive import AutoregressiveConfig
from diffusionbert.objectives.continuous_time import LearnedScheduleConfig
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.objectives.sundae import SundaeConfig
from diffusionbert.recipes import SYSTEMS, Start, train
from diffusionbert.reproduce.targets import MAIN, TARGETS
from diffusionbert.training.config import DataConfig, TrainingConfig
from diffusionbert.workflows.adapt import adapt

ROOT = Path(__file__).parent.parent
PACKAGE = Path(diffusionbert.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
HOW_TO = sorted((ROOT / "docs" / "howto").glob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
INFERENCE = ("generate", "fill", "rewrite", "score", "info")
MODULE = r"(?:torchrun|accelerate launch)[^\n]* -m diffusionbert"


def commands(text: str) -> list[list[str]]:
    """The arguments of every line that runs the command, without comments; lines with shell variables are left out."""
    found = re.findall(rf"^(?: {{4}})?(?:diffusionbert|{MODULE}) ([^$\n]*?)(?:  +#.*)?$", text, re.MULTILINE)
    return [shlex.split(command) for command in found]


def python_blocks(document: str = README) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


class SystemRow(NamedTuple):
    """The columns of the first table."""

    system: str
    paper: str
    loss: str
    noise: str
    network: str
    time: str
    likelihood: str
    calls: str
    passes: str


def row_of(name: str) -> SystemRow:
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in METHODS.splitlines() if line.startswith("| `")]
    [row] = [row for row in rows if row[0] == f"`{name}`" and len(row) == len(SystemRow._fields)]
    return SystemRow(*row)


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses(document):
    for command in commands(document.read_text(encoding="utf-8").replace("\\\n", " ")):
        parse_arguments(command)


def test_commands_are_found():
    assert len(commands(README)) > 15
    assert len(commands(METHODS)) > 30
    assert len(commands(TUTORIAL)) > 12
    assert commands("    torchrun --nproc-per-node=8 -m diffusionbert train --data x  # so") == [
        ["train", "--data", "x"]
    ]
    assert commands("    SMALL='--preset tiny'\n    diffusionbert train $SMALL --output runs/x") == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in commands(README) if one[0] in INFERENCE], ids=" ".join)
def test_inference_commands_of_the_readme_run(command, capsys, monkeypatch, tmp_path):
    """The others train, or read what was trained; tests/cli does that with small models."""
    monkeypatch.setattr(model, "load", lambda name, device, dtype, compile: bundled())
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("the king .\n")
    capsys.readouterr()
    main(command)
    printed = capsys.readouterr()
    output = option(command, "--output")
    assert (Path(output).read_text() if output else printed.out).strip()
    assert not printed.err
    if word := option(command, "--include"):
        assert word in printed.out


def test_the_readme_shows_every_command():
    assert {command[0] for command in commands(README)} == set(COMMANDS)


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path):
    [(script, picture)] = re.findall(r"`python (examples/\w+\.py) (docs/\w+\.svg)`", README)
    assert f"]({picture})" in README
    runpy.run_path(str(ROOT / script))["main"](tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawn.count("<rect") > 20
    assert drawn == (ROOT / picture).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_of_the_readme_runs(capsys, monkeypatch):
    code, _ = python_blocks()
    monkeypatch.setattr(diffusionbert, "load", bundled, raising=False)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) > 10


def test_the_training_in_python_of_the_readme_has_valid_arguments(monkeypatch):
    """Training takes a minute; `tests/test_recipes.py` and its peers run it."""
    called = []

    def stub(function, returned):
        signature = inspect.signature(function)

        def call(*arguments, **options):
            bound = signature.bind(*arguments, **options).arguments
            settings = {field.name for kind in (TrainingConfig, DataConfig) for field in fields(kind)}
            assert set(bound.get("settings", {})) <= settings
            called.append(function.__name__)
            return returned

        return call

    result = SimpleNamespace(table=lambda: "a table")
    for function, returned in [
        (adapt, SimpleNamespace()),
        (train, SimpleNamespace(path="runs/mine")),
        (model.evaluate, result),
        (compare, "a table"),
    ]:
        monkeypatch.setattr(diffusionbert, function.__name__, stub(function, returned), raising=False)
    _, code = python_blocks()
    exec(compile(code, "README.md", "exec"), {})
    assert called == ["adapt", "train", "evaluate", "compare"]
    assert callable(EvaluationResult.table)


@pytest.mark.slow
@pytest.mark.usefixtures("_in_a_tutorial_directory")
def test_the_python_of_the_tutorial_runs(capsys, monkeypatch):
    """On the toy text, at two steps and a few samples, from a tiny model in place of the bundled one."""
    text, training, comparison, sharing = python_blocks(TUTORIAL)
    exec(compile(text, "tutorial.md", "exec"), {})
    for name in ("mine.txt", "test.txt"):  # the script makes them; a tiny model needs tiny sentences
        assert len(Path(name).read_text(encoding="utf-8").splitlines()) > 50
        Path(name).write_text("\n".join(toy_sentences(100)) + "\n", encoding="utf-8")
    train_model, evaluate_model = diffusionbert.train, diffusionbert.evaluate
    small = {
        "steps": 2,
        "validate_every": 1,
        "validation_sentences": 8,
        "validation_draws": 1,
        "max_length": MAX_LENGTH,
    }

    def train_small(data, output, *, start, **options):
        assert start == "bundled"
        return train_model(data, output, start=trained_run(), cache="cache", **options | small)

    def evaluate_small(name, data, **options):
        return evaluate_model(name or trained_run(), data, **options | {"samples": 4, "max_draws": 2, "steps": 4})

    monkeypatch.setattr(diffusionbert, "train", train_small, raising=False)
    monkeypatch.setattr(diffusionbert, "evaluate", evaluate_small, raising=False)
    for code, expected in [(training, "(2, "), (comparison, "BLEU-4"), (sharing, "the function returns")]:
        capsys.readouterr()
        exec(compile(code, "tutorial.md", "exec"), {})
        assert expected in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "fill", "rewrite", "score", "choose"])
def test_the_python_of_the_how_to_pages_runs(name, capsys, monkeypatch):
    """The other pages train or read what was trained, as the tutorial does."""
    [code] = python_blocks((ROOT / "docs" / "howto" / f"{name}.md").read_text(encoding="utf-8"))
    monkeypatch.setattr(diffusionbert, "load", bundled, raising=False)
    exec(compile(code, f"{name}.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", HOW_TO, ids=lambda path: path.stem)
def test_a_how_to_page_shows_its_command(page):
    text = page.read_text(encoding="utf-8")
    assert page.stem in {command[0] for command in commands(text)} or page.stem not in COMMANDS
    assert len(text.splitlines()) <= 60


def test_the_cells_of_the_notebook_run(capsys, monkeypatch):
    """With a tiny model; the second half needs none, and its verdicts are those of the mathematics."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    monkeypatch.setattr(diffusionbert, "load", lambda: model.load(trained_run()), raising=False)
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] or "def " in "".join(cell["source"])
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    assert "▒" in names["forming"](names["states"])
    assert [round(total, 2) for total in names["sums"].values()] == [1.0, 1.0, 1.08, 1.12]
    verdicts = [line.split("   ")[-1] for line in capsys.readouterr().out.splitlines() if "Σ" in line]
    assert verdicts == ["can be a likelihood", "can be a likelihood", "is not one", "is not one"]


@pytest.fixture
def _in_a_tutorial_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def toy_text(argument: str) -> str:
    """A text of the toy language with the same kind of blank; other arguments as they are."""
    for blank, text in {
        "[MASK]": "the [MASK] saw a [MASK] .",
        "[BLANK]": "the king [BLANK] .",
        " ": "the king",
    }.items():
        if blank in argument:
            return text
    return argument


@pytest.mark.slow
@pytest.mark.usefixtures("_in_a_tutorial_directory")
def test_the_commands_of_the_tutorial_run_in_their_order(capsys):
    """As above, with toy sentences; of two equal options, the appended one counts."""
    Path("mine.txt").write_text("\n".join(toy_sentences(100)) + "\n", encoding="utf-8")
    Path("test.txt").write_text("\n".join(toy_sentences(20, seed=1)) + "\n", encoding="utf-8")
    tiny = trained_run()
    started = {"train": ["--steps", "2", "--save-every", "1", "--validate-every", "1", "--max-length", str(MAX_LENGTH)]}
    small = started | {"evaluate": ["--samples", "4", "--max-draws", "2", "--steps", "4"], "doctor": ["-n", "4"]}
    for command in commands(TUTORIAL):
        replaced = [{"bundled": str(tiny), "205": "3"}.get(one, toy_text(one)) for one in command]
        if command[0] in (*INFERENCE, "evaluate") and "--model" not in command:
            replaced += ["--model", str(tiny)]
        if "--resume" not in command:
            replaced += small.get(command[0], [])
        if command[0] == "train":
            replaced = [*replaced, "--cache", "cache"]
        capsys.readouterr()
        main(replaced)
        assert capsys.readouterr().out.strip(), command


def test_the_tree_names_every_folder_and_module_and_nothing_else():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w./]+)/` \| [^|]+ \| (.+) \|$", text, re.MULTILINE)
    named = {folder: set(re.findall(r"`(\w+)`", modules)) for folder, modules in rows}
    assert len(named) == len(rows)
    existing: dict[str, set[str]] = {".": {file.stem for file in PACKAGE.glob("*.py")}}
    for file in PACKAGE.glob("*/*.py"):
        existing.setdefault(file.parent.name, set()).update({file.stem} - {"__init__"})
    assert named == existing
    assert not list(PACKAGE.glob("*/*/*.py"))
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_a_row_and_a_command_with_the_start_it_needs(name):
    network = row_of(name).network
    assert ("pretrained" in network, "scratch" in network) == (
        SYSTEMS[name].start is not Start.SCRATCH,
        SYSTEMS[name].start is Start.SCRATCH,
    )
    [command] = [command for command in commands(METHODS) if option(command, "--system") == name]
    starts = {Start.SCRATCH: None, Start.MASKED: "runs/mlm", Start.DECODER: "runs/gpt"}
    assert option(command, "--start") == starts[SYSTEMS[name].start]


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_row_of_a_system_says_what_it_is(name):
    system, row = SYSTEMS[name], row_of(name)
    words = torch.ones(9, dtype=torch.bool)
    statistics = TokenStatistics(
        mask_id=8, pad_id=0, allowed=words, never_sampled=(), counts=torch.ones(9, dtype=torch.long)
    )
    kind = system.objective.build(statistics).likelihood
    assert row.likelihood.split(";")[0] == kind.value
    on_vectors, causal = (isinstance(system.objective, kind) for kind in (GaussianConfig, AutoregressiveConfig))
    assert row.time == ("input" if on_vectors else "–" if causal else system.time.value)
    assert ("uniform" in row.noise, "vectors" in row.noise) == (
        getattr(system.objective, "uniform_noise", False) or isinstance(system.objective, SundaeConfig),
        on_vectors,
    )
    assert row.passes.strip("*") == ("2" if isinstance(system.objective, SundaeConfig | LearnedScheduleConfig) else "1")


def test_no_other_system_has_a_command():
    assert {option(command, "--system") for command in commands(METHODS)} - {None} == set(SYSTEMS)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_row_that_names_systems(name):
    [row] = re.findall(rf"^\| `{name}` \|.*$", METHODS, re.MULTILINE)
    assert f"`{name}." in row
    assert any(f"`{system}`" in row for system in SYSTEMS)


def test_the_main_table_leaves_out_what_the_document_says():
    assert set(SYSTEMS) - {row.system for row in MAIN} == {"diffuseq"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert "://" in target or (document.parent / target).exists(), target


def test_tests_that_the_documents_name_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names, files = re.findall(r"`(test_\w+)`", text), re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)`", text)
    assert len(names) > 4
    assert len(files) > 20
    assert not [name for name in names if f"def {name}(" not in tests]
    assert not [file for file in files if not (ROOT / "tests" / file).exists()]


def test_source_files_that_the_documents_name_exist():
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":
            continue  # names what is gone, too
        for path in re.findall(r"`((?:[a-z_]+/)?[a-z_0-9]+\.py)`", document.read_text(encoding="utf-8")):
            folders = ROOT, PACKAGE, ROOT / "tests"
            assert any((folder / path).exists() for folder in folders), (document.name, path)
