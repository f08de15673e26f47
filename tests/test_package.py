"""What is released: the wheel has the package and its model, the source distribution what is under version control."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

import diffusionbert
from diffusionbert.training.model_folder import BUNDLED

ROOT = Path(__file__).parent.parent
PAGE = {".css", ".html", ".js", ".svg"}
MODEL = {
    *("README.md", "config.json", "diffusionbert.json", "tokenizer.json", "tokenizer_config.json"),
    "token_counts.safetensors",
}
WEIGHTS = re.compile(r"model(-int8)?(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
UNSHIPPED = {".ci/run", ".gitignore", ".pre-commit-config.yaml"}
"""What a source distribution does not need; the build adds `pyproject.toml` itself."""


def included(kind: str) -> set[str]:
    """The files that hatchling would put into a wheel or sdist, without compressing them."""
    pytest.importorskip("hatchling", reason="nothing is packed: pip install hatchling")
    if kind == "wheel":
        from hatchling.builders.wheel import WheelBuilder as Builder
    else:
        from hatchling.builders.sdist import SdistBuilder as Builder
    files = Builder(str(ROOT)).recurse_included_files()
    return {Path(file.distribution_path).as_posix() for file in files}


def of_the_repository() -> set[str]:
    """What is under version control, or will be; what git ignores is not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no clone, so it is not known what belongs to the repository")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_has_the_package_the_page_and_the_model_and_nothing_else():
    files = {PurePosixPath(name).relative_to("diffusionbert") for name in included("wheel")}
    model = {path.name for path in files if path.parent.name == "bundled"}
    assert model == {path.name for path in BUNDLED.iterdir()}
    assert model > MODEL
    assert all(WEIGHTS.fullmatch(name) for name in model - MODEL)
    others = {path for path in files if path.parent.name != "bundled" and path.suffix != ".py"}
    assert {str(path) for path in others if path.parent != PurePosixPath("serve/page")} == {"py.typed"}
    assert {path.suffix for path in others} == PAGE | {".typed"}


def test_the_source_distribution_is_the_repository():
    files, shipped = of_the_repository(), included("sdist")
    assert {f"src/{name}" for name in included("wheel")} <= shipped
    assert shipped <= files
    assert files - shipped == UNSHIPPED | {"pyproject.toml"}


def test_the_citation_has_the_version_of_the_package():
    [version] = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert version == diffusionbert.__version__


def test_the_lock_has_the_constraints_with_hashes():
    """`make lock` writes it; pins of extras that are not locked (`eval`, `notebook`, `release`) are left out."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", lock, flags=re.MULTILINE).strip())
    assert len(entries) > 100
    assert all("--hash=sha256:" in entry and "://" not in entry for entry in entries)
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    checked = [(name, version) for name, version in pins if name.lower().replace("_", "-") in versions]
    assert len(checked) > 25
    assert not [pin for pin in checked if pin[1] not in versions[pin[0].lower().replace("_", "-")]]


def test_the_lock_has_every_requirement():
    """Of the package and of the extras that `make lock` names: `make lock` was not forgotten."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"--extra (\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    required = [*project["dependencies"], *(one for name in extras for one in project["optional-dependencies"][name])]
    names = {re.match(r"[\w.-]+", one)[0].lower().replace("_", "-") for one in required} - {"diffusionbert"}
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert {"torch", "peft"} < names
    assert names <= set(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE))


def test_nothing_reports_home():
    """No source file names an address to send to; users name Hub models, data sets and trackers themselves."""
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(diffusionbert.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"https?://([\w.-]+\w)", sources)) <= {"127.0.0.1", "example.org"}
