"""The documentation as a site: it builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffusionbert import __all__ as public_names
from diffusionbert.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site is not built: pip install 'diffusionbert[docs]'")
    pytest.importorskip("mkdocstrings", reason="the site is not built: pip install 'diffusionbert[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_document_is_in_the_navigation():
    """Without mkdocs, too, which is not installed everywhere."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for document in (ROOT / "docs").rglob("*.md"):
        name = document.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in navigation or name.startswith("results/tables/"), name


@pytest.mark.slow
def test_every_document_is_a_page(site):
    for document in (ROOT / "docs").rglob("*.md"):
        assert (site / document.relative_to(ROOT / "docs").with_suffix(".html")).exists(), document
    for name in ("index", "notebook", "model_card", "CHANGELOG", "CONTRIBUTING", "SECURITY"):
        assert (site / f"{name}.html").exists()


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>", text), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_the_reference_has_every_command_and_public_name(site):
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in commands and f"usage: diffusionbert {name}" in commands for name in COMMANDS)
    pages = "".join((site / "reference" / f"{name}.html").read_text(encoding="utf-8") for name in ("python", "parts"))
    for name in set(public_names) - {"__version__"}:
        assert f'id="diffusionbert.{name}"' in pages, name
    assert "<blockquote>" not in pages  # what becomes of >>> outside a section Examples
    assert '<span class="gp">' in pages  # a prompt, as code
