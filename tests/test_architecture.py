"""The house: modules import in one direction, and the core needs torch, transformers and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import diffusionbert

PACKAGE = Path(diffusionbert.__file__).parent

# A module imports from layers above its own, and from its own folder.
LAYERS = [
    {"shapes"},
    {"noise", "schedules"},
    {"categorical"},
    {"processes"},
    {"conditioning"},
    {"networks"},
    {"method"},
    {"methods", "samplers"},
]
# Beside the direction of layers: a network must not know noise, a process must not know networks.
STRANGERS = {
    "conditioning": {"noise", "schedules", "processes", "categorical"},
    "networks": {"noise", "schedules", "processes", "categorical"},
    "method": {"schedules", "processes", "categorical", "conditioning", "networks"},
    "methods": {"samplers", "conditioning"},
    "samplers": {"methods", "conditioning"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The layer's name: the first component below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        found |= {name.split(".")[1] for name in names if name.startswith("diffusionbert.")}
    return found


def test_every_module_has_its_layer():
    assert {part_of(path) for path in modules()} == set().union(*LAYERS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_in_one_direction(path):
    part = part_of(path)
    layer = next(index for index, names in enumerate(LAYERS) if part in names)
    allowed = set().union(*LAYERS[:layer]) | {part}
    assert imported_parts(path) <= allowed - STRANGERS.get(part, set())


@pytest.mark.parametrize("folder", ["methods", "samplers"])
def test_peers_do_not_know_each_other(folder):
    for path in (PACKAGE / folder).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        others = [other.stem for other in path.parent.glob("*.py") if other not in (path, path.parent / "__init__.py")]
        assert not [name for name in others if f"diffusionbert.{folder}.{name}" in text], path


CORE_ALONE = """
import sys

for name in ("jaxtyping", "rich", "accelerate", "tyro", "datasets", "matplotlib"):
    sys.modules[name] = None  # importing it fails, as if it were not installed
import diffusionbert.samplers.ancestral, diffusionbert.networks
import diffusionbert.methods.discrete, diffusionbert.methods.continuous_time, diffusionbert.methods.any_order
"""


def test_the_core_imports_without_optional_packages():
    subprocess.run([sys.executable, "-c", CORE_ALONE], check=True, timeout=120)


def test_importing_the_package_is_light():
    code = "import sys, diffusionbert; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
