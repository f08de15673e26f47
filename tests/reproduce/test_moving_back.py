"""The benchmark behind `adapt`: at share 0 the model is the start, at 1 the trained one, with a row for each share."""

from __future__ import annotations

import sys

import moving_back
import pytest
import torch
from shared import encoding_cache
from tiny_models import run_of, toy_sentences

from diffusionbert.inference.engine import load_engine
from diffusionbert.storage.files import read_json
from diffusionbert.workflows import generic_text


def test_weights_lie_between_the_start_and_the_trained_ones():
    start, engine = (load_engine(run_of("linear")) for _ in range(2))
    first = {name: weight.detach().clone() for name, weight in start.module().named_parameters()}
    trained = {name: weight + 1 for name, weight in first.items()}
    for share in (1.0, 0.25, 0.0):
        moving_back.move(engine, start, trained, share)
        for name, weight in engine.module().named_parameters():
            torch.testing.assert_close(weight.detach(), first[name] + share)


@pytest.mark.slow
def test_each_learning_rate_and_share_has_a_row_with_every_text(tmp_path, monkeypatch, capsys):
    for name, seed in (("own", 3), ("other", 4), ("real", 5)):
        (tmp_path / f"{name}.txt").write_text("\n".join(toy_sentences(60, seed)) + "\n", encoding="utf-8")
    monkeypatch.setattr(moving_back, "default_cache", encoding_cache)
    monkeypatch.setattr(
        moving_back, "generic_texts", lambda engine, cache: generic_text.generic_texts(engine, cache, number=8)
    )
    files = [str(tmp_path / name) for name in ("own.txt", "rows.json", "other.txt", "real.txt")]
    text, output, domain, real = files
    arguments = [text, output, "--domain", domain, "--real", real, "--model", str(run_of("linear")), "--steps", "4"]
    arguments += ["--rates", "1e-2", "--shares", "1", "0", "--sentences", "8", "--precision", "no"]
    monkeypatch.setattr(sys, "argv", ["moving_back.py", *arguments])
    moving_back.main()
    whole, none = read_json(tmp_path / "rows.json")
    assert (whole["share"], none["share"], whole["learning_rate"]) == (1.0, 0.0, 1e-2)
    assert list(whole["changes"]) == ["domain", "samples", "real.txt"]
    assert whole["changes"]["domain"]["difference"] < 0
    assert all(one["difference"] == pytest.approx(0, abs=1e-6) for one in none["changes"].values())
    assert capsys.readouterr().out.count("share") == 2
