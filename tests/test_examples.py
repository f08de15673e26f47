"""Every example runs from outside the package, at a few steps, and prints what it promises."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import MAX_LENGTH, corpus, trained_run

import diffusionbert as db

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "train_tiny.py": ["t = 1.00", "t = 0.00"],
    "custom_schedule.py": ["quadratic (bend = 0.5)", "linear", "perplexity per token", "seconds per sample"],
    "custom_sampler.py": ["exact", "random-order", "calls per sample", "random-order:per_call=2"],
    "custom_backbone.py": ["MixerForMaskedLM: ", "mixer", "bert", "nats per token [", ", p = "],
}


def run(example: str, *options: str, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / example), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", PROMISES)
def test_an_example_runs_and_leaves_nothing_behind(example, tmp_path):
    printed = run(example, "--steps=3", cwd=tmp_path)
    for promise in PROMISES[example]:
        assert promise in printed
    assert not list(tmp_path.iterdir())


CALLED = {"finetune_text_file.py", "infill.py", "score_corpus.py", "compare_samplers.py"}


def call(example: str, *arguments: object, **options: object) -> None:
    """Calls `main` of an example in this process, with a small model."""
    runpy.run_path(str(EXAMPLES / example))["main"](*arguments, **options)


@pytest.mark.slow
def test_a_model_is_finetuned_on_a_text_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "mine.txt"
    text.write_text(corpus().read_text(encoding="utf-8"), encoding="utf-8")
    call("finetune_text_file.py", text, tmp_path / "run", steps=4, start=str(trained_run()), max_length=MAX_LENGTH)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {step}" for step in range(5)] + ["before", "after"]
    assert all("nats per token" in line for line in lines[:5])
    assert db.load(tmp_path / "run").generate(length=8, steps=8, seed=0)


def test_blanks_are_filled_and_ranked(capsys):
    call("infill.py", trained_run(), "the king [MASK] a [MASK] today .", "the king [BLANK] the sea today .")
    best, *lines = capsys.readouterr().out.splitlines()
    assert best.startswith("the king ")
    assert best.endswith(" today .")
    ranked = [float(line.split()[0]) for line in lines[1:4]]
    assert ranked == sorted(ranked)
    [without] = [line for line in lines if line.startswith("without")]
    assert without.split("'")[1] == best.split()[2] != without.split(": ")[1].split()[2]
    assert [line.partition(":")[0] for line in lines[-2:]] == ["blank 1", "blank 2"]


def test_a_corpus_is_scored_and_its_sentences_ranked(tmp_path, capsys):
    text = tmp_path / "test.txt"
    text.write_text("the king saw a river today .\n\nriver the . saw today a king\n", encoding="utf-8")
    call("score_corpus.py", text, trained_run(), num_shown=1)
    total, _, least, _, most = capsys.readouterr().out.splitlines()
    assert total.startswith("2 sentences: ")
    assert "bits per byte (bound" in total
    assert "river the" in least
    assert "the king saw" in most


def test_samplers_are_compared_at_equal_steps(capsys):
    samplers = ("exact", "confidence")
    call("compare_samplers.py", trained_run(), corpus(), samplers=samplers, steps=4, samples=8, length=8)
    printed = capsys.readouterr().out
    for promise in (*samplers, "BLEU-4", "self-BLEU", "calls per sample"):
        assert promise in printed


def test_all_examples_are_run():
    # By `make demo`, in test_documentation.py and in test_pairs.py.
    elsewhere = {"demo.py", "sentence_forming.py", "passive_pairs.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} - elsewhere == set(PROMISES) | CALLED
