"""Long work inside one call reports how far it has come: a bar on a terminal, one line with an estimate elsewhere."""

from __future__ import annotations

import pytest
from tiny_models import model_of, run_of

from diffusionbert import reporting
from diffusionbert.cli.main import main
from diffusionbert.reporting import report, set_verbosity, shown_progress


@pytest.fixture
def seen(monkeypatch) -> list[tuple[str, int, int]]:
    """What is reported."""
    found: list[tuple[str, int, int]] = []

    def show(description, done, total) -> None:
        found.append((description, done if isinstance(done, int) else done(), total))

    token = reporting._shown.set(show)
    yield found
    reporting._shown.reset(token)


def steps_of(seen: list[tuple[str, int, int]], description: str) -> list[int]:
    """How much was done, which never falls and ends with all."""
    counts = [(done, total) for text, done, total in seen if text == description]
    assert counts == sorted(counts)
    assert counts[-1][0] == counts[-1][1]
    return [done for done, _ in counts]


def test_filling_reports_every_token(seen):
    model_of("linear").fill("the " + "[MASK] " * 8 + ".", seed=0)
    assert steps_of(seen, "searching for tokens") == list(range(9))
    assert any(text == "scoring fillings" for text, *_ in seen)


@pytest.mark.parametrize("options", [{"length": 14}, {"length": 60, "block": 8}])
def test_generating_reports_its_tokens(seen, options):
    model_of("linear").generate(seed=0, steps=64, **options)
    done = steps_of(seen, "generating tokens")
    assert done[-1] == options["length"]
    assert len(set(done)) > 5


def test_nothing_is_counted_unless_it_is_shown(monkeypatch):
    """On a GPU, counting waits for the work."""
    counted: list[int] = []

    def done() -> int:
        counted.append(1)
        return 3

    now = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now[0])
    report("filling", done, 10)  # nobody is told
    with shown_progress():
        for now[0] in (1.0, 2.0, 2.5, 2.51, 2.52, 2.7):  # too early; shown; too soon after that; shown
            report("filling", done, 10)
    assert len(counted) == 2


def test_one_line_estimates_how_long_it_takes(capsys, monkeypatch):
    clock = iter([0.0, 5.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(clock))
    set_verbosity("info")
    with shown_progress():
        report("filling", 1, 10)  # after 5 s: too early
        report("filling", 4, 10)
        report("filling", 5, 10)  # once is enough
    report("filling", 6, 10)  # nobody is told
    assert capsys.readouterr().err == "filling: 4 of 10, about 0:00:30 left\n"


def test_a_bar_ends_with_the_work(monkeypatch):
    """What follows may be printed in its place."""
    bars: list[str] = []

    class Bar:
        def __enter__(self):
            bars.append("opened")
            return lambda done, text, total: bars.append(f"{text} {done}/{total}")

        def __exit__(self, *_):
            bars.append("closed")

    monkeypatch.setattr(reporting, "SECONDS_TO_SHOW", -1.0)
    monkeypatch.setattr(reporting, "progress_line", lambda total: Bar())
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with shown_progress():
        report("filling", 1, 3)
        report("filling", 2, 3)
        report("filling", 3, 3)
        bars.append("printed")
    assert bars == ["opened", "filling 1/3", "filling 2/3", "closed", "printed"]


def test_commands_show_it(capsys, monkeypatch):
    monkeypatch.setattr(reporting, "SECONDS_TO_ESTIMATE", -1.0)
    main(["fill", "the [MASK] [MASK] [MASK] .", f"--model={run_of('linear')}", "--device=cpu"])
    assert "searching for tokens: 1 of 3, about 0:00:0" in capsys.readouterr().err
