"""Pictures: whole files of the right size, the same bytes twice, all that must be said in them, nothing overlapping."""

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
from hypothesis import given
from hypothesis import strategies as st

from diffusionbert.figures import (
    KINDS,
    Curve,
    Survival,
    Tradeoff,
    convergence,
    quality_diversity,
    scaling,
    speed,
    spread,
    survival_curves,
)
from diffusionbert.figures.style import COLOURS
from diffusionbert.figures.ticks import short
from diffusionbert.method import Likelihood

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")
Image = pytest.importorskip("PIL.Image")

STEPS = (100.0, 400.0, 1600.0, 6400.0)


def curve(name: str, kind: str = "bound", level: float = 3.0, **others: Any) -> Curve:
    return Curve(name, STEPS, tuple(level + 40 / math.sqrt(step) for step in STEPS), kind, **others)


CURVES = (
    curve("D3PM", errors=(0.3, 0.2, 0.1, 0.1)),
    curve("DiffusionBERT", level=2.5, notes=("2 steps", "8", "32", "128")),
    curve("decoder", "exact"),
    curve("BERT-Mouth", "pseudo"),
)
TRADEOFFS = (
    Tradeoff("DiffusionBERT", (0.4, 0.3, 0.2), (0.5, 0.45, 0.3), ("k=5", "k=30", "k=100"), (0.01,) * 3, (0.02,) * 3),
    Tradeoff("decoder", (0.45, 0.3), (0.42, 0.3), ("T=0.7", "T=1.0")),
)
REAL = Tradeoff("real sentences", (0.22,), (0.44,))
TIMES = tuple(at / 16 for at in range(17))


def word(text: str, tilt: float) -> Survival:
    return Survival(text, TIMES, tuple(min(1, max(0, 1 - t - tilt * math.sin(math.pi * t))) for t in TIMES))


WORDS = (word("bella", 0.15), word("is", -0.2), word("the", -0.4), word("there", 0.01), word("is", -0.2))

DRAWINGS: dict[str, Callable[[Path], None]] = {
    "convergence": lambda path: convergence(CURVES, path),
    "scaling": lambda path: scaling(CURVES, path, y="perplexity a token"),
    "speed": lambda path: speed(CURVES, path),
    "quality_diversity": lambda path: quality_diversity(TRADEOFFS, path, real=REAL),
    "survival_curves": lambda path: survival_curves(WORDS, path),
}
SAID = {
    "convergence": ["training steps", *(f"{kind}, nats a token" for kind in ("exact", "bound", "pseudo"))],
    "scaling": ["training tokens", *(f"{kind}, perplexity a token" for kind in ("exact", "bound", "pseudo"))],
    "speed": ["seconds a sample", "bound, perplexity a token", "2 steps", "128"],
    "quality_diversity": [
        "self-BLEU-4   (← more diverse)",
        "BLEU-4   (more of it in real text →)",
        "real sentences",
        "k=5",
    ],
    "survival_curves": ["time t / T", "survival ᾱ: probability of being visible", "bella", "the", "there", "linear"],
}
every_drawing = pytest.mark.parametrize("name", DRAWINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every drawing as text, made once."""
    folder = tmp_path_factory.mktemp("drawings")
    for name, draw in DRAWINGS.items():
        draw(folder / f"{name}.svg")
    return folder


@pytest.fixture
def drawn(tmp_path, monkeypatch) -> Callable[[Callable[[Path], None]], Any]:
    """The figure that a drawing made, before it becomes pixels, which take longest."""
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


@every_drawing
def test_a_picture_is_six_inches_wide_and_not_too_high(name, folder):
    root = ElementTree.fromstring((folder / f"{name}.svg").read_text(encoding="utf-8"))
    width, height = (float(root.attrib[side].removesuffix("pt")) / 72 for side in ("width", "height"))
    assert width == 6
    assert 3 <= height <= 10


def test_a_png_is_1200_pixels_wide_and_nothing_else_is_left(tmp_path):
    survival_curves(WORDS, tmp_path / "new folder" / "picture.png")
    with Image.open(tmp_path / "new folder" / "picture.png") as image:
        image.load()
        assert image.width == 1200
        colours = image.convert("RGB").getcolors(1 << 24)
    assert max(colours)[1] == (255, 255, 255)
    assert len(colours) > 50
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["picture.png"]


@pytest.fixture
def other_day_and_settings(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        yield


@every_drawing
@pytest.mark.usefixtures("other_day_and_settings")
def test_the_same_data_are_the_same_bytes(name, folder, tmp_path):
    DRAWINGS[name](tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (folder / f"{name}.svg").read_bytes()


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_suffix_decides_and_no_format_holds_the_day(suffix, head, tmp_path, request):
    survival_curves(WORDS[:2], tmp_path / f"one{suffix}")
    request.getfixturevalue("other_day_and_settings")
    survival_curves(WORDS[:2], tmp_path / f"two{suffix}")
    one = (tmp_path / f"one{suffix}").read_bytes()
    assert one.startswith(head)
    assert one == (tmp_path / f"two{suffix}").read_bytes()


def test_matplotlib_is_left_as_it_was(tmp_path):
    code = """
import sys, pathlib
import diffusionbert.figures as figures
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
import matplotlib
def settings():  # to ask for the backend is to choose one
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
before = settings()
figures.convergence([figures.Curve("a", [1, 2], [2, 1], "exact")], pathlib.Path(sys.argv[1]))
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True, timeout=60)


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
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


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in DRAWINGS:
        with pytest.raises(ValueError, match=re.escape('pip install "diffusionbert[plot]"')) as error:
            DRAWINGS[name](tmp_path / "picture.png")
        assert "\n" not in str(error.value)


# ---- what is said ---------------------------------------------------------------------------------------------------


@every_drawing
def test_axes_names_and_labels_are_text(name, folder):
    found = texts(folder / f"{name}.svg")
    names = {"quality_diversity": [one.name for one in TRADEOFFS], "survival_curves": []}
    for said in SAID[name] + names.get(name, [one.name for one in CURVES]):
        assert said in found, said


def test_kinds_are_those_of_likelihoods():
    assert set(KINDS) == {kind.value for kind in Likelihood}


@pytest.mark.parametrize("draw", [convergence, scaling, speed])
def test_kinds_have_panels_and_a_system_one_colour(draw, drawn):
    same = drawn(lambda path: draw([curve("one"), curve("two")], path))
    different = drawn(lambda path: draw([curve("one"), curve("two", "exact")], path))
    both = drawn(lambda path: draw([curve("one"), curve("one", "exact")], path))
    assert [len(figure.axes) for figure in (same, different, both)] == [1, 2, 2]
    assert same.axes[0].get_title("left") == ""
    assert [axes.get_title("left") for axes in different.axes] == [KINDS["exact"], KINDS["bound"]]
    colours = [[axes.lines[0].get_color() for axes in figure.axes] for figure in (different, both)]
    assert colours == [[COLOURS[1], COLOURS[0]], [COLOURS[0], COLOURS[0]]]


def test_what_is_no_likelihood_has_no_kind(drawn):
    [axes] = drawn(lambda path: speed([curve("one", "none")], path, y="BLEU-4")).axes
    assert axes.get_ylabel() == "BLEU-4"


def test_panels_show_the_same_stretch_of_training(drawn):
    curves = curve("one"), Curve("two", [10.0], [2.0], "exact")
    above, below = drawn(lambda path: convergence(curves, path)).axes
    assert above.get_xlim() == below.get_xlim()
    assert below.get_xlim()[0] <= 10
    assert below.get_xlim()[1] >= 6400
    assert not above.get_xlabel()
    assert below.get_xlabel() == "training steps"


@pytest.mark.parametrize(("draw", "scales"), [(convergence, "linear linear"), (scaling, "log log"), (speed, "log log")])
def test_scales_and_ticks(draw, scales, drawn):
    [axes] = drawn(lambda path: draw([curve("one")], path)).axes
    assert f"{axes.get_xscale()} {axes.get_yscale()}" == scales
    low, high = axes.get_xlim()
    assert len([tick for tick in axes.get_xticks() if low <= tick <= high]) >= 2


@pytest.mark.parametrize("draw", [scaling, speed])
def test_a_single_value_has_ticks_around_it(draw, drawn):
    for axes in drawn(lambda path: draw([Curve("one", [0.0009], [33.4], "exact"), curve("two")], path)).axes:
        low, high = axes.get_ylim()
        assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 2


def lines(axes: Any) -> list[list[list[float]]]:
    """What is drawn inside a panel, line by line."""
    inside = [line for line in axes.lines if line.get_transform() == axes.transData]
    return [np.round(line.get_xydata(), 4).tolist() for line in inside]


def test_a_band_is_1_96_standard_errors(monkeypatch, drawn):
    bands = []
    monkeypatch.setattr(
        matplotlib.axes.Axes, "fill_between", lambda self, xs, low, high, **_: bands.append((xs, low, high))
    )
    drawn(lambda path: convergence([Curve("a", [1, 2], [5, 4], "bound", [0.5, 1])], path))
    [(xs, low, high)] = bands
    assert xs == (1, 2)
    np.testing.assert_allclose(low, [4.02, 2.04])
    np.testing.assert_allclose(high, [5.98, 5.96])


def test_self_bleu_lies_on_x_bleu_on_y_and_bars_are_1_96_standard_errors(drawn):
    tradeoff = Tradeoff("a", (0.1, 0.2), (0.3, 0.4), None, (0.01, 0), (0.02, 0))
    [axes] = drawn(lambda path: quality_diversity([tradeoff], path, real=REAL)).axes
    found = lines(axes)
    assert [[0.1, 0.3], [0.2, 0.4]] in found
    assert [[0.0804, 0.3], [0.1196, 0.3]] in found
    assert [[0.1, 0.2608], [0.1, 0.3392]] in found
    assert [[0.22, 0.44]] in found
    [axes] = drawn(lambda path: scaling([Curve("a", [1, 2], [5, 4], "bound", [0.5, 1])], path)).axes
    assert [[2, 2.04], [2, 5.96]] in lines(axes)


def test_a_bar_that_reaches_below_nought_fits_a_logarithmic_axis(tmp_path):
    scaling([Curve("a", [1, 100], [4, 3], "bound", [3, 0.1])], tmp_path / "a.svg")
    assert "nan" not in (tmp_path / "a.svg").read_text(encoding="utf-8").lower()


def test_a_word_that_occurs_twice_is_drawn_and_named_once(drawn):
    [axes] = drawn(lambda path: survival_curves(WORDS, path)).axes
    assert sorted(text.get_text() for text in axes.texts) == ["bella", "is", "linear", "the", "there"]
    assert len([line for line in lines(axes) if len(line) == len(TIMES)]) == 4


def test_common_words_are_named_above_the_linear_schedule_and_rare_ones_below(drawn):
    [axes] = drawn(lambda path: survival_curves(WORDS, path)).axes
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights["bella"] < heights["there"] < 0.5 < heights["linear"] < heights["is"] < heights["the"]
    assert [[0, 1], [1, 0]] in lines(axes)


def test_dollars_underscores_and_line_breaks_are_letters(tmp_path):
    survival_curves([word("$", 0.1), word("_", -0.1), word("$a$", 0.05)], tmp_path / "a.svg")
    assert {"$", "_", "$a$"} <= set(texts(tmp_path / "a.svg"))
    convergence([curve("_a $x$\n b")], tmp_path / "b.svg", x="$x$", y="$y$")
    assert {"_a $x$ b", "$x$", "bound, $y$"} <= set(texts(tmp_path / "b.svg"))
    quality_diversity([Tradeoff("a", [0.1], [0.2], ["$k$"])], tmp_path / "c.svg")
    assert "$k$" in texts(tmp_path / "c.svg")


def test_long_names_keep_their_ends(tmp_path):
    convergence([curve(f"runs/{'x' * 100}/seed-{seed}") for seed in (1, 2)], tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    assert any(line.endswith("seed-1") for line in found)
    assert any(line.endswith("seed-2") for line in found)


# ---- nothing overlaps -----------------------------------------------------------------------------------------------


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other, and texts outside the figure."""
    figure.draw_without_rendering()  # puts annotations into their places
    seen: list[tuple[str, Any]] = []
    for axes in figure.axes:
        ticks = [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
        shown = [*axes.texts, axes.xaxis.label, axes.yaxis.label, *(tick for tick in ticks if tick.get_visible())]
        # Of an annotation, the letters without what leads to them.
        boxes = [matplotlib.text.Text.get_window_extent(text) for text in shown]
        seen += [(text.get_text(), box) for text, box in zip(shown, boxes, strict=True) if text.get_text()]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [(text, "outside") for text, box in seen if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    pairs = [
        (first, second)
        for at, (first, one) in enumerate(seen)
        for second, two in seen[:at]
        if min(one.x1, two.x1) - max(one.x0, two.x0) > 1 and min(one.y1, two.y1) - max(one.y0, two.y0) > 1
    ]
    return outside + pairs


def crowded() -> dict[str, Callable[[Path], None]]:
    generator = np.random.default_rng(0)
    long = "a system with a rather long name, number"
    curves = [curve(f"{long} {at}", level=3 + 0.01 * at, notes=("2", "8", "32", "128")) for at in range(12)]
    tradeoffs = []
    for at in range(6):
        knob = np.linspace(0.2, 0.5, 5)
        bleu, self_bleu = (list(map(float, knob + 0.02 * at + generator.normal(size=5) * 0.01)) for _ in range(2))
        tradeoffs.append(Tradeoff(f"{long} {at}", self_bleu, bleu, [f"k={10**k}" for k in range(5)]))
    spots = [*0.35 * generator.uniform(size=(24, 2)), (1.0, 1.0)]
    single = [Tradeoff(f"{at}", [x], [y], ["k=100"]) for at, (x, y) in enumerate(spots)]
    words = [word(f"word{at}", 0.3 - 0.035 * at) for at in range(20)]
    return {
        "convergence": lambda path: convergence([*curves, curve("alone", "exact")], path),
        "scaling": lambda path: scaling(curves, path),
        "speed": lambda path: speed(curves[:5], path),
        "quality_diversity": lambda path: quality_diversity(tradeoffs, path, real=REAL),
        "single points": lambda path: quality_diversity(single, path),
        "survival_curves": lambda path: survival_curves(words, path),
        "words of one side": lambda path: survival_curves([word(f"w{at}", 0.01 * at) for at in range(24)], path),
        "gone at once, and never": lambda path: survival_curves([word(f"w{at}", at - 4.5) for at in range(10)], path),
        "common words": lambda path: survival_curves([word(f"w{at}", -0.02 * at) for at in range(24)], path),
    }


def misplaced(figure: Any) -> list[str]:
    """Labels that cover a point, four pixels around it, or leave their panel."""
    found = []
    for axes in figure.axes:
        drawn = [line for line in lines(axes) if len(line) != 2]  # which error bars have
        points, panel = axes.transData.transform(np.concatenate(drawn)), axes.get_window_extent()
        for note in axes.texts:
            if isinstance(note, matplotlib.text.Annotation):
                box = matplotlib.text.Text.get_window_extent(note)
                if box.padded(4).count_contains(points) or panel.count_contains(box.corners()) != 4:
                    found.append(note.get_text())
    return found


@pytest.mark.parametrize("name", crowded())
def test_no_text_covers_another_nor_a_label_a_point(name, drawn):
    figure = drawn(crowded()[name])
    assert overlapping(figure) == []
    assert misplaced(figure) == []


@given(st.lists(st.tuples(st.floats(-2, 12), st.floats(0.1, 1.5)), min_size=1, max_size=6))
def test_spread_boxes_do_not_overlap_stay_inside_and_move_no_more_than_they_must(boxes):
    wanted, heights = sorted(want for want, _ in boxes), [height for _, height in boxes]
    places = spread(wanted, heights, 10.0)
    for at in range(len(boxes) - 1):
        assert places[at + 1] - places[at] >= (heights[at] + heights[at + 1]) / 2 - 1e-9
    assert places[0] >= heights[0] / 2 - 1e-9
    assert places[-1] <= 10 - heights[-1] / 2 + 1e-9
    free = spread(wanted, [1e-12] * len(boxes), 10.0)
    np.testing.assert_allclose(free, np.clip(wanted, 0, 10), atol=1e-9)


def test_two_boxes_share_the_way():
    assert spread([5.0, 5.0], [1.0, 1.0], 10.0) == [4.5, 5.5]
    assert spread([9.9, 9.9], [1.0, 1.0], 10.0) == [8.5, 9.5]
    assert spread([2.0, 8.0], [1.0, 1.0], 10.0) == [2.0, 8.0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.05, "0.05"), (2.5, "2.5"), (500.0, "500"), (20_000.0, "20k"), (1.5e6, "1.5M"), (3e9, "3B"), (-2.0, "−2")],
)
def test_ticks_are_short(value, shown):
    assert short(value) == shown


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda path: convergence([], path), "nothing to draw"),
        (lambda path: quality_diversity([], path), "nothing to draw"),
        (lambda path: survival_curves([], path), "nothing to draw"),
        (lambda path: speed([], path), "nothing to draw"),
        (lambda path: scaling([], path), "nothing to draw"),
        (lambda path: Curve("a", [], [], "bound"), "0 xs and 0 ys"),
        (lambda path: Curve("a", [1, 2], [1], "bound"), "2 xs and 1 ys"),
        (lambda path: Curve("a", [1], [math.nan], "bound"), "ys of 'a' hold nan"),
        (lambda path: Curve("a", [math.inf], [1], "bound"), "xs of 'a' hold inf"),
        (lambda path: Curve("a", [1], [1], "upper"), "kinds are exact, bound, pseudo, none"),
        (lambda path: Curve("a", [1], [1], "bound", [0.1, 0.2]), "1 points and 2 errors"),
        (lambda path: Curve("a", [1], [1], "bound", [-0.1]), "-0.1"),
        (lambda path: Curve("a", [1], [1], "bound", None, ["x", "y"]), "1 points and 2 notes"),
        (lambda path: Curve(" ", [1], [1], "bound"), "give it a name"),
        (lambda path: Tradeoff("a", [0.1], [0.1, 0.2]), "1 self_bleu and 2 bleu"),
        (lambda path: Tradeoff("a", [0.1], [0.1], ["k", "k"]), "2 knobs"),
        (lambda path: Tradeoff("a", [0.1], [0.1], None, [math.nan]), "standard error"),
        (lambda path: Tradeoff("a", [0.1], [0.1], None, None, [math.inf]), "standard error"),
        (lambda path: Survival("a", [0, 1.5], [1, 0]), "times of 'a' reach from 0.0 to 1.5"),
        (lambda path: Survival("a", [0, 1], [1, -0.5]), "survival of 'a'"),
        (lambda path: convergence([Curve("a", [2, 1], [1, 1], "bound")], path), "do not rise"),
        (lambda path: convergence([curve("a"), curve("a")], path), "two lines are called 'a'"),
        (lambda path: quality_diversity([TRADEOFFS[0], TRADEOFFS[0]], path), "two lines are called"),
        (lambda path: speed([Curve("a", [0, 1], [1, 1], "bound")], path), "logarithmic"),
        (lambda path: scaling([Curve("a", [1, 2], [0, 1], "bound")], path), "logarithmic"),
        (
            lambda path: convergence(CURVES, path.with_suffix(".jpeg")),
            r"ends in '.jpeg'; a picture's name ends in .png",
        ),
        (lambda path: convergence(CURVES, path.with_suffix("")), "a picture's name ends in"),
    ],
)
def test_wrong_use_is_one_line_and_leaves_no_file(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        wrong(tmp_path / "picture.png")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
