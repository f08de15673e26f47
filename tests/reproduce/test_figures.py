"""The paper's figures: complete files with reproducible bytes, the right numbers and labels, errors for wrong input."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusionbert.objectives.base import Likelihood
from diffusionbert.reproduce.figures import (
    KINDS,
    PALETTE,
    Curve,
    Effect,
    Frontier,
    Survival,
    TokenCurve,
    TokenRatio,
    Tradeoff,
    convergence,
    forest,
    frontiers,
    quality_diversity,
    survival_curves,
    token_curves,
)

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")

STEPS = (100.0, 400.0, 1600.0, 6400.0)
TIMES = tuple(at / 16 for at in range(17))


def curve(name: str, kind: str = "bound", level: float = 3.0, **others: Any) -> Curve:
    return Curve(name, STEPS, tuple(level + 40 / math.sqrt(step) for step in STEPS), kind, **others)


def word(text: str, tilt: float) -> Survival:
    return Survival(text, TIMES, tuple(min(1, max(0, 1 - t - tilt * math.sin(math.pi * t))) for t in TIMES))


CURVES = (
    curve("D3PM", errors=(0.3, 0.2, 0.1, 0.1)),
    curve("DiffusionBERT", num_steps=512, schedule="spindle (corpus mean)", quantity="strict"),
    curve("decoder", "exact"),
    curve("BERT-Mouth", "pseudo"),
)
TRADEOFFS = (
    Tradeoff("DiffusionBERT", (0.4, 0.3, 0.2), (0.5, 0.45, 0.3), ("k=5", "k=30", "k=100"), (0.01,) * 3, (0.02,) * 3),
    Tradeoff("decoder", (0.45, 0.3), (0.42, 0.3), ("T=0.7", "T=1.0")),
)
REAL = Tradeoff("real sentences", (0.22,), (0.44,))
WORDS = (word("bella", 0.15), word("is", -0.2), word("the", -0.4), word("there", 0.01), word("is", -0.2))
TOKENS = (
    TokenCurve("D3PM", (1e6, 1e7, 1e8), (7.0, 5.0, 4.2), "bound", ((6.9, 7.1), (4.9, 5.1), (4.1, 4.3))),
    TokenCurve("DiffusionBERT, masking on another text", (1e6, 1e7), (6.0, 4.6), "bound"),
    TokenCurve("Transformer decoder", (1e6, 1e7, 1e8), (6.0, 4.4, 3.4), "exact"),
)
RATIOS = (TokenRatio("DiffusionBERT, masking on another text", (1e6, 1e7), (0.4, 0.7), ((0.3, 0.5), (0.6, 0.8))),)
EFFECTS = (
    Effect("pretraining", -40.0, (-44.0, -35.0), -4.3),
    Effect("spindle", -1.5, (-2.0, -0.9), -19.0),
    Effect("bell", -7.5, (-8.0, -7.0)),
)
SERIES = (
    Frontier("DiffusionBERT", (3.1, 3.4), (80.0, 60.0), ((75.0, 86.0), (57.0, 64.0)), ("2", "512"), "steps"),
    Frontier("D3PM", (3.2,), (120.0,), varied="temperatures"),
)
DRAWINGS: dict[str, Callable[[Path], None]] = {
    "token_curves": lambda path: token_curves(TOKENS, path),
    "token_curves_with_ratios": lambda path: token_curves(TOKENS, path, RATIOS, "D3PM"),
    "forest": lambda path: forest(EFFECTS, path),
    "frontiers": lambda path: frontiers(SERIES, Frontier("real sentences", (3.5,), (40.0,)), path),
    "convergence": lambda path: convergence(CURVES, path),
    "quality_diversity": lambda path: quality_diversity(TRADEOFFS, REAL, path),
    "survival_curves": lambda path: survival_curves(WORDS, path),
}
TEXTS = {
    "token_curves": [
        *("tokens of training, pretraining included", "NELBO, nats per word", "NLL, nats per word", "10M"),
        *("D3PM", "DiffusionBERT, masking on another text", "Transformer decoder"),
    ],
    "token_curves_with_ratios": ["perplexity per word,", "relative to D3PM", "0.6", "NELBO, nats per word"],
    "forest": ["change of perplexity per word, %", "pretraining", "spindle", "bell", "ours, 95 %", "paper"],
    "frontiers": [
        *("entropy of the words of all samples, nats", "(lower: less varied)", "judge's perplexity", "over steps"),
        *("DiffusionBERT", "D3PM", "real sentences", "2", "512", "100"),
    ],
    "convergence": [
        *("training steps", *(f"{kind}, nats per token" for kind in KINDS.values()), "D3PM", "decoder", "BERT-Mouth"),
        "DiffusionBERT, spindle (corpus mean), strict, T = 512",
    ],
    "quality_diversity": [
        *(
            "self-BLEU-4 (lower: more diverse)",
            "BLEU-4 (higher: more n-grams of real text)",
            "DiffusionBERT",
            "decoder",
        ),
        *("real sentences", "k=5", "k=100", "T=0.7", "T=1.0"),
    ],
    "survival_curves": [
        *("time t / T", "survival ᾱ: probability of being unmasked"),
        *("bella", "is", "the", "there", "linear schedule"),
    ],
}
every_drawing = pytest.mark.parametrize("name", DRAWINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawings")
    for name, draw in DRAWINGS.items():
        draw(folder / f"{name}.svg")
    return folder


@pytest.fixture
def drawn(tmp_path, monkeypatch) -> Callable[[Callable[[Path], None]], Any]:
    """The matplotlib figure that a drawing makes, without rendering it."""
    figures = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, path, **_: (figures.append(self), Path(path).touch())
    )

    def made(draw: Callable[[Path], None]) -> Any:
        draw(tmp_path / "picture.png")
        return figures.pop()

    return made


def texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_date_and_settings(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        yield


@pytest.mark.slow
@every_drawing
@pytest.mark.usefixtures("other_date_and_settings")
def test_the_same_data_give_the_same_bytes(name, folder, tmp_path):
    DRAWINGS[name](tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (folder / f"{name}.svg").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_suffix_decides_the_format_and_no_format_contains_the_date(suffix, head, tmp_path, request):
    survival_curves(WORDS[:2], tmp_path / "new folder" / f"one{suffix}")
    request.getfixturevalue("other_date_and_settings")
    survival_curves(WORDS[:2], tmp_path / f"two{suffix}")
    one = (tmp_path / "new folder" / f"one{suffix}").read_bytes()
    assert one.startswith(head)
    assert one == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.slow
def test_matplotlib_settings_are_unchanged(tmp_path):
    code = """
import sys, pathlib
import diffusionbert.reproduce.figures as figures
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
import matplotlib
def settings():  # reading the backend would choose one
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
before = settings()
figures.convergence([figures.Curve("a", [1, 2], [2, 1], "exact")], pathlib.Path(sys.argv[1]))
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True, timeout=60)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    path.write_bytes(b"before")

    def half_a_file(self, target, **_):
        Path(target).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half_a_file)
    with pytest.raises(OSError, match="full"):
        convergence(CURVES, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape('pip install "diffusionbert[plot]"')) as error:
        convergence(CURVES, tmp_path / "picture.png")
    assert "\n" not in str(error.value)


# ---- contents -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_drawing
def test_axes_and_legend_are_text(name, folder):
    assert set(TEXTS[name]) <= set(texts(folder / f"{name}.svg"))


def test_every_kind_of_likelihood_has_an_axis_label():
    assert set(KINDS) == {kind.value for kind in Likelihood if kind is not Likelihood.NONE}


def test_kinds_have_separate_panels_over_the_same_steps(drawn):
    same = drawn(lambda path: convergence([curve("one"), curve("two")], path))
    both = drawn(lambda path: convergence([curve("one"), Curve("one", [10.0], [2.0], "exact")], path))
    assert [len(figure.axes) for figure in (same, both)] == [1, 2]
    assert [axes.get_ylabel() for axes in both.axes] == ["NLL, nats per token", "NELBO, nats per token"]
    assert both.axes[0].lines[0].get_color() == both.axes[1].lines[0].get_color()
    assert both.axes[0].get_xlim() == both.axes[1].get_xlim()
    assert [axes.get_xlabel() for axes in both.axes] == ["", "training steps"]


def test_a_system_has_one_color_and_its_variants_other_dashes(drawn):
    names = "other", "D3PM, LTE", "D3PM, TAD", "DiffusionBERT"
    [axes] = drawn(lambda path: convergence([curve(name) for name in names], path)).axes
    colors = [line.get_color() for line in axes.lines]
    assert colors == [PALETTE[2], PALETTE[1], PALETTE[1], PALETTE[0]]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 4


def test_each_varied_setting_has_a_panel_and_a_system_one_color_in_both(drawn):
    series = [Frontier("D3PM", (3.0,), (9.0,), varied=what) for what in ("steps", "temperatures")]
    panels = drawn(lambda path: frontiers(series, Frontier("real sentences", (3.5,), (4.0,)), path)).axes
    assert [axes.get_title() for axes in panels] == ["over steps", "over temperatures"]
    assert {axes.lines[0].get_color() for axes in panels} == {PALETTE[1]}
    assert panels[0].get_ylim() == panels[1].get_ylim()


def test_a_band_is_1_96_standard_errors(monkeypatch, drawn):
    bands = []
    monkeypatch.setattr(
        matplotlib.axes.Axes, "fill_between", lambda self, xs, low, high, **_: bands.append((xs, low, high))
    )
    drawn(lambda path: convergence([Curve("a", [1, 2], [5, 4], "bound", [0.5, 1])], path))
    [(xs, low, high)] = bands
    assert xs == [1, 2]
    np.testing.assert_allclose(low, [4.02, 2.04])
    np.testing.assert_allclose(high, [5.98, 5.96])


def test_self_bleu_is_on_x_bleu_on_y_and_bars_are_1_96_standard_errors(drawn):
    tradeoff = Tradeoff("a", (0.1, 0.2), (0.3, 0.4), (), (0.01, 0), (0.02, 0))
    [axes] = drawn(lambda path: quality_diversity([tradeoff], REAL, path)).axes
    (line, _, (horizontal, vertical)), (star, _, _) = axes.containers
    np.testing.assert_allclose(line.get_xydata(), [[0.1, 0.3], [0.2, 0.4]])
    np.testing.assert_allclose(horizontal.get_segments()[0], [[0.0804, 0.3], [0.1196, 0.3]])
    np.testing.assert_allclose(vertical.get_segments()[0], [[0.1, 0.2608], [0.1, 0.3392]])
    np.testing.assert_allclose(star.get_xydata(), [[0.22, 0.44]])


def test_a_repeated_word_is_drawn_once_and_the_legend_has_the_order_of_the_curves(drawn):
    figure = drawn(lambda path: survival_curves(WORDS, path))
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["the", "is", "linear schedule", "there", "bella"]
    assert len(figure.axes[0].lines) == 5


def test_dollar_signs_and_underscores_are_not_formulas(tmp_path):
    survival_curves([word("$", 0.1), word("_", -0.1), word("$a$", 0.05)], tmp_path / "a.svg")
    assert {"$", "_", "$a$"} <= set(texts(tmp_path / "a.svg"))


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curves", "suffix", "message"),
    [
        ([Curve("a", [1], [math.nan], "bound")], ".png", "'a' has a validation that is not finite"),
        ([Curve("a", [1], [1], "bound", [math.inf])], ".png", "'a' has a validation that is not finite"),
        ([curve("a"), curve("a")], ".png", "two lines have the label 'a'"),
        (CURVES, ".jpeg", "ends in '.jpeg'; a figure's name must end in"),
        (CURVES, "", "a figure's name must end in"),
    ],
)
def test_wrong_use_is_one_line_and_writes_no_file(curves, suffix, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        convergence(curves, tmp_path / f"picture{suffix}")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
