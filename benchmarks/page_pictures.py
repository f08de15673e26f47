"""Takes the screenshots of the page in docs/serving.md from a running server.

Run `diffusionbert serve`, then `python benchmarks/page_pictures.py http://127.0.0.1:8000 docs/page`. The fonts are
those of Debian's packages fonts-inter and fonts-urw-base35.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

WIDE, NARROW = (1280, 640), (390, 844)
PROMPT = {"prompt": "The old man walked down to the", "max_tokens": 16, "run": 2}
SENTENCES = "The children play in the garden.\nThe garden play in the children."


def main(address: str, folder: Path) -> None:
    """Takes all screenshots."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[str, tuple[int, int], str, dict[str, Any]]] = [
        ("write", WIDE, "light", {"task": "write"} | PROMPT),
        ("dark", WIDE, "dark", {"task": "write", "step": 10, "color": "step"} | PROMPT),
        ("compare", WIDE, "light", {"task": "write", "compare": "true", "b.sampler": "confidence"} | PROMPT),
        ("score", WIDE, "light", {"task": "score", "run": 1, "score": SENTENCES}),
        ("narrow", NARROW, "light", {"task": "write", "locks": "9.13.14"} | PROMPT),
    ]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"))
        for name, (width, height), scheme, fields in pictures:
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
                reduced_motion="reduce",
                has_touch=width < 500,
            )
            page = context.new_page()
            page.goto(f"{address}/#{urlencode(fields)}")
            page.wait_for_selector("html[data-ready]")
            page.locator("[aria-busy=true]").first.wait_for(state="detached", timeout=120_000)
            _prepare(page, name)
            page.screenshot(path=folder / f"{name}.png")
            context.close()
        browser.close()


def _prepare(page: Page, name: str) -> None:
    """Brings the page into the state that the screenshot shows."""
    if name == "write":
        tokens = page.locator(".stage .token:not(.given)")
        tokens.nth(tokens.count() - 5).hover()  # a token of the last line, so that the card is below the text
    if name == "narrow":
        page.locator(".toolbar").first.evaluate("element => element.scrollIntoView()")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
