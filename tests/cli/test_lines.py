"""One result per line, as they come; bad lines, stopped commands and formats."""

import csv
import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from diffusionbert.cli import lines
from diffusionbert.cli.lines import SavedState, TextOptions, read_lines, run_lines


class Shouting:
    """Answers each text in upper case, twice; refuses texts with a digit."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.batches: list[list[str]] = []
        self.stop_at = stop_at

    def __call__(self, texts: list[str]) -> list[list[dict[str, Any]]]:
        self.batches.append(texts)
        if self.stop_at in texts:
            raise KeyboardInterrupt
        for text in texts:
            if any(character.isdigit() for character in text):
                raise ValueError(f"{text[:40]!r} has a digit; leave it out")
        return [[{"text": text.upper(), "nats": [len(text), 0.5]}] for text in texts]


def run(options: TextOptions, answer: Any, texts: Sequence[str] = (), **changed: Any) -> None:
    run_lines(
        options,
        texts,
        lambda: answer,
        what="texts",
        columns=["text", "nats"],
        show=lambda row: row["text"],
        settings={"model": "tiny"},
        **changed,
    )


def test_output_lines_up_with_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").write_bytes("\ufeffa  b \n\n c\tä🍕\r\nlast".encode())
    run(TextOptions(file=tmp_path / "in"), Shouting())
    assert capsys.readouterr().out == "A  B \n\n C\tÄ🍕\nLAST\n"


def test_a_bad_line_is_reported_with_its_number_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "in").write_bytes(b"a\nb\nc3\n\xff\xfe\nd\n" + b"x" * 500_000 + b"\ne\n")
    with pytest.raises(RuntimeError, match=r"^3 of 7 lines failed; their results are empty$"):
        run(TextOptions(file=tmp_path / "in"), Shouting())
    assert capsys.readouterr().out == "A\nB\n\n\nD\n\nE\n"
    assert [record.getMessage() for record in caplog.records] == [
        "line 3: 'c3' has a digit; leave it out",
        "line 4: not UTF-8 (invalid start byte); convert the file",
        "line 6: more than 100000 characters; split it",
    ]


def test_a_bad_argument_is_an_error_of_use():
    with pytest.raises(ValueError, match="'b2' has a digit"):
        run(TextOptions(), Shouting(), ["a", "b2"])


def test_texts_share_calls_in_growing_chunks(tmp_path: Path):
    (tmp_path / "in").write_text("".join(f"{'x' * number}\n" for number in range(1, 101)))
    answer = Shouting()
    run(TextOptions(file=tmp_path / "in", output=tmp_path / "out"), answer)
    assert max(map(len, answer.batches)) <= lines.MOST_AT_ONCE
    assert len(answer.batches[0]) == 1
    assert [text for batch in answer.batches for text in batch] == ["x" * number for number in range(1, 101)]


def test_json_lines_have_input_line_and_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").write_text("a\n\n7\n")
    with pytest.raises(RuntimeError):
        run(TextOptions(file=tmp_path / "in", json=True), Shouting())
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"line": 1, "input": "a", "rank": 1, "text": "A", "nats": [1, 0.5]},
        {"line": 2, "input": ""},
        {"line": 3, "input": "7", "error": "'7' has a digit; leave it out"},
    ]


def test_csv_has_one_row_per_result_and_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").write_text('a, "b"\n\n')
    run(TextOptions(file=tmp_path / "in", format="csv"), Shouting())
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert first == {"line": "1", "input": 'a, "b"', "rank": "1", "text": 'A, "B"', "nats": "[6, 0.5]", "error": ""}
    assert second["line"] == "2"
    assert second["text"] == ""


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_a_stopped_command_goes_on_where_it_was(tmp_path: Path, form: str):
    (tmp_path / "in").write_text("".join(f"{'x' * number}\n" for number in range(1, 41)))
    whole = TextOptions(file=tmp_path / "in", format=form, output=tmp_path / "whole")  # type: ignore[arg-type]
    run(whole, Shouting())
    options = TextOptions(file=tmp_path / "in", format=form, output=tmp_path / "out")  # type: ignore[arg-type]
    state = SavedState()
    with pytest.raises(KeyboardInterrupt):
        run(options, Shouting(stop_at="x" * 20), state=state)
    with (tmp_path / "out").open("a") as file:
        file.write("half a li")  # what a killed process leaves
    assert 1 <= state["lines"] < 20
    again, after = Shouting(), SavedState()
    run(options, again, state=after)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sum(map(len, again.batches)) == 40 - state["lines"]
    assert after["lines"] == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_an_output_is_continued_only_with_the_same_options_and_texts(tmp_path: Path):
    (tmp_path / "in").write_text("a\nb\nc\nd\n")
    options = TextOptions(file=tmp_path / "in", output=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(options, Shouting(stop_at="d"))
    with pytest.raises(ValueError, match="begun with other options"):
        run(TextOptions(file=tmp_path / "in", output=tmp_path / "out", format="csv"), Shouting())
    (tmp_path / "in").write_text("b\nb\nc\nd\n")
    with pytest.raises(ValueError, match="already answered in --output have changed"):
        run(options, Shouting())
    (tmp_path / "in").write_text("a\nb\nc\nd\n")
    run(options, Shouting())
    with pytest.raises(ValueError, match=r"out' exists; delete it, or give another name"):
        run(options, Shouting())


def test_an_output_that_lost_results_is_not_continued(tmp_path: Path):
    (tmp_path / "in").write_text("".join(f"{'x' * number}\n" for number in range(1, 41)))
    options = TextOptions(file=tmp_path / "in", output=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(options, Shouting(stop_at="x" * 20))
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:5])
    with pytest.raises(ValueError, match=r"has 5 bytes, but \d+ were written; .* delete it and 'out.progress'"):
        run(options, Shouting())
    assert (tmp_path / "out").read_bytes() == whole[:5]


def test_csv_quotes_carriage_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").write_bytes(b"one\rtwo\nthree\n")
    run(TextOptions(file=tmp_path / "in", format="csv"), Shouting())
    printed = capsys.readouterr().out
    assert [row["line"] for row in csv.DictReader(io.StringIO(printed, newline=""))] == ["1", "2"]
    assert "\r\n" not in printed


def test_a_command_stopped_at_its_first_line_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "in").write_text("a\nb\n")
    options = TextOptions(file=tmp_path / "in", format="csv", output=tmp_path / "out")
    with caplog.at_level("INFO", "diffusionbert"), pytest.raises(KeyboardInterrupt):
        run(options, Shouting(stop_at="a"))
    assert f"stopped after line 0; the same command continues {str(tmp_path / 'out')!r}" in caplog.messages
    run(options, Shouting())
    rows = csv.DictReader(io.StringIO((tmp_path / "out").read_text()))
    assert [row["text"] for row in rows] == ["A", "B"]


def test_a_random_seed_stays_the_same_when_a_command_is_continued(tmp_path: Path):
    (tmp_path / "in").write_text("a\nb\nc\n")
    options = TextOptions(file=tmp_path / "in", output=tmp_path / "out")

    def seeded(state: SavedState, stop_at: str | None = None) -> Any:
        shout = Shouting(stop_at)
        return lambda texts: [[{"text": f"{row['text']} {state.seed(None)}"} for row in rows] for rows in shout(texts)]

    for stop_at in ("b", None):
        state = SavedState()
        with pytest.raises(KeyboardInterrupt) if stop_at else nullcontext():
            run(options, seeded(state, stop_at), state=state)
    shown = (tmp_path / "out").read_text().split()
    assert shown[::2] == ["A", "B", "C"]
    assert len(set(shown[1::2])) == 1
    assert SavedState().seed(None) != SavedState().seed(None)
    assert SavedState().seed(7) == 7


def test_a_folder_is_no_output(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a folder; give the name of a file in it"):
        run(TextOptions(output=tmp_path), Shouting(), ["a"])


def test_damaged_progress_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "in").write_text("a\nb\n")
    (tmp_path / "out").write_text("A\n")
    (tmp_path / "out.progress").write_text('{"lines": 1}')
    with pytest.raises(ValueError, match=r"out.progress' is damaged \('settings'\); delete it and --output"):
        run(TextOptions(file=tmp_path / "in", output=tmp_path / "out"), Shouting())


def test_a_summary_follows_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").write_text("a\n")
    run(TextOptions(file=tmp_path / "in", json=True), Shouting(), summary=lambda: ("one text", {"total": 1}))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"total": 1}


def test_a_summary_of_csv_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "in").write_text("a\n")
    with caplog.at_level("INFO", "diffusionbert"):
        run(TextOptions(file=tmp_path / "in", format="csv"), Shouting(), summary=lambda: ("one text", {"total": 1}))
    assert caplog.messages == ["one text"]


def test_results_come_before_the_next_line_is_given(tmp_path: Path):
    program = textwrap.dedent(
        """
        from pathlib import Path
        from diffusionbert.cli.lines import TextOptions, run_lines
        run_lines(TextOptions(file=Path("-")), [], lambda: lambda texts: [[{"text": text.upper()}] for text in texts],
                  what="texts", columns=["text"], show=lambda row: row["text"], settings={})
        """
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("a", "b", "c"):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{text.upper()}\n"
        process.stdin.close()
        assert process.wait() == 0


def test_what_is_missing_or_doubled_is_an_error_of_use(tmp_path: Path):
    with pytest.raises(ValueError, match="no text given; give texts in quotes, or --file NAME"):
        run(TextOptions(), Shouting())
    with pytest.raises(ValueError, match="both as arguments and by --file"):
        run(TextOptions(file=tmp_path / "in"), Shouting(), ["a"])
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty' is empty; give texts, one per line"):
        run(TextOptions(file=tmp_path / "empty"), Shouting())
    for name in ("missing", "."):
        with pytest.raises(ValueError, match=r"cannot be read \(.+\); give texts, one per line"):
            run(TextOptions(file=tmp_path / name), Shouting())


def test_lines_of_samples_are_read_whole(tmp_path: Path):
    (tmp_path / "in").write_text(" a \n\nb\n")
    assert read_lines(tmp_path / "in", "samples") == ["a", "b"]
    (tmp_path / "in").write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match=r"line 2 of .*in': not UTF-8"):
        read_lines(tmp_path / "in", "samples")
    (tmp_path / "in").write_text("\n")
    with pytest.raises(ValueError, match="is empty; give samples, one per line"):
        read_lines(tmp_path / "in", "samples")
