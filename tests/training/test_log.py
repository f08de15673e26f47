"""The log of a run: typed rows, readable line by line, those of earlier versions included."""

from __future__ import annotations

import json

import pytest
from shared import encoding_cache

from diffusionbert.cli.main import main
from diffusionbert.objectives.base import Likelihood
from diffusionbert.training.log import (
    LOG_FORMAT,
    RunEvent,
    TrainEvent,
    ValidationEvent,
    append,
    events_of,
    read_log,
    remove_after,
    row,
)

EVENTS = [
    RunEvent(0, 1.5, kind=Likelihood.BOUND, quantity="strict", schedule="linear", diffusion_steps=128, seed=3),
    ValidationEvent(0, 2.0, Likelihood.BOUND, 0.01, 5.0, 148.4),
    TrainEvent(10, 3.0, 4.5, 1e-3, 0.7, 900.0, 0, 4096),
    ValidationEvent(10, 4.0, Likelihood.NONE, 0.02, loss_per_token=2.5),
]


def test_rows_are_read_as_they_were_written(tmp_path):
    log = tmp_path / "log.jsonl"
    assert read_log(log) == []
    for event in EVENTS:
        append(log, event)
    assert read_log(log) == EVENTS
    assert events_of(log, TrainEvent) == [EVENTS[2]]
    plain = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in plain] == ["run", "validation", "train", "validation"]
    assert all({"event", "step", "time"} <= line.keys() for line in plain)
    assert (plain[0]["format"], plain[0]["unit"]) == (LOG_FORMAT, "nats per token")
    assert "nats_per_token" not in plain[3]  # a loss is not called nats
    assert row(EVENTS[1]) == plain[1]


def test_rows_of_format_1_are_converted(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [
        {"step": 0, "time": 1.0, "validation_nats_per_token": 3.0, "validation_perplexity_per_token": 20.1,
         "validation_standard_error": 0.04, "likelihood": "pseudo"},
        {"step": 250, "time": 2.0, "loss": 2.7, "learning_rate": 0.00025, "gradient_norm": 1.2,
         "tokens_per_second": 104914.0, "epoch": 0, "tokens": 3631964},
        {"step": 250, "time": 3.0, "validation_loss_per_token": 1.5, "validation_standard_error": 0.1,
         "likelihood": "none"},
    ]  # fmt: skip
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(log) == [
        ValidationEvent(0, 1.0, Likelihood.PSEUDO, 0.04, 3.0, 20.1),
        TrainEvent(250, 2.0, 2.7, 0.00025, 1.2, 104914.0, 0, 3631964),
        ValidationEvent(250, 3.0, Likelihood.NONE, 0.1, loss_per_token=1.5),
    ]


def test_incomplete_lines_and_unknown_events_are_ignored(tmp_path):
    log = tmp_path / "log.jsonl"
    append(log, EVENTS[2])
    log.write_text(log.read_text() + '{"event": "note", "step": 11}\n7\n{"step": 12}\n{"event": "train", "st')
    assert read_log(log) == [EVENTS[2]]
    log.write_text(json.dumps(row(EVENTS[2]) | {"a_later_field": 1}) + "\n")
    assert read_log(log) == [EVENTS[2]]


def test_an_invalid_row_is_named_by_its_line(tmp_path):
    log = tmp_path / "log.jsonl"
    append(log, EVENTS[1])
    log.write_text(log.read_text() + '{"event": "train", "step": 10, "time": 1.0, "loss": "low"}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2.loss must be a number, got 'low'"):
        read_log(log)


def test_rows_after_the_checkpoint_are_removed(tmp_path):
    log = tmp_path / "log.jsonl"
    for event in EVENTS:
        append(log, event)
    remove_after(log, 5)
    assert read_log(log) == EVENTS[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--diffusion-steps=16"],
         {"schedule": "linear", "diffusion_steps": 16, "kind": "bound", "quantity": "strict"}),
        (["--schedule=spindle", "--quantity=paper", "--time=layers"],
         {"kind": "pseudo", "quantity": "paper", "time_conditioning": "layers"}),
        (["--system=decoder"], {"kind": "exact", "quantity": "nll", "backbone": "gpt2"}),
    ],
    ids=["linear", "paper", "decoder"],
)  # fmt: skip
def test_the_first_row_describes_the_model(tmp_path, options, expected):
    small = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=600", "--max-length=48"]
    quick = ["--steps=2", "--validate-every=2", "--save-every=2", "--batch-tokens=512", "--seed=5"]
    output = tmp_path / "run"
    main(["train", "--data=pydoc", f"--output={output}", f"--cache={encoding_cache()}", *small, *quick, *options])
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["run", "validation", "validation"]
    first = lines[0]
    assert expected.items() <= first.items()
    assert (first["format"], first["unit"], first["seed"]) == (LOG_FORMAT, "nats per token", 5)
    assert first["parameters"] > 0
    assert first["start"] == "scratch"
    assert all(line["kind"] == first["kind"] for line in lines[1:])
