"""The benchmark of sampling settings: what is planned, what is not generated again, and what is on the frontier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sampling_frontier import FROM_NOTHING, TASKS, draw, equal_row, is_on_frontier, planned, settings_of, shown

from diffusionbert.storage.files import read_json

ROOT = Path(__file__).parents[2]


def row(key: tuple[str, ...], perplexity: float = 50.0, entropy: float = 5.0) -> dict[str, Any]:
    figures = {"perplexity": perplexity, "ci95": (perplexity - 5, perplexity + 5), "entropy_of_all_words": entropy}
    return dict(zip(("model", "task", "sampler", "warper"), key, strict=True)) | figures | {"calls": 20.0}


def test_every_planned_row_is_unique_and_has_settings():
    keys = list(planned("mine", ["other"], list(TASKS)))
    assert len({*keys}) == len(keys)
    assert all(settings_of(sampler, warper) for model, _, sampler, warper in keys if model != "real")
    varied = {settings_of(*key[2:]).get("temperature") for key in keys if key[1] == "temperature"}
    assert len(varied) > 2


def test_equal_settings_of_tasks_that_generate_from_nothing_are_not_generated_again():
    done = [row(("mine", "generate", "exact", "top-p 0.5")), row(("mine", "20 tokens", "exact", "top-p 0.7"))]
    for sampler in ("exact, temperature 1.0", "exact, 128 steps"):
        assert equal_row(("mine", "steps", sampler, "top-p 0.5"), done) is done[0]
    assert equal_row(("mine", "steps", "exact, 64 steps", "top-p 0.5"), done) is None
    assert equal_row(("mine", "temperature", "exact, temperature 1.0", "top-p 0.7"), done) is None
    assert equal_row(("other", "steps", "exact, 128 steps", "top-p 0.5"), done) is None
    assert equal_row(("mine", "rewrite", "exact", "top-p 0.5"), done) is None


def test_generating_from_nothing_is_one_frontier():
    best = row(("mine", "generate", "exact", "top-p 0.5"), perplexity=40.0, entropy=5.2)
    worse = row(("mine", "steps", "exact, 4 steps", "top-p 0.5"), perplexity=90.0, entropy=5.1)
    elsewhere = row(("mine", "rewrite", "exact", "top-p 0.5"), perplexity=95.0, entropy=5.0)
    found = [one for one in (best, worse, elsewhere) if is_on_frontier(one, [best, worse, elsewhere])]
    assert found == [best, elsewhere]


@pytest.mark.parametrize("name", ["adapting", "bundled_model"])
def test_no_sentence_of_a_corpus_is_published(name):
    texts = [str(number) for number in range(50)]
    assert shown("real", texts) == shown("rewrite", texts) == []
    assert shown("generate", texts) == texts[:10]
    rows = read_json(ROOT / "docs" / name / "frontier.json")
    assert all(one["texts"] == shown(one["task"], one["texts"]) for one in rows)


@pytest.mark.slow
def test_every_task_is_drawn(tmp_path):
    rows = [row(key, 40.0 + i, 5.0 + i / 100) for i, key in enumerate(planned("mine", ["other"], list(FROM_NOTHING)))]
    draw(rows, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
