"""The model of the evaluation harness, on a local task and local JSON; skipped where the harness is not installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import model_of, toy_sentences, trained, trained_run

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'diffusionbert[lm-eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")

from diffusionbert.workflows.lm_eval import DiffusionBERT, main, register  # noqa: E402

DOCUMENT = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
[CHOICE] = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
ROLLING = """task: toy_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{whole}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
GENERATION = """task: toy_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def _tasks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "text": "the king saw the city of",
            "options": ["paris today .", "river monday ."],
            "label": 0,
            "whole": sentence,
            "answer": "paris",
        }
        for sentence in toy_sentences(4)
    ]
    file = tmp_path / "toy.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choice.yaml").write_text(CHOICE.replace("tasks/capitals.jsonl", str(file)))
    for name, task in (("rolling", ROLLING), ("generation", GENERATION)):
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file))


def request(*args):
    return SimpleNamespace(args=args, arguments=args)


def test_log_likelihoods_are_scores_with_their_kind():
    lm = DiffusionBERT(trained())
    whole = "the king saw a river today ."
    tokens = trained().score(whole, order="left-to-right", tokens=True).tokens
    [(log_p, _), (alone, _)] = lm.loglikelihood([request("the king saw a", " river today ."), request("", whole)])
    assert log_p == pytest.approx(-sum(nats for _, nats in tokens[4:]), abs=1e-4)
    assert alone == pytest.approx(-sum(nats for _, nats in tokens), abs=1e-4)
    assert lm.loglikelihood_rolling([request(whole), request("")]) == [pytest.approx(alone, abs=1e-4), 0.0]
    assert lm.get_model_info()["likelihood_kind"] == "exact"
    bound = DiffusionBERT(trained(), order="bound")
    assert bound.get_model_info()["likelihood_kind"] == "bound"
    assert bound.loglikelihood_rolling([request(whole)]) == [-trained().score(whole).nats]


def test_a_continuation_is_greedy_if_it_is_what_the_model_would_generate():
    lm = DiffusionBERT(trained())
    [text] = trained().generate("the king saw", max_new_tokens=1, top_k=1, capitalize=False, seed=0)
    best = text.removeprefix("the king saw")
    assert lm.loglikelihood([request("the king saw", best), request("the king saw", " monday")])[0][1]
    assert not lm.loglikelihood([request("the king saw", " monday")])[0][1]


def test_generation_stops_before_a_stop_text():
    lm = DiffusionBERT(trained())
    [free] = lm.generate_until([request("the king saw", {"max_gen_toks": 6})])
    [cut] = lm.generate_until([request("the king saw", {"max_gen_toks": 6, "until": [free.split()[1]]})])
    assert free.startswith(cut)
    assert len(cut.split()) == 1
    [long] = lm.generate_until([request(" ".join(["the king saw a river today ."] * 9), {"until": "\n"})])
    assert isinstance(long, str)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_of_the_harness_needs_no_gpu():
    assert DiffusionBERT(str(trained_run()), device="cuda:0").model.device.type == "cpu"


def test_other_models_are_refused():
    for kind in ("decoder", "pairs"):
        with pytest.raises(ValueError, match="is not a masked language model of single texts"):
            DiffusionBERT(model_of(kind))


@pytest.mark.slow
@pytest.mark.usefixtures("_tasks")
def test_the_harness_runs_local_tasks(tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    register()
    found = lm_eval.simple_evaluate(
        model="diffusionbert",
        model_args={"pretrained": str(trained_run())},
        tasks=["capitals", "toy_rolling", "toy_generation"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["config"]["likelihood_kind"] == "exact"
    assert found["results"]["capitals"]["acc,none"] == 1.0
    assert found["results"]["toy_rolling"]["word_perplexity,none"] > 1
    assert "exact_match,none" in found["results"]["toy_generation"]


@pytest.mark.slow
@pytest.mark.usefixtures("_tasks")
def test_a_missing_model_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    arguments = "run --model diffusionbert --model_args pretrained=./missing --tasks capitals --include_path"
    monkeypatch.setattr(sys, "argv", ["diffusionbert-lm-eval", *arguments.split(), str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("diffusionbert-lm-eval: no model at './missing'")


@pytest.mark.slow
def test_the_command_knows_the_model():
    code = (
        "from lm_eval.api.registry import get_model\nimport lm_eval.__main__ as command\n"
        "command.cli_evaluate = lambda: print(get_model('diffusionbert').__name__)\n"
        "from diffusionbert.workflows.lm_eval import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "DiffusionBERT"
    assert Path(trained_run()).exists()
