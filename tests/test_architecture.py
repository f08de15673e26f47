"""The house: modules import in one direction, and the core needs torch, transformers and numpy alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import diffusionbert

PACKAGE = Path(diffusionbert.__file__).parent

# Folders that gather modules of several layers; all others are folders of peers, one layer each.
GATHERED = ("text", "likelihood", "training", "assessment", "paper")

# The whole graph: what each module (or folder of peers) may import. Read from top to bottom, it goes in one
# direction. Networks know nothing of noise, processes nothing of networks, training nothing of concrete methods.
MAY_IMPORT = {
    "errors": "",
    "hub": "errors",
    # the mathematics
    "shapes": "",
    "noise": "errors shapes",
    "schedules": "shapes",
    "proposals": "shapes",
    "categorical": "shapes",
    "processes": "shapes noise schedules categorical",
    # the networks
    "conditioning": "shapes",
    "networks": "errors hub shapes conditioning",
    # the contract, and what meets it
    "method": "shapes noise",
    "methods": "shapes noise schedules proposals categorical processes networks method",
    "walking": "shapes noise schedules categorical processes networks method",
    "samplers": "shapes noise schedules categorical processes networks method walking",
    "sampling": "errors schedules categorical processes networks method samplers",
    "constraints": "shapes noise networks",
    "filling": "shapes noise categorical networks constraints",
    "blanks": "shapes categorical networks filling",
    # text
    "reading": "",
    "cleaning": "reading",
    "sources": "errors reading",
    "corpus": "reading cleaning sources",
    "vocabulary": "errors hub shapes reading cleaning",
    "cache": "",
    "encoded": "shapes reading corpus vocabulary cache",
    "canvas": "shapes noise reading vocabulary",
    # what numbers mean
    "batches": "",
    "metrics": "",
    "intervals": "",
    "protocol": "intervals",
    "scores": "shapes method intervals protocol",
    "evaluation": "errors shapes noise method batches protocol scores",
    # training
    "settings": "batches",
    "progress": "",
    "checkpoints": "errors",
    "averaging": "checkpoints",
    "optimising": "settings",
    "standing": "method batches",
    "saved": "errors method checkpoints averaging standing",
    "trainer": "shapes noise method batches evaluation settings progress checkpoints averaging optimising standing "
    "saved",
    "recipe": "noise method evaluation settings averaging optimising",
    # everything together
    "experiments": "schedules proposals methods batches settings",
    "presets": "proposals batches settings experiments",
    "systems": "schedules proposals methods sampling experiments presets",
    "building": "shapes schedules processes conditioning networks method methods samplers sampling experiments",
    "model_folder": "errors hub networks processes method sources corpus vocabulary checkpoints experiments building",
    "runs": "errors hub networks method cleaning sources corpus vocabulary cache encoded batches settings checkpoints "
    "standing trainer recipe experiments building model_folder",
    "tasks": "errors method protocol",
    "model": "errors hub shapes tasks categorical networks method sampling constraints filling blanks canvas "
    "checkpoints metrics protocol scores evaluation experiments building model_folder",
    "terminal": "tasks",
    # what is said of a model
    "judges": "errors hub intervals batches",
    "conventions": "shapes intervals scores",
    "material": "cleaning sources corpus vocabulary experiments model_folder",
    "likelihoods": "shapes schedules method methods vocabulary canvas protocol scores evaluation experiments building "
    "model",
    "report": "method sampling metrics intervals scores checkpoints judges conventions material",
    "assessing": "sampling metrics protocol scores evaluation experiments building tasks model judges conventions "
    "material likelihoods report",
    "retention": "shapes noise networks vocabulary canvas intervals",
    "symptoms": "method sampling vocabulary metrics evaluation building tasks model",
    "doctor": "sampling retention symptoms",
    "tables": "",
    "comparison": "method metrics intervals protocol scores checkpoints report tables",
    "figures": "",
    "denoising": "tasks tables",
    # the paper
    "request": "",
    "reproduction": "cleaning batches evaluation settings checkpoints sampling experiments presets systems runs model "
    "material report assessing request",
    "targets": "schedules sampling metrics checkpoints experiments tasks systems model report tables comparison "
    "figures denoising reproduction",
    # the commands
    "commands": "errors schedules proposals methods sampling cleaning reading sources corpus batches protocol scores "
    "evaluation progress checkpoints experiments presets systems model_folder runs tasks model terminal judges "
    "conventions material report assessing retention symptoms doctor tables comparison figures request "
    "reproduction targets",
    "cli": "commands",
}


def modules() -> list[Path]:
    without = {PACKAGE / "__init__.py", *(PACKAGE / folder / "__init__.py" for folder in GATHERED)}
    return sorted(path for path in PACKAGE.rglob("*.py") if path not in without)


def part_of(path: Path) -> str:
    """The layer's name: a module, or a folder of peers."""
    return layer(path.relative_to(PACKAGE).with_suffix("").parts)


def layer(names: Sequence[str]) -> str:
    return names[1] if names[0] in GATHERED else names[0]


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if names[0] == "diffusionbert" or names[0].removeprefix("diffusionbert.") in GATHERED:
                names = [f"{names[0]}.{alias.name}" for alias in node.names if alias.name != "__version__"]
        found |= {layer(name.split(".")[1:]) for name in names if name.startswith("diffusionbert.")}
    return found


def test_the_graph_is_complete_and_goes_in_one_direction():
    assert {part_of(path) for path in modules()} == set(MAY_IMPORT)
    above: set[str] = set()
    for part, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, part
        above.add(part)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_those_of_the_graph(path):
    part = part_of(path)
    assert imported_parts(path) <= {*MAY_IMPORT[part].split(), part}


@pytest.mark.parametrize("folder", ["methods", "samplers"])
def test_peers_do_not_know_each_other(folder):
    for path in (PACKAGE / folder).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        others = [other.stem for other in path.parent.glob("*.py") if other not in (path, path.parent / "__init__.py")]
        assert not [name for name in others if f"diffusionbert.{folder}.{name}" in text], path


# Names that say what they are within their own small world: the row of a table and that of a canvas.
LOCAL = {"Word", "Row", "logger", "Part", "VERSION", "Score", "System", "Numbers", "WIDTH"}


def test_a_name_has_one_meaning():
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in [node.name] if isinstance(node, ast.ClassDef) else names:
                homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    several = {name: paths for name, paths in homes.items() if len(paths) > 1 and not name.startswith("_")}
    assert {name: paths for name, paths in several.items() if name not in LOCAL} == {}


def test_the_map_of_the_house_has_every_module_where_it_lies():
    text = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:  )?(\w+\.py) ", text.split("```")[1], re.MULTILINE)
    inside = {"blanks.py", "__init__.py"}  # named beside filling.py
    assert sorted([*listed, *inside]) == sorted(path.name for path in PACKAGE.glob("*.py"))


CORE_ALONE = """
import sys

for name in ("jaxtyping", "rich", "accelerate", "tyro", "datasets", "matplotlib"):
    sys.modules[name] = None  # importing it fails, as if it were not installed
import importlib, pathlib, diffusionbert

package = pathlib.Path(diffusionbert.__file__).parent
names = ["networks", "processes", "sampling"]
for folder in ("methods", "networks", "samplers"):
    names += [f"{folder}.{path.stem}" for path in (package / folder).glob("*.py") if path.stem != "__init__"]
assert len(names) > 25
for name in names:
    importlib.import_module(f"diffusionbert.{name}")
"""


def test_the_core_imports_without_optional_packages():
    subprocess.run([sys.executable, "-c", CORE_ALONE], check=True, timeout=120)


def test_importing_the_package_is_light():
    code = "import sys, diffusionbert; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
