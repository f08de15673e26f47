"""The page, in a real browser: what people do with it, what they see when it fails, and that everyone can use it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving import serving

from diffusionbert.serve.app import PAGE
from diffusionbert.serve.settings import ServerSettings

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SENTENCE = "a queen painted the sea ."
SERIOUS = ("serious", "critical")
SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
FILES = sorted(Path(PAGE).iterdir())


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("page")]  # or every worker would start a browser


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_page_has_all_that_it_needs():
    names = {path.name for path in FILES}
    texts = {path.name: path.read_text(encoding="utf-8") for path in FILES}
    modules = {name: text for name, text in texts.items() if name.endswith(".js")}
    imported = {found for text in modules.values() for found in re.findall(r'from "\./([\w.]+)"', text)}
    linked = set(re.findall(r'(?:href|src)="page/([\w.]+)"', texts["index.html"]))
    assert imported | linked == names - {"index.html"}
    for name, text in texts.items():
        other = [found for found in re.findall(r"https?://[\w./]+", text) if found != "http://www.w3.org/2000/svg"]
        assert not other, f"{name} names another host"
        assert "innerHTML" not in text, f"{name} turns text into markup"


def test_nothing_but_the_servers_own_files_may_be_loaded(client):
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert client.get("/page/main.js").headers["cache-control"] == "no-cache"


# ---- a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER)
        yield found
        found.close()


class Visit:
    """A tab that shows the page."""

    def __init__(self, page, address: str) -> None:
        self.page, self.address = page, address

    def open(self, fragment: str = "") -> None:
        """Opens the page, and waits until it has done what the link says."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{fragment}")
        self.page.wait_for_selector("html[data-ready]")
        self.settle()

    def settle(self) -> None:
        """Waits until nothing runs."""
        self.page.locator("[aria-busy=true]").first.wait_for(state="detached")

    def press(self, name: str) -> None:
        """Presses a button, and waits."""
        self.page.get_by_role("button", name=name).and_(self.page.locator(":visible")).first.click()
        self.settle()

    def tool(self, name: str) -> None:
        """Chooses what a click does."""
        self.page.locator(".view:visible").get_by_role("radio", name=name, exact=True).check()

    @property
    def tokens(self):
        """Those of the first text."""
        return self.page.locator(".view:visible .stage").first.locator(".token")

    @property
    def words(self) -> list[str]:
        """What they show."""
        return [text.strip() for text in self.tokens.all_text_contents()]

    @property
    def text(self) -> str:
        """The first text, as people see it."""
        return str(self.page.locator(".view:visible .stage .tokens").first.text_content())

    def scrub(self, step: int, number: int = 0) -> None:
        """Moves a slider."""
        self.page.locator(".view:visible .player input").nth(number).fill(str(step))

    def copied(self, name: str) -> str:
        """What a button copies."""
        self.press(name)
        self.page.locator("button", has_text="Copied").first.wait_for()
        return str(self.page.evaluate("navigator.clipboard.readText()"))


@contextmanager
def visiting(browser, address: str, **options) -> Iterator[Visit]:
    """A visit on which nothing may fail on the page, and no other host be asked."""
    options = {"reduced_motion": "reduce", "permissions": ["clipboard-read", "clipboard-write"]} | options
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    page, faults, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda request: asked.append(request.url))
    try:
        yield Visit(page, address)
        assert not faults
        assert all(url.startswith((address, "about:", "blob:", "data:")) for url in asked)
    finally:
        context.close()


@pytest.fixture
def visit(browser, served) -> Iterator[Visit]:
    with visiting(browser, served[0]) as found:
        yield found


def link(task: str, **fields) -> str:
    """A link that runs a task."""
    return "#" + str(
        httpx.QueryParams({"task": task, "run": 5} | {name.replace("b_", "b."): one for name, one in fields.items()})
    )


WRITTEN = link("write", prompt="the king", max_tokens=5)


# ---- write ----------------------------------------------------------------------------------------------------------


def test_a_text_is_written_as_the_api_does(visit, client):
    visit.open()
    assert visit.page.get_by_text("Nothing here yet").first.is_visible()
    visit.page.get_by_label("Text before").fill("the king")
    visit.page.get_by_label("New tokens").fill("5")
    visit.page.get_by_label("Seed").first.fill("5")
    visit.press("Write")
    body = {"prompt": "the king", "max_tokens": 5, "seed": 5}
    expected = "the king" + client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert visit.text == expected
    assert visit.tokens.count() == 7
    assert "given" in visit.tokens.nth(1).get_attribute("aria-label")
    assert re.search(r"probability .+; step \d+ of \d+; instead", visit.tokens.nth(3).get_attribute("aria-label"))
    assert visit.page.locator("#live").text_content() == f"Done. {expected}"
    assert visit.copied("Copy text") == expected


def test_a_sentence_can_be_watched_and_scrubbed(visit):
    visit.open(WRITTEN)
    assert visit.page.locator(".token.masked:visible").count() == 0
    visit.scrub(0)
    assert visit.page.locator(".stage .token.masked").count() == 5
    assert "5 masked" in visit.page.locator(".where:visible").text_content()
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.locator(".stage .token.masked").count() == 4
    visit.page.get_by_role("button", name="Play the steps").click()
    visit.page.get_by_text("all unmasked").wait_for()
    visit.tool("Step")
    assert visit.page.locator(".legend:visible").get_attribute("data-color") == "step"
    values = [visit.tokens.nth(index).evaluate("token => token.style.getPropertyValue('--v')") for index in range(2, 7)]
    assert sorted(map(float, values)) == [0, 0.25, 0.5, 0.75, 1]


def test_a_token_tells_what_else_it_could_have_been(visit):
    visit.open(WRITTEN)
    card = visit.page.locator(".card:visible")
    assert card.count() == 0
    visit.tokens.nth(3).hover()
    assert card.locator("li").count() == 6
    visit.page.mouse.move(1, 1)
    assert card.count() == 0
    visit.tokens.nth(0).focus()
    visit.page.keyboard.press("End")
    assert card.locator("li.chosen").count() <= 1
    assert card.locator("strong").text_content() == visit.words[-1]
    visit.page.keyboard.press("Escape")
    assert card.count() == 0


def test_a_click_masks_a_token_again_and_the_model_continues(visit):
    visit.open(WRITTEN)
    before = visit.words
    visit.tokens.nth(4).click()
    visit.settle()
    after = visit.words
    assert [*after[:4], *after[5:]] == [*before[:4], *before[5:]]
    assert "step 1 of 1" in visit.tokens.nth(4).get_attribute("aria-label")
    assert "kept" in visit.tokens.nth(3).get_attribute("aria-label")
    visit.press("Undo")
    assert visit.words == before
    visit.scrub(2)
    visit.press("Continue from this step")
    assert visit.page.locator(".stage .token.masked").count() == 0


def test_locked_tokens_are_kept_when_the_rest_is_drawn_anew(visit):
    visit.open(WRITTEN)
    before = visit.words
    visit.tool("Lock")
    visit.tokens.nth(4).click()
    visit.tokens.nth(5).click()
    visit.tool("Re-mask")
    visit.tokens.nth(4).click()
    assert visit.page.get_by_text("This token is locked").first.is_visible()
    visit.press("Redraw the 3 tokens not locked")
    assert [visit.words[index] for index in (0, 1, 4, 5)] == [before[index] for index in (0, 1, 4, 5)]
    assert visit.page.locator(".stage .token.locked").count() == 2


def test_a_selected_span_is_rewritten(visit):
    visit.open(WRITTEN)
    before = visit.words
    boxes = [visit.tokens.nth(index).bounding_box() for index in (3, 5)]
    visit.page.mouse.move(boxes[0]["x"] + 3, boxes[0]["y"] + 5)
    visit.page.mouse.down()
    visit.page.mouse.move(boxes[1]["x"] + 3, boxes[1]["y"] + 5, steps=4)
    visit.page.mouse.up()
    assert visit.page.locator(".stage .token.selected").count() == 3
    # The seed decides in how many steps: now and then, two tokens are unmasked in one.
    visit.page.evaluate("() => { crypto.getRandomValues = numbers => numbers.fill(1) }")
    visit.press("Rewrite 3 tokens")
    assert [visit.words[index] for index in (0, 1, 2, 6)] == [before[index] for index in (0, 1, 2, 6)]
    assert "of 3" in visit.tokens.nth(4).get_attribute("aria-label")


def test_all_edits_work_by_keyboard(visit):
    visit.open(WRITTEN)
    visit.tokens.nth(0).focus()
    for key in ("ArrowRight", "ArrowRight", "l", "ArrowRight", "Shift+ArrowRight"):
        visit.page.keyboard.press(key)
    assert [index for index in range(7) if "locked" in visit.tokens.nth(index).get_attribute("class")] == [2]
    assert visit.page.get_by_role("button", name="Rewrite 2 tokens").is_visible()
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("m")
    visit.page.get_by_role("button", name="Undo").wait_for()
    visit.settle()
    assert "step 1 of 1" in visit.tokens.nth(4).get_attribute("aria-label")
    assert visit.tokens.nth(4).evaluate("token => token === document.activeElement")


def test_two_settings_are_compared_from_one_seed(visit):
    visit.open(link("write", prompt="the king", max_tokens=6, compare="true", b_sampler="remasking:eta=0.5", b_steps=9))
    stages = visit.page.locator(".view:visible .stage")
    assert stages.count() == 2
    assert "remasking:eta=0.5, 9 steps" in stages.nth(1).locator("h3").text_content()
    assert all("seed 5" in stages.nth(side).locator(".status").text_content() for side in (0, 1))
    visit.scrub(0)
    assert [stages.nth(side).locator(".token.masked").count() for side in (0, 1)] == [6, 6]
    visit.open(link("write", prompt="the king", max_tokens=6, compare="true"))
    shown = visit.page.locator(".view:visible .stage .tokens").all_text_contents()
    assert shown[0] == shown[1]


# ---- links and files ------------------------------------------------------------------------------------------------


def test_a_link_shows_the_same_to_someone_else(browser, served, visit):
    visit.open(WRITTEN)
    visit.tokens.nth(4).click()
    visit.settle()
    visit.page.keyboard.press("l")
    visit.tool("Step")
    shared = visit.copied("Copy link")
    assert visit.page.url == shared
    with visiting(browser, served[0]) as other:
        other.open(shared.removeprefix(served[0] + "/"))
        assert other.text == visit.text
        assert other.page.locator(".stage .token.locked").count() == 1
        assert other.page.locator(".stage .token.given").count() == 2
        assert other.page.locator(".legend:visible").get_attribute("data-color") == "step"
        other.scrub(0)
        again = other.page.url
        other.open(again.removeprefix(served[0] + "/"))
        assert other.page.locator(".stage .token.masked").count() == 1


def test_a_request_is_copied_as_curl_and_python(visit):
    visit.open(link("write", prompt='the king\'s "cat"', max_tokens=3))
    found = subprocess.run([sys.executable, "-c", visit.copied("Copy as Python")], capture_output=True, check=True)
    assert repr(visit.text.removeprefix('the king\'s "cat"')) in found.stdout.decode()
    curl = visit.copied("Copy as curl")
    assert '\'{"prompt":"the king\'\\\'\'s \\"cat\\"",' in curl
    if shutil.which("curl"):
        answered = subprocess.run(["bash", "-c", curl], capture_output=True, check=True)
        assert b'"text_completion"' in answered.stdout


def test_an_exported_file_needs_no_server(browser, visit, tmp_path):
    visit.open(link("write", prompt="the <b>king</b> </script>", max_tokens=4))
    with visit.page.expect_download() as download:
        visit.press("Export HTML")
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    context = browser.new_context(offline=True, reduced_motion="reduce")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(saved.as_uri())
    assert page.locator(".stage .tokens").text_content() == visit.text
    page.get_by_role("slider").fill("0")
    assert page.locator(".stage .token.masked").count() == 4
    page.get_by_label("Color by").select_option("step")
    assert not faults
    context.close()


def test_markup_in_a_text_is_text(visit):
    visit.open(link("write", prompt="<img src=x>", max_tokens=3))
    assert visit.text.startswith("<img src=x>")
    assert visit.page.locator("img").count() == 0


# ---- fill, rewrite, score -------------------------------------------------------------------------------------------


def test_blanks_are_filled_and_ranked(visit):
    visit.open("#task=fill")
    visit.page.get_by_label("Text with blanks").fill("the king painted a .")
    visit.press("Fill")
    assert "no blank" in visit.page.get_by_role("alert").and_(visit.page.locator(":visible")).text_content()
    visit.page.get_by_label("Text with blanks").fill("the painted the sea .")
    visit.page.evaluate("document.querySelector('[name=fill]').setSelectionRange(4, 4)")
    visit.press("+ any length")
    visit.page.get_by_label("Fillings").fill("2")
    visit.press("Fill")
    assert visit.page.get_by_label("Text with blanks").input_value() == "the [BLANK]painted the sea ."
    assert visit.page.locator(".fillings li").count() == 2
    assert visit.page.locator(".fillings mark").count() == 2
    assert visit.page.locator(".bars li").count() == 5


def test_a_text_is_rewritten_whole_or_where_it_is_selected(visit):
    visit.open(link("rewrite", rewrite=SENTENCE, strength=0.5))
    assert visit.tokens.count() == 6
    assert 0 < visit.page.locator(".stage .token.given:visible").count() < 6
    button = visit.page.get_by_role("button", name="Rewrite the selection")
    assert button.is_disabled()
    visit.page.get_by_role("textbox", name="Text").focus()
    visit.page.evaluate("document.querySelector('[name=rewrite]').setSelectionRange(2, 15)")
    visit.press("Rewrite the selection")
    assert [index for index in range(6) if "given" not in visit.tokens.nth(index).get_attribute("class")] == [1, 2]
    assert "spans=2-15" in visit.page.url


def test_a_score_says_what_kind_of_number_it_is(visit, client):
    visit.open(link("score", score=f"{SENTENCE}\nthe the the"))
    totals = visit.page.locator(".total")
    found = client.post("/v1/score", json={"text": [SENTENCE, "the the the"], "paired": True}).json()["data"]
    for index, one in enumerate(found):
        assert f"{one['nats']:.2f} nats (95% interval" in totals.nth(index).text_content()
        assert totals.nth(index).locator(".kind").text_content() == "bound"
    assert visit.page.get_by_text("more than the first text").count() == 1
    assert visit.page.locator(".scored .token").count() == 9
    visit.page.get_by_label("Number").select_option("left-to-right")
    visit.press("Score")
    assert totals.nth(0).locator(".kind").text_content() == "exact"
    assert "interval" not in totals.nth(0).text_content()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_errors_say_what_to_do(visit):
    visit.open()
    shown = visit.page.get_by_role("alert").and_(visit.page.locator(":visible"))
    visit.page.get_by_label("Text before").fill("the king " * 200)
    visit.press("Write")
    assert re.search(r"has 400 tokens.* at most \d+; shorten it", shown.text_content())
    visit.page.get_by_label("Text before").fill("the king")
    visit.page.get_by_label("New tokens").fill("4")
    visit.page.route("**/v1/completions", lambda route: route.abort())
    visit.press("Write")
    assert "does not answer" in shown.text_content()
    visit.page.unroute("**/v1/completions")
    refusal = {"status": 429, "headers": {"retry-after": "1"}, "json": {"error": {"message": "full"}}}
    visit.page.route("**/v1/completions", lambda route: route.fulfill(**refusal), times=1)
    visit.page.get_by_role("button", name="Write", exact=True).click()
    visit.page.get_by_text("the server is busy; trying again").wait_for()
    visit.settle()
    assert shown.count() == 0
    assert visit.tokens.count() == 6


def test_a_run_can_be_stopped_while_the_server_is_busy(visit):
    refusal = {"status": 429, "headers": {"retry-after": "30"}, "json": {"error": {"message": "full"}}}
    waiting = visit.page.get_by_text("the server is busy; trying again in 30 seconds")
    visit.page.route("**/v1/completions", lambda route: route.fulfill(**refusal), times=1)
    visit.page.goto(f"{visit.address}/{WRITTEN}")
    waiting.wait_for()
    visit.press("Stop")
    assert visit.page.locator(".status").first.text_content() == "stopped"
    visit.press("Write")
    before = visit.words
    visit.page.route("**/v1/canvas", lambda route: route.fulfill(**refusal), times=1)
    visit.tokens.nth(4).click()
    waiting.wait_for()
    visit.press("Stop")
    assert visit.words == before  # the text is there again
    visit.tokens.nth(4).click()
    visit.settle()
    assert "step 1 of 1" in visit.tokens.nth(4).get_attribute("aria-label")


def test_a_link_that_is_followed_ends_what_runs(visit):
    visit.open(WRITTEN)
    refusal = {"status": 429, "headers": {"retry-after": "30"}, "json": {"error": {"message": "full"}}}
    visit.page.route("**/v1/canvas", lambda route: route.fulfill(**refusal), times=1)
    visit.tokens.nth(4).click()
    visit.page.get_by_text("the server is busy").wait_for()
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.evaluate("fragment => { location.hash = fragment; }", link("write", prompt="a queen", max_tokens=3))
    visit.page.get_by_text("all unmasked").wait_for()
    visit.settle()
    assert visit.words[:2] == ["a", "queen"]
    assert visit.page.get_by_role("button", name="Write", exact=True).is_visible()
    assert [url for url in asked if "/v1/" in url] == [f"{visit.address}/v1/completions"]


def test_a_key_is_asked_for_and_kept_out_of_links(browser):
    key = "a key of sixteen characters or more"
    with serving(ServerSettings(api_key=key)) as (address, _), visiting(browser, address) as visit:
        visit.page.goto(f"{address}/{WRITTEN}")
        visit.page.locator("#key").fill(key)
        visit.page.get_by_role("button", name="Use it").click()
        visit.page.get_by_text("all unmasked").wait_for()
        visit.settle()
        assert "key" not in visit.page.url
        assert "$DIFFUSIONBERT_API_KEY" in visit.copied("Copy as curl")


# ---- everyone -------------------------------------------------------------------------------------------------------


LINKS = [
    link("write", prompt="the king", max_tokens=5, locks="4", step=3, compare="true"),
    link("score", score=SENTENCE),
    link("write", max_tokens=500),
    link("fill", fill="the [MASK] painted the sea ."),
    link("rewrite", rewrite=SENTENCE, color="step"),
    "#task=write",
]


@pytest.mark.parametrize(("size", "scheme", "number"), [("wide", "light", 6), ("narrow", "dark", 2)])
def test_everyone_can_use_it(browser, served, size, scheme, number):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="no axe: pip install axe-playwright-python"
    )
    width, height = SIZES[size]
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme, "bypass_csp": True}
    with visiting(browser, served[0], **options) as visit:
        for fragment in LINKS[:number]:
            visit.open(fragment)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            found = axe.Axe().run(visit.page).response["violations"]
            grave = [(one["id"], one["nodes"][0]["html"][:80]) for one in found if one["impact"] in SERIOUS]
            assert not grave, fragment
