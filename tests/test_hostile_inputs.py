"""Hostile adapters, evaluations, logs, languages, plugins and settings: refused in one line, as model folders are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import FORMAT_1, targets
from hostile import attempt, edit_json, edit_tensors
from shared import encoding_cache
from test_hostile import refused
from tiny_models import run_of

from diffusionbert.cli.lines import Line, SavedState, _Progress

pytestmark = pytest.mark.slow
Damage = Callable[[Path], object]


def scored(folder: Path) -> list[str]:
    return ["score", "the king .", "--precision=1.0", "--json", f"--model={folder}", "--device=cpu"]


# ---- LoRA adapters --------------------------------------------------------------------------------------------------


def adapter_config(**values: object) -> Damage:
    return lambda folder: edit_json(folder / "adapter_config.json", lambda plain: plain.update(values))


def factors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda folder: edit_tensors(folder / "adapter_model.safetensors", change)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return factors(lambda tensors: tensors.update({name: change(value) for name, value in tensors.items()}))


def _without(side: str) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if side in name]:
            del tensors[name]

    return factors(change)


def _of_itself(folder: Path) -> None:
    adapter_config(base_model_name_or_path=str(folder))(folder)


ADAPTERS: dict[str, tuple[Damage, str]] = {
    "an α of 10⁴⁰⁰": (adapter_config(lora_alpha=10**400), "lora_alpha must be a number of 64 bits"),
    "an infinite α": (adapter_config(lora_alpha=float("inf")), "finite lora_alpha"),
    "an α beyond float32": (adapter_config(lora_alpha=1e308), "finite lora_alpha"),
    "a product that overflows": (each(lambda factor: torch.full_like(factor, 1e30)), "infinite"),
    "a rank that is a flag": (adapter_config(r=True), "r must be a whole number"),
    "another rank": (adapter_config(r=3), "must hold"),
    "another scale": (adapter_config(use_rslora=True), "'use_rslora', which is not supported"),
    "a scale per layer": (adapter_config(alpha_pattern={"query": 9}), "'alpha_pattern', which is not supported"),
    "trained biases": (adapter_config(bias="all"), "'bias', which is not supported"),
    "a changed start": (adapter_config(init_lora_weights="pissa"), "'init_lora_weights', which is not supported"),
    "itself as the start": (_of_itself, "is itself an adapter"),
    "no start": (adapter_config(base_model_name_or_path="/nowhere"), "no masked language model at '/nowhere'"),
    "integers": (each(lambda factor: factor.to(torch.int8)), "got .* of I8"),
    "NaN": (each(lambda factor: factor * torch.nan), "must hold finite"),
    "half of the factors": (_without("lora_A"), "does not fit"),
    "no factors": (_without("lora"), "holds no factors"),
    "more than factors": (factors(lambda tensors: tensors.update(classifier=torch.ones(3))), "does not fit"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_hostile_adapter_is_refused(name, tmp_path):
    damage, message = ADAPTERS[name]
    shutil.copytree(targets()["adapter"][0], tmp_path / "adapter")
    damage(tmp_path / "adapter")
    refused(attempt(scored(tmp_path / "adapter")), message)


def test_an_adapter_of_peft_opens(tmp_path):
    """With all the settings that PEFT writes down."""
    peft = pytest.importorskip("peft")
    shutil.copytree(targets()["adapter"][0], tmp_path / "adapter")
    before = attempt(scored(tmp_path / "adapter"))
    plain = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    base = plain["base_model_name_or_path"]
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query"], base_model_name_or_path=base)
    settings.save_pretrained(tmp_path / "adapter")
    after = attempt(scored(tmp_path / "adapter"))
    assert after == before
    assert after.kind == "fine"
    assert after.printed != attempt(scored(run_of("linear"))).printed


# ---- evaluations, logs and other files ------------------------------------------------------------------------------


def _pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def _nan(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: value * torch.nan for name, value in tensors.items() if name.startswith("nats.")})

    edit_tensors(folder / "scores.safetensors", change)


EVALUATIONS: dict[str, tuple[Damage, str]] = {
    "samples are a pipe": (_pipe("samples.txt"), "is a pipe"),
    "samples are binary": (lambda folder: (folder / "samples.txt").write_bytes(b"\xff\xfe"), "is not UTF-8"),
    "scores are a pipe": (_pipe("scores.safetensors"), "is a pipe"),
    "no nats": (_nan, "are not numbers"),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_hostile_evaluation_is_refused(name, tmp_path):
    damage, message = EVALUATIONS[name]
    shutil.copytree(FORMAT_1, tmp_path / "evaluation")
    damage(tmp_path / "evaluation")
    refused(attempt(["compare", str(tmp_path / "evaluation")]), message)


LOGS = {
    "a pipe": (lambda log: os.mkfifo(log), "is a pipe"),
    "binary": (lambda log: log.write_bytes(b"\xff\xfe"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_hostile_log_is_refused(name, tmp_path):
    damage, message = LOGS[name]
    shutil.copytree(run_of("linear"), tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").unlink()
    damage(tmp_path / "run" / "log.jsonl")
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=error"]
    refused(attempt(resume), message)


def test_rows_of_a_log_that_cannot_be_read_are_skipped(tmp_path):
    """Too deep, too large a number, no object: as the half lines that a killed process leaves."""
    shutil.copytree(run_of("linear"), tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write("[" * 10**5 + "\n[1]\n5\n" + '{"event": "train", "step": 1' + "0" * 400 + "}\n" + '{"step": 1')
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=error"]
    assert attempt(resume).kind == "fine"


@pytest.mark.parametrize("lines", [-1, float("inf"), "many"])
def test_hostile_progress_of_an_output_is_refused(lines, tmp_path):
    (tmp_path / "texts").write_text("the king .\n")
    (tmp_path / "out").write_text("")
    progress = {"settings": {}, "lines": lines, "bytes": 0, "digest": "", "state": {}}
    (tmp_path / "out.progress").write_text(json.dumps(progress))
    command = ["score", f"--file={tmp_path / 'texts'}", f"--output={tmp_path / 'out'}", f"--model={run_of('linear')}"]
    refused(attempt(command), "out.progress' is damaged")


def test_progress_beyond_the_texts_ends():
    progress = _Progress(Path("out.progress"), {}, SavedState(), num_lines=10**30, digest="x")
    with pytest.raises(ValueError, match="already answered in --output have changed"):
        progress.skip_done(iter([Line(1, "the king .")]))


# ---- audit ----------------------------------------------------------------------------------------------------------

AUDITS: dict[str, tuple[list[str], str]] = {
    "a device as language": (["--language=/dev/zero"], "is a device"),
    "no tolerance": (["exact", "--tolerance=nan"], "--tolerance must be 0 or more"),
    "an infinite tolerance": (["spindle", "--tolerance=inf"], "--tolerance must be 0 or more"),
    "a scorer of no package": (["..:nats"], "cannot be imported"),
    "a command without end": (["--command=yes 1"], "prints more than a number"),
    "a command of bytes": (["--command=head -c 999 /dev/urandom"], "a number is expected"),
}
SCORERS: dict[str, tuple[str, str]] = {
    "no syntax": ("def nats(:", "SyntaxError"),
    "an error at import": ("1 / 0", "ZeroDivisionError: division by zero, scorers.py:1"),
    "an error": ("def nats(texts):\n    return texts.nothing", "AttributeError: .*, scorers.py:2"),
    "no list": ("def nats(texts):\n    return None", "TypeError"),
    "10⁴⁰⁰": ("def nats(texts):\n    return [10**400] * len(texts)", "a number is expected"),
    "no errors": (
        "class One:\n    nats, standard_error = 1, float('nan')\ndef nats(texts):\n    return [One()] * len(texts)",
        "standard errors that are negative or not finite",
    ),
}


@pytest.mark.parametrize("name", AUDITS)
def test_a_hostile_audit_is_refused(name):
    options, message = AUDITS[name]
    refused(attempt(["audit", *options]), message)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_that_fails_is_one_line(name, tmp_path):
    source, message = SCORERS[name]
    (tmp_path / "scorers.py").write_text(f"{source}\n", encoding="utf-8")
    refused(attempt(["audit", "scorers:nats"], folder=tmp_path), message)


# ---- plugins and servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["def f(:", "1 / 0", "{}['key']", "import nothing_of_this_name", "exit(7)"])
def test_a_plugin_that_fails_is_one_line(source, tmp_path):
    (tmp_path / "own_part.py").write_text(f"{source}\n", encoding="utf-8")
    refused(attempt(["info", "--plugin=own_part"], folder=tmp_path), "--plugin own_part cannot be imported")


@pytest.mark.parametrize("name", ["..", ".x", "a/b", "x" * 10_000])
def test_a_plugin_that_is_no_name_is_refused(name):
    refused(attempt(["info", "--plugin", name]), "cannot be imported")


SERVERS: dict[str, tuple[str, str]] = {
    "a device as key": ("--api-key-file=/dev/zero", "is a device"),
    "no delay": ("--drain-delay=nan", "--drain-delay must be between"),
    "an endless delay": ("--drain-delay=inf", "--drain-delay must be between"),
    "no seconds": ("--seconds=nan", "the limit --seconds must be"),
    "10³⁰ texts": (f"--texts={10**30}", "the limit --texts must be"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_hostile_setting_of_a_server_is_refused(name):
    option, message = SERVERS[name]
    refused(attempt(["serve", "--port=0", f"--model={run_of('linear')}", option]), message)
