"""The bench at a tiny size: what is run and how often, and how it is reported. No time is asserted."""

from __future__ import annotations

import json

import pytest

from diffusionbert.cli.main import main
from diffusionbert.workflows import bench

TINY = bench.Work(1, 16, 2, 0.0, 60, sequences=4, length=12, ema=0.9)


@pytest.fixture
def counted(monkeypatch):
    """One tiny row, and the number of steps of each program."""
    steps: dict[str, int] = {"ours": 0, "reference": 0}
    for name, function in (("ours", bench.our_step), ("reference", bench.reference_step)):

        def made(*arguments, name=name, function=function):
            step, backbone = function(*arguments)

            def counted_step():
                steps[name] += 1
                step()

            return counted_step, backbone

        monkeypatch.setattr(bench, function.__name__, made)
    monkeypatch.setattr(bench, "ROWS", (bench.Row("train-tiny", TINY, TINY), bench.ROWS[0]))
    monkeypatch.setattr(bench.Row, "on_cpu", lambda row: row if row.ours is TINY else None)
    monkeypatch.setattr(bench, "SECONDS_PER_TURN", 0.0)
    return steps


def test_both_programs_take_turns_equally_often(counted):
    result = bench.bench(device="cpu", rounds=3)
    (row,) = result.rows
    # Five to warm up, one to count, then per round one before the clock starts and one that is timed.
    assert counted == {"ours": 5 + 1 + 3 * 2, "reference": 5 + 1 + 3 * 2}
    assert row.ratio == row.ours.tokens_per_second / row.reference.tokens_per_second
    assert row.ours.memory_gib is None
    assert list(result.skipped) == ["train-base"]
    assert "train-tiny" in result.table()


def test_the_command_prints_one_json_object(counted, capsys):
    main(["bench", "--json", "--rounds", "1", "--device", "cpu", "--only", "train-tiny"])
    plain = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plain["rows"]] == ["train-tiny"]
    assert plain["rows"][0]["ours"]["work"] == "BERT 1×16, 4 × 12, linear"


def test_a_bench_without_rounds_is_refused_before_any_work(counted, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--rounds", "0"])
    assert "--rounds must be >= 1, got 0" in capsys.readouterr().err
    assert set(counted.values()) == {0}


def test_an_unknown_row_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--only", "train-nothing"])
    assert "--only must name rows (train-base" in capsys.readouterr().err
