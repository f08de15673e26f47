"""The shape of the package: no folder imports another in a circle, and the core needs few libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest
from folder_graph import PACKAGE, find_cycle, folder_graph

FACADE = {"__init__", "__main__", "model", "parallel", "recipes", "registry", "reporting"}
ORDER = [
    *("storage", "diffusion", "networks", "samplers", "objectives", "likelihood", "data", "training", "inference"),
    *("evaluation", "workflows", "reproduce", "serve", "cli"),
]
"""A folder may import those before it."""
LATE = {"workflows", "reproduce", "serve", "cli", "__init__", "__main__", "model", "recipes"}


@pytest.mark.slow
def test_no_folder_imports_another_in_a_circle() -> None:
    graph = folder_graph()
    # The facade imports folders when its functions are called, so that importing the package stays light.
    assert find_cycle({node: others for node, others in graph.items() if node not in FACADE}) is None


def test_the_root_holds_the_facade_alone() -> None:
    assert {file.stem for file in PACKAGE.glob("*.py")} == FACADE


@pytest.mark.slow
def test_only_late_folders_import_the_facade() -> None:
    graph = folder_graph()
    for node, others in graph.items():
        if node not in LATE:
            assert others.isdisjoint({"model", "recipes", "__main__"}), node
    assert graph["registry"] == set()
    assert graph["reporting"] == set()
    assert graph["parallel"] == set()


@pytest.mark.slow
def test_folders_import_earlier_folders_only() -> None:
    graph = folder_graph()
    for number, folder in enumerate(ORDER):
        assert graph[folder] & set(ORDER) <= set(ORDER[:number]), folder
    assert {node for node in graph if node not in FACADE} == set(ORDER)
    assert graph["data"] <= {"storage", "diffusion", "registry", "reporting", "parallel"}


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.slow
def test_the_core_needs_torch_transformers_and_numpy_alone() -> None:
    files = [file for folder in ORDER[1:5] for file in (PACKAGE / folder).glob("*.py")]
    modules = [f"diffusionbert.{file.parent.name}.{file.stem}" for file in files]
    blocked = ["accelerate", "tyro", "rich", "jaxtyping", "zstandard", "datasets", "matplotlib"]
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_importing_the_package_imports_one_module_and_has_no_side_effects() -> None:
    code = (
        "import os, sys\nbefore = dict(os.environ), set(sys.modules)\nimport diffusionbert\n"
        "assert dict(os.environ) == before[0]\n"
        "print(*(name for name in sys.modules.keys() - before[1]"
        " if name.partition('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["diffusionbert"]
