"""What the site adds to the Markdown of docs/: files from elsewhere in the repository, the notebook, the commands.

MkDocs reads one folder. Links that lead out of it (the model card, CHANGELOG.md) lead to a copy on the site.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
PAGES = {
    "README.md": ROOT / "README.md",
    "CHANGELOG.md": ROOT / "CHANGELOG.md",
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    "SECURITY.md": ROOT / "SECURITY.md",
    "model_card.md": ROOT / "src" / "diffusionbert" / "bundled" / "README.md",
}
"""Pages of the site that are elsewhere in the repository."""
COMMANDS = "<!-- commands -->"
"""Where the reference has the help of every command."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "notebook.md", content=notebook_markdown(NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    here = PAGES.get(page.file.src_uri, Path(config.docs_dir) / page.file.src_uri)
    names = {path: name for name, path in PAGES.items()} | {NOTEBOOK: "notebook.md"}

    def link(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        name = names.get(target)
        if name is None and target.is_relative_to(config.docs_dir):
            name = target.relative_to(config.docs_dir).as_posix()
        if name is None:
            return match[0]
        start = os.path.dirname(page.file.src_uri)  # noqa: PTH120, a path on the site
        return f"]({os.path.relpath(name, start or '.')}{match[2]})"

    linked = re.sub(r"\]\((?!\w+:)([^)#\s]+)((?:#[^)\s]*)?)\)", link, markdown)
    return linked.replace(COMMANDS, commands_markdown()) if COMMANDS in linked else linked


def commands_markdown() -> str:
    """The help of every command."""
    from diffusionbert.cli.main import COMMANDS, parse_arguments

    os.environ |= {"COLUMNS": "86", "NO_COLOR": "1"}
    sections = []
    for name in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse_arguments([name, "--help"])
        text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]|-{4,}", "", printed.getvalue())  # colors and boxes of a terminal
        text = re.sub(r"\n\s*\n\s*\n+", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
        sections.append(f"## {name}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(sections)


def notebook_markdown(path: Path) -> str:
    """A notebook with its outputs as Markdown."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell_markdown(cell)) + "\n"


def _cell_markdown(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if output.get("name") == "stderr":
            continue
        data = output.get("data", {})
        text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
        parts.append("".join(data["text/html"]) if "text/html" in data else f"```text\n{text}\n```")
    return parts
