"""Commands in two processes (gloo, CPU) print, write and return what they do in one."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_models import corpus, run_of
from tiny_tokenizers import gpt2_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from diffusionbert.parallel import Launch, _Outcome, current, join, launch, leave

pytestmark = pytest.mark.xdist_group("parallel")  # or every worker would start the processes
WORKER = Path(__file__).parent / "parallel_worker.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def called(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> tuple[Path, Path]:
    """The folders that one process and two have written."""
    folder = tmp_path_factory.mktemp("parallel")
    tokenizer = gpt2_tokenizer()
    tokenizer.save_pretrained(folder / "judge")
    size = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(size).save_pretrained(folder / "judge")
    for name, launcher in (("one", [sys.executable]), ("two", TORCHRUN)):
        arguments = [folder / name, corpus(), run_of("linear"), folder / "judge"]
        done = called([*launcher, str(WORKER), *map(str, arguments)])
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "one", folder / "two"


PRINTED = ("generate", "prompts", "score", "ordered", "paired", "rewrite", "info", "missing")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_the_main_process_prints_what_one_prints(outputs, name):
    one, two = outputs
    assert (two / f"{name}-0.txt").read_text() == (one / f"{name}-0.txt").read_text()
    assert (two / f"{name}-1.txt").read_text() == ""


@pytest.mark.slow
def test_all_texts_are_there(outputs):
    _, two = outputs
    texts = [json.loads(line)["text"] for line in (two / "generate-0.txt").read_text().splitlines()]
    assert len(texts) == len(set(texts)) == 7
    assert len((two / "rewrite-0.txt").read_text().splitlines()) == 11


@pytest.mark.slow
def test_lines_of_a_file_keep_their_order_and_their_total(outputs):
    one, two = outputs
    assert (two / "score.jsonl").read_text() == (one / "score.jsonl").read_text()
    *rows, total = map(json.loads, (two / "score.jsonl").read_text().splitlines())
    assert [row["line"] for row in rows] == list(range(1, 12))
    assert "must not contain" in rows[6]["error"]
    assert total["total"]["num_texts"] == 9
    assert (two / "resumed.jsonl").read_text() == (two / "score.jsonl").read_text()


@pytest.mark.slow
def test_a_random_seed_is_one_for_all_processes(outputs):
    _, two = outputs
    rows = map(json.loads, (two / "seedless.jsonl").read_text().splitlines())
    assert len({row["seed"] for row in rows if "seed" in row and row["text"]}) == 1


@pytest.mark.slow
def test_every_process_has_the_exit_code_of_one(outputs):
    one, two = outputs
    codes = json.loads((one / "codes-0.json").read_text())
    assert codes == {
        name: {"score": 1, "interrupted": 130, "resumed": 1, "rewrite": 1, "missing": 2}.get(name, "seedless" in name)
        for name in codes
    }
    assert [json.loads((two / f"codes-{index}.json").read_text()) for index in range(2)] == [codes, codes]


@pytest.mark.slow
def test_an_evaluation_has_the_same_scores_samples_and_figures(outputs):
    one, two = (output / "evaluation" for output in outputs)
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert (two / "scores.safetensors").read_bytes() == (one / "scores.safetensors").read_bytes()
    assert len(load_file(two / "scores.safetensors")["example"]) == 30
    mine, theirs = (json.loads((folder / "evaluation.json").read_text()) for folder in (two, one))
    assert mine["generation"].pop("speed")["device"] == f"2 × {theirs['generation'].pop('speed')['device']}"
    assert mine == theirs
    assert mine["generation"]["judge"]["samples"]["num_tokens"] > 0


@pytest.mark.slow
def test_a_reproduction_trains_and_evaluates_in_all_processes(outputs):
    """Training adds up gradients in another order, so that the figures of its model are equal up to rounding."""
    one, two = (output / "reproduction" for output in outputs)
    assert (two / "figure2.json").read_text() == (one / "figure2.json").read_text()
    assert (two / "figure2.png").read_bytes() == (one / "figure2.png").read_bytes()
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in (two, one)]
    assert files[0] == files[1]
    mine, theirs = (
        load_file(folder / "evaluations" / "diffusionbert-spindle" / "scores.safetensors") for folder in (two, one)
    )
    assert mine.keys() == theirs.keys()
    assert all(tensor.allclose(theirs[name], atol=1e-3) for name, tensor in mine.items() if "bleu" not in name)


@pytest.mark.slow
def test_a_corpus_is_encoded_once_and_alike(outputs):
    one, two = (output / "cache" for output in outputs)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, two)]
    assert names[0] == names[1]
    assert not [name for name in names[1] if "parts" in name]
    for file in (file for file in one.rglob("*") if file.is_file()):
        assert (two / file.relative_to(one)).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_what_fails_in_one_process_fails_in_all(outputs):
    _, two = outputs
    for index in range(2):
        assert json.loads((two / f"share-{index}.json").read_text()) == [0, 1, "3 is too much", 0]


@pytest.mark.slow
def test_an_error_of_all_processes_is_one_line():
    done = called([*TORCHRUN, "-m", "diffusionbert", "score", "--file", "missing.txt"])
    assert done.returncode == 1
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("diffusionbert:")]
    assert said == ["diffusionbert: 'missing.txt' cannot be read (No such file or directory); give texts, one per line"]


# ---- without a launcher ---------------------------------------------------------------------------------------------


def test_a_process_alone_shares_with_nobody():
    assert launch() == Launch(0, 1, 0)
    assert join() is current()
    assert list(current().share(iter("abc"), str.upper)) == ["A", "B", "C"]
    assert current().on_main(lambda: 5) == 5
    assert current().is_main
    leave()


def test_work_is_not_done_before_it_is_asked_for():
    seen: list[int] = []
    results = current().share(range(3), lambda number: seen.append(number) or number)
    assert next(results) == 0
    assert seen == [0]


def test_a_process_under_a_launcher_works_alone_until_it_joins(monkeypatch):
    values = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert launch() == Launch(3, 4, 1)
    assert current().number == 1
    monkeypatch.delenv("RANK")  # as on clusters that set some of them
    assert launch() == Launch()


class UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_that_cannot_be_sent_become_their_message():
    copies = [pickle.loads(pickle.dumps(_Outcome(error=error))) for error in (ValueError("a"), UnsendableError(1, 2))]
    with pytest.raises(ValueError, match=r"^a$"):
        copies[0].result()
    with pytest.raises(RuntimeError, match=r"^UnsendableError: 1 and 2$"):
        copies[1].result()
