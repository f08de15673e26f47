"""The figures of docs/adapting.md are those of its benchmark, and its samples are unselected."""

from __future__ import annotations

import sys
from pathlib import Path

import adapting
import pytest
from tiny_models import run_of, toy_sentences

from diffusionbert.storage.files import read_json
from diffusionbert.workflows import adapt as workflow
from diffusionbert.workflows import generic_text

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_has_the_table_and_all_samples():
    rows = read_json(DOCS / "adapting" / "news.json")
    assert {200, 2000, 20_000} <= {row["lines"] for row in rows}
    assert adapting.table(rows) in (DOCS / "adapting.md").read_text(encoding="utf-8")
    assert adapting.samples(rows) == (DOCS / "adapting" / "news.txt").read_text(encoding="utf-8")
    assert all(len(row["report"][f"samples_{when}"]) == 10 for row in rows for when in ("before", "after"))


@pytest.mark.slow
def test_a_row_replaces_the_one_of_the_same_settings(tmp_path, monkeypatch, capsys):
    def few_texts(engine, cache, *, seed):
        return generic_text.generic_texts(engine, cache, number=8, seed=seed)

    monkeypatch.setattr(workflow, "generic_texts", few_texts)
    monkeypatch.setattr(workflow, "default_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(workflow, "MAX_EPOCHS", 1)
    text, output = tmp_path / "text.txt", tmp_path / "rows.json"
    text.write_text("\n".join(toy_sentences(40, seed=3)) + "\n", encoding="utf-8")
    arguments = [str(text), str(output), "--model", str(run_of("linear")), "--name", "toy", "--lines"]
    for lines in (["20", "40"], ["40"], []):
        monkeypatch.setattr(sys, "argv", ["adapting.py", *arguments, *lines])
        adapting.main()
    rows = read_json(output)
    assert [row["lines"] for row in rows] == [20, 40]
    assert capsys.readouterr().out.endswith(adapting.table(rows) + "\n")
    assert (tmp_path / "rows.txt").read_text(encoding="utf-8") == adapting.samples(rows)
