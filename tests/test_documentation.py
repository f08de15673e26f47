"""The documents: their commands are understood, their links lead somewhere, and what they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tyro
from tiny_models import bundled

import diffusionbert
from diffusionbert import model
from diffusionbert.cli.main import Command, main
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.objectives.autoregressive import AutoregressiveConfig
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.objectives.learned_schedule import LearnedScheduleConfig
from diffusionbert.objectives.sundae import SundaeConfig
from diffusionbert.recipes import SYSTEMS, Start
from diffusionbert.reproduce.targets import MAIN, TARGETS

ROOT = Path(__file__).parent.parent
PACKAGE = Path(diffusionbert.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def commands(text: str) -> list[list[str]]:
    """Lines that begin with the command's name, without what is said of them."""
    found = re.findall(r"^diffusionbert (.*?)(?:  +#.*)?$", text, re.MULTILINE)
    return [shlex.split(command) for command in found]


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


@pytest.mark.parametrize("command", commands(METHODS), ids=" ".join)
def test_the_commands_of_the_methods_are_understood(command):
    tyro.cli(Command, args=command)


def test_the_commands_of_the_results_are_understood():
    found = commands((ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("\\\n", " "))
    assert found
    for command in found:
        tyro.cli(Command, args=command)


@pytest.mark.parametrize("command", commands(README), ids=" ".join)
def test_the_commands_of_the_readme_are_understood_and_those_of_the_model_inside_work(command, capsys, monkeypatch):
    """The others train, or read what was trained; `test_commands.py` and its peers do that with small models."""
    if command[0] not in ("generate", "fill", "score"):
        tyro.cli(Command, args=command)
        return
    monkeypatch.setattr(model, "load", lambda name, device: bundled())
    capsys.readouterr()
    main(command)
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert not printed.err
    if word := option(command, "--include"):
        assert word in printed.out


def test_the_readme_shows_every_way_of_using_the_model_inside():
    assert {command[0] for command in commands(README)} > {"generate", "fill", "score"}


def test_the_python_of_the_readme_works(capsys, monkeypatch):
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(diffusionbert, "load", bundled, raising=False)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) > 10


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


def test_the_tests_that_the_mathematics_names_exist():
    text = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", text)
    assert len(names) > 20
    assert not [name for name in names if f"def {name}(" not in tests]
    for file in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / file).exists(), file
