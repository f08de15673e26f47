"""Table 1: which states it shows, what is marked as new, and its three formats."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from diffusionbert.inference.tasks import StreamState
from diffusionbert.reproduce.denoising import MASKED, Row, choose_states, denoising_table, to_latex, to_markdown


def moment(time: float, pieces: str, calls: int = 0) -> StreamState:
    """A state from a line, in which · is a masked position."""
    shown = tuple(None if piece == "·" else piece for piece in pieces.split())
    return StreamState(time, calls, shown, " ".join(piece for piece in shown if piece))


STATES = [
    moment(1.0, "· · · ·", 0),
    moment(0.9, "· · · .", 1),
    moment(0.5, "the · · .", 2),
    moment(0.3, "the dog · .", 3),
    moment(0.0, "the dog barks .", 4),
]


def shown(rows: list[Row]) -> list[str]:
    return [" ".join("*" * word["is_new"] + word["text"] for word in row["words"]) for row in rows]


# ---- which states ---------------------------------------------------------------------------------------------------


def test_a_state_lasts_until_the_next_and_times_are_even():
    chosen = choose_states(STATES, 5)
    assert [time for time, _ in chosen] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [state.calls for _, state in chosen] == [0, 1, 2, 3, 4]
    # At 0.6 and 0.4: what was written at 0.9, and at 0.5.
    assert [state.calls for _, state in choose_states(STATES, 6)] == [0, 1, 1, 2, 3, 4]
    assert [state.calls for _, state in choose_states(STATES, 2)] == [0, 4]


def test_times_that_differ_by_rounding_are_the_same():
    steps = 10
    states = [moment(sum([0.1] * (steps - at), start=0.0), "·" if at < steps else "a", at) for at in range(steps + 1)]
    assert [state.calls for _, state in choose_states(states, steps + 1)] == list(range(steps + 1))


def test_the_first_and_the_last_state_are_shown_even_if_others_share_their_times():
    states = [moment(1.0, "· ·", 0), moment(1.0, "a ·", 1), moment(0.0, "a b", 2), moment(0.0, "a c", 3)]
    assert [state.calls for _, state in choose_states(states, 2)] == [0, 3]
    assert [state.calls for _, state in choose_states(states, 3)] == [0, 1, 3]


def test_times_are_even_for_a_start_below_one():
    states = [moment(0.4, "a ·", 0), moment(0.1, "a b", 1), moment(0.0, "a b", 2)]
    assert [time for time, _ in choose_states(states, 3)] == [0.4, 0.2, 0.0]
    assert [state.calls for _, state in choose_states(states, 3)] == [0, 0, 2]


@pytest.mark.parametrize("times", [(0.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.5, 0.7, 0.2, 0.0)])
def test_states_are_even_by_index_if_times_do_not_decrease(times):
    states = [replace(state, time=time) for state, time in zip(STATES, times, strict=True)]
    chosen = choose_states(states, 3)
    assert [state.calls for _, state in chosen] == [0, 2, 4]
    assert [time for time, _ in chosen] == [times[0], times[2], times[4]]
    assert len(choose_states(states, 50)) == 5


def test_one_state_is_one_row():
    assert choose_states(STATES[-1:], 5) == [(0.0, STATES[-1])]


# ---- what is new ----------------------------------------------------------------------------------------------------


def test_tokens_since_the_row_above_are_new():
    rows = denoising_table({"a": STATES}, 3)
    mask = MASKED
    assert shown(rows) == [f"{mask} {mask} {mask} {mask}", f"*the {mask} {mask} *.", "the *dog *barks ."]


def test_each_system_starts_without_new_words():
    prompted = [moment(1.0, "a ·"), moment(0.0, "a b")]
    rows = denoising_table({"one": STATES, "two": prompted}, 2)
    assert [row["system"] for row in rows] == ["one", "one", "two", "two"]
    assert shown(rows)[2:] == [f"a {MASKED}", "a *b"]


def test_changed_words_are_new_and_remasked_ones_masked():
    states = [moment(1.0, "x y"), moment(0.5, "z ·"), moment(0.0, "z y")]
    assert shown(denoising_table({"a": states}, 3)) == ["x y", f"*z {MASKED}", "z *y"]


def test_pieces_are_joined_and_a_word_with_a_new_piece_is_new():
    states = [moment(1.0, "· · · ·"), moment(0.5, "play · · ##s"), moment(0.0, "play ##ing dog ##s")]
    expected = [" ".join([MASKED] * 4), f"*play {MASKED} {MASKED} *##s", "*playing *dogs"]
    assert shown(denoising_table({"a": states}, 3)) == expected
    assert shown(denoising_table({"a": [moment(0.0, "##ing a")]})) == ["##ing a"]


def test_growing_texts_are_compared_by_position():
    states = [moment(1.0, ""), moment(0.5, "a"), moment(0.0, "a b")]
    assert shown(denoising_table({"a": states}, 3)) == ["", "*a", "a *b"]


# ---- formats --------------------------------------------------------------------------------------------------------

NASTY = denoising_table(
    {"D3PM & co_1": [moment(1.0, "· · · ·", 0), moment(0.0, "a_b | 5% $", 1)], "x|y": [moment(0.0, "<b> \\ {", 12)]}, 2
)


def test_markdown_escapes_words():
    lines = to_markdown(NASTY).splitlines()
    assert lines[:2] == ["| system | t | calls | text |", "|---|---:|---:|---|"]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in lines)
    assert lines[2] == r"| D3PM & co\_1 | 1.00 | 0 | \[MASK\] \[MASK\] \[MASK\] \[MASK\] |"
    assert lines[3] == r"|  | 0.00 | 1 | **a\_b \| 5% $** |"
    assert lines[4] == r"| x\|y | 0.00 | 12 | \<b\> \\ { |"


def test_adjacent_new_words_share_a_mark():
    text = to_markdown(denoising_table({"a": STATES}, 3))
    assert r"| **the** \[MASK\] \[MASK\] **.** |" in text
    assert "| the **dog barks** . |" in text


def test_latex_escapes_balances_and_spans_rows():
    text = to_latex(NASTY)
    assert r"\multirow{2}{*}{D3PM \& co\_1} & 1.00 & 0 & \texttt{[MASK] [MASK] [MASK] [MASK]} \\" in text
    assert r" & 0.00 & 1 & \texttt{\textbf{a\_b \textbar{} 5\% \$}} \\" in text
    assert r"\multirow{1}{*}{x\textbar{}y}" in text
    assert text.count(r"\midrule") == 2
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert text.startswith("% needs \\usepackage{booktabs,multirow}\n\\begin{tabular}{lrrl}\n\\toprule\n")
    assert text.endswith("\\bottomrule\n\\end{tabular}\n")


@pytest.mark.parametrize("form", [to_markdown, to_latex])
def test_words_contain_no_line_breaks_or_control_characters(form):
    states = [StreamState(1.0, 0, (None, None, None), ""), StreamState(0.0, 1, ("a\nb", "\x1b[31m", "\n"), "")]
    tame = [StreamState(1.0, 0, (None, None, None), ""), StreamState(0.0, 1, ("a b", "[31m"), "")]
    hostile = form(denoising_table({"x\ny": states}, 2))
    assert "\x1b" not in hostile
    assert hostile.splitlines()[-1:] == form(denoising_table({"x y": tame}, 2)).splitlines()[-1:]


def test_rows_are_plain_json():
    rows = denoising_table({"a": STATES}, 2)
    assert json.loads(json.dumps(rows)) == rows
    words = [{"text": text, "is_new": True} for text in ("the", "dog", "barks", ".")]
    assert rows[1] == {"system": "a", "time": 0.0, "calls": 4, "words": words}
