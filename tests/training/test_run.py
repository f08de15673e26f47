"""Training from the command line: from text to a model folder, every kind of start, invalid options."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from backbones import backbone_of
from filelock import FileLock
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from shared import encoding_cache, shared
from tiny_models import corpus, plain_roberta, run_of
from tiny_tokenizers import gpt2_tokenizer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from diffusionbert.cli.main import main
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.diffusion.schedules import Mean, Spindle
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.networks.loading import NewDecoder, Pretrained, load_legacy_checkpoint
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig, Quantity
from diffusionbert.recipes import PRESETS, pretraining_of
from diffusionbert.training import run as run_module
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.model_folder import push_model
from diffusionbert.training.run import prepare
from diffusionbert.training.step import TrainingStep

QUICK = ["--steps=6", "--validate-every=3", "--save-every=3", "--log-every=1", "--batch-tokens=512"]
SHORT = ["--max-length=48"]
SMALL = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=600", *SHORT]


@pytest.fixture(scope="module")
def cache() -> Path:
    return encoding_cache()


@pytest.fixture(scope="module")
def masked_run(cache) -> Path:
    """A masked language model after a few steps of pretraining."""
    options = ["--data=pydoc", f"--cache={cache}", *QUICK, *SMALL]
    return shared("masked-run", lambda output: main(["pretrain", f"--output={output}", *options]))


def log(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_transformers_opens_a_pretrained_model(masked_run):
    model, report = AutoModelForMaskedLM.from_pretrained(masked_run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(masked_run / "model")
    logits = model(**tokenizer("the value of the [MASK] .", return_tensors="pt")).logits
    assert logits.shape[-1] == len(tokenizer) == model.config.vocab_size
    assert (masked_run / "model" / "README.md").read_text().count("pseudo") == 1
    about = json.loads((masked_run / "model" / "diffusionbert.json").read_text())
    assert about["config"]["objective"]["name"] == "masked-lm"
    assert set(load_file(masked_run / "model" / "token_counts.safetensors")) == {
        "counts",
        "length_histogram",
        "letter_case",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--schedule=spindle", "--time=layers"],
        ["--schedule=spindle:mean=sentence,floor=0.05", "--time=prefix"],
        ["--schedule=spindle:mean=sentence", "--quantity=paper"],
        ["--noise=uniform", "--hybrid=0.01", "--time=layers-learned"],
        ["--objective=continuous-time", "--schedule=cosine", "--time-sampling=bell", "--ema=0.9"],
        ["--objective=order-agnostic", "--batch-sequences=8"],
    ],
    ids=" ".join,
)
def test_training_starts_from_a_run_with_any_objective(masked_run, cache, tmp_path, options):
    quick = [
        option for option in QUICK if not (option.startswith("--batch-tokens") and "--batch-sequences=8" in options)
    ]
    output = tmp_path / "run"
    main(
        [
            "train",
            "--data=pydoc",
            f"--output={output}",
            f"--cache={cache}",
            f"--start={masked_run}",
            *SHORT,
            *quick,
            *options,
        ]
    )
    validations = [event for event in log(output) if event["event"] == "validation"]
    assert [event["step"] for event in validations] == [0, 3, 6]
    assert validations[0]["kind"] == ("pseudo" if "--quantity=paper" in options else "bound")
    assert (output / "model" / "beside.safetensors").exists() == any(option.startswith("--time=") for option in options)


@pytest.mark.slow
def test_training_starts_with_the_parameters_of_the_start(masked_run, cache, tmp_path):
    output = tmp_path / "run"
    start = ["train", "--data=pydoc", f"--output={output}", f"--cache={cache}", f"--start={masked_run}", *SHORT]
    main([*start, "--steps=1", "--learning-rate=1e-12", "--time=layers"])
    before, after = (load_file(run / "model" / "model.safetensors") for run in (masked_run, output))
    assert all(torch.allclose(tensor, after[name], atol=1e-6) for name, tensor in before.items())
    # The time embeddings, too, if it has any of the same kind.
    again = tmp_path / "again"
    weights = {name: tensor + 1 for name, tensor in load_file(output / "model" / "beside.safetensors").items()}
    save_file(weights, output / "model" / "beside.safetensors")
    main(["train", "--data=pydoc", f"--output={again}", f"--cache={cache}", f"--start={output}", "--time=layers",
          "--steps=1", "--learning-rate=1e-12", *SHORT])  # fmt: skip
    kept = load_file(again / "model" / "beside.safetensors")
    assert all(torch.allclose(tensor, kept[name], atol=1e-6) for name, tensor in weights.items())


@pytest.mark.slow
def test_training_starts_with_the_learned_exponents_of_the_start(masked_run, cache, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    common = ["train", "--data=pydoc", "--system=genmd4", f"--cache={cache}", *SHORT, "--batch-tokens=512"]
    main([*common, f"--start={masked_run}", f"--output={first}", "--steps=4", "--learning-rate=1e-2"])
    main([*common, f"--start={first}", f"--output={again}", "--steps=1", "--learning-rate=1e-12"])
    before, after = (load_file(run / "model" / "token_counts.safetensors")["exponents"] for run in (first, again))
    assert float((before - 1).abs().max()) > 1e-3
    torch.testing.assert_close(after, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "file", "name"),
    [
        (["--time=layers"], "beside", None),
        (["--system=diffusion-lm-bert"], "beside", "table"),
        (["--system=genmd4"], "token_counts", "exponents"),
    ],
    ids=str,
)
def test_a_start_from_the_hub_equals_a_start_from_a_folder(
    masked_run, cache, tmp_path, monkeypatch, options, file, name
):
    common = ["train", "--data=pydoc", f"--cache={cache}", *SHORT, "--batch-tokens=512", *options]
    main([*common, f"--start={masked_run}", f"--output={tmp_path / 'first'}", "--steps=4", "--learning-rate=1e-2"])
    first, again = tmp_path / "first" / "model", tmp_path / "again"
    monkeypatch.setattr(
        "diffusionbert.storage.hub.snapshot_download", lambda requested, **_: {"me/mine": str(first)}[requested]
    )
    main([*common, "--start=me/mine", f"--output={again}", "--steps=1", "--learning-rate=1e-12"])
    before, after = (load_file(folder / f"{file}.safetensors") for folder in (first, again / "model"))
    for key in before if name is None else [name]:
        torch.testing.assert_close(after[key], before[key])
    assert json.loads((again / "run.json").read_text())["backbone"]["name_or_path"] == "me/mine"


@pytest.mark.slow
def test_a_killed_command_resumes_to_the_same_parameters(cache, tmp_path):
    """The command itself is killed at an arbitrary time and run again with --resume."""
    common = ["--data=pydoc", f"--cache={cache}", "--steps=30", "--validate-every=15", "--save-every=4", *SMALL]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    main(["train", f"--output={straight}", *common])
    command = [sys.executable, "-m", "diffusionbert", "train", f"--output={killed}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as here: sums in another order differ in the last bit
    process = subprocess.Popen([*command, *common], env=one_thread, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (killed / "checkpoints" / "step-00000004").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "model").exists()
    main(["train", f"--output={killed}", "--resume"])
    for name in ("weights", "optimizer"):
        first, second = (
            load_file(run / "checkpoints" / "step-00000030" / f"{name}.safetensors") for run in (straight, killed)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


def plain_decoder(folder: Path) -> Path:
    """A GPT-2 as on the Hub: its tokenizer has neither mask nor padding, its network no embeddings for them."""
    tokenizer = gpt2_tokenizer()
    tokenizer.save_pretrained(folder)
    NewDecoder(1, 32, 2, 0.1).build(len(tokenizer), 48, 0, causal=True).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "start"),
    [
        ("diffusionbert-lte", "run"),
        ("genmd4", "run"),
        ("diffusion-lm-bert", "run"),
        ("diffusionbert", "roberta"),
        ("decoder-pretrained", "gpt2"),
    ],
)
def test_a_run_is_resumed_elsewhere_without_its_start(masked_run, cache, tmp_path, monkeypatch, system, start):
    """Exactly, because a checkpoint holds all parameters, and the run directory everything else."""
    source = {"run": lambda: masked_run, "roberta": plain_roberta, "gpt2": lambda: plain_decoder(tmp_path / "gpt2")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(source[start](), tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    begun = ["train", "--data=pydoc", "--start=start", f"--system={system}", f"--cache={cache}", "--max-length=32"]
    main([*begun, "--output=straight", *QUICK])
    taken = TrainingStep.__call__

    def step(self, batch):
        if batch.step == 4:
            raise KeyboardInterrupt
        return taken(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", step)
        with pytest.raises(SystemExit):
            main([*begun, "--output=killed", *QUICK])
    shutil.rmtree(tmp_path / "start")
    monkeypatch.chdir(elsewhere)
    main([*begun, f"--output={tmp_path / 'killed'}", *QUICK, "--resume"])
    for file in ("checkpoints/step-00000006/weights", "checkpoints/step-00000006/optimizer", "model/model"):
        first, second = (load_file(tmp_path / run / f"{file}.safetensors") for run in ("straight", "killed"))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert (
        Vocabulary.load(tmp_path / "killed" / "model").fingerprint
        == Vocabulary.load(tmp_path / "straight" / "model").fingerprint
    )


@pytest.mark.slow
def test_two_processes_train_a_vocabulary_once(tmp_path, monkeypatch):
    trained, all_here, data = [], Barrier(4), DataConfig(str(corpus()), vocabulary=512)

    def train(*arguments, **options):
        trained.append(arguments)
        time.sleep(0.2)  # the others look for it meanwhile
        return train_wordpiece(*arguments, **options)

    def prepared(_):
        all_here.wait()
        return prepare(data, tmp_path)

    monkeypatch.setattr("diffusionbert.training.run.train_wordpiece", train)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(prepared, range(4)))
    assert len(trained) == 1
    assert len({each.vocabulary.fingerprint for each in found}) == 1


@pytest.mark.slow
def test_a_missing_text_is_named_when_resuming(capsys, cache, tmp_path, monkeypatch):
    shutil.copy(corpus(), tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    main(["train", "--data=text.txt", "--output=run", f"--cache={cache}", "--steps=1", *SMALL])
    monkeypatch.chdir(cache)
    said = wrong(capsys, "train", f"--output={tmp_path / 'run'}", f"--cache={cache}", "--resume", "--steps=2")
    assert "the text of the run cannot be read here (no file, folder or glob matches 'text.txt'" in said
    assert said.endswith("restore it, or resume where it was started")


@pytest.mark.slow
def test_two_processes_without_a_gpu_train_one_run(cache, tmp_path):
    """Processes that do not find each other would log everything twice."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = ["diffusionbert", "train", "--data=pydoc", f"--output={tmp_path / 'run'}", f"--cache={cache}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [*launcher, *command, "--auto", "--sharded", *QUICK, *SMALL]
    done = subprocess.run(line, env=one_thread, check=True, timeout=200, stdout=subprocess.PIPE, text=True)
    assert done.stdout.count("step 6, best validation") == 1  # and one process alone would push
    assert [event["step"] for event in log(tmp_path / "run") if "loss" in event] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_model_is_pushed_completely_and_privately(masked_run, monkeypatch):
    sent: dict[str, object] = {}
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: sent.update(options) or f"hub/{name}")
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: sent.update(options))
    assert push_model(masked_run / "model", "me/mine") == "hub/me/mine"
    assert sent["private"] is True
    assert sent["folder_path"] == masked_run / "model"


def test_a_failed_push_reports_where_the_model_is(masked_run):
    with pytest.raises(OSError, match="not pushed"):
        push_model(masked_run / "model", "me/mine")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--packing"]], ids=str)
def test_auto_measures_the_speed_and_predicts_the_duration(cache, tmp_path, capsys, monkeypatch, options):
    are_packed, forward = [], TrainingModule.forward

    def look(self, x0, *others):
        are_packed.append(x0.packing is not None)
        return forward(self, x0, *others)

    monkeypatch.setattr(TrainingModule, "forward", look)
    common = "--data=pydoc", f"--output={tmp_path / 'run'}", f"--cache={cache}", "--auto"
    main(["train", *common, *options, *QUICK, *SMALL])
    assert "tokens/s" in (said := capsys.readouterr().err)
    assert "will take about" in said
    assert are_packed == [bool(options)] * (3 + 6)  # three passes to measure, then the steps


@pytest.mark.slow
def test_an_original_checkpoint_is_imported(masked_run, cache, tmp_path):
    """The release's `.th` files: weights under `model`, names as in transformers, pickled by torch.save."""
    donor = backbone_of("bert")
    weights = {f"module.{name}": tensor for name, tensor in donor.state_dict().items()}
    torch.save({"model": weights, "optimizer": {"state": {}, "param_groups": []}}, tmp_path / "best.th")
    model = load_legacy_checkpoint(tmp_path / "best.th")
    assert torch.equal(model.get_input_embeddings().weight, donor.get_input_embeddings().weight)
    assert torch.equal(model.get_output_embeddings().weight, donor.get_output_embeddings().weight)


class Malicious:
    """What a pickle can do."""

    def __reduce__(self):
        return print, ("this must never be printed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": Malicious()}, "not opened"),
        ({"optimizer": {}}, "no weights"),
        ({"model": {"gpt.weight": torch.zeros(2)}}, "no BERT"),
    ],
)
def test_bad_original_checkpoints_are_refused(tmp_path, capsys, content, message):
    torch.save(content, tmp_path / "bad.th")
    with pytest.raises(ValueError, match=message):
        load_legacy_checkpoint(tmp_path / "bad.th")
    assert "never be printed" not in capsys.readouterr().out


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_configurations_survive_json(preset):
    config = preset("pydoc")
    varied = RunConfig(
        config.data,
        Pretrained("some/model"),
        TimeEmbedding.LAYERS,
        DiscreteTimeConfig(Spindle(0.2, Mean.SENTENCE, 0.1), 64, Quantity.PAPER, 0.01, Bell(0.5), uniform_noise=False),
        TrainingConfig(steps=3, patience=2, trackers=("tensorboard",)),
    )
    for each in (config, pretraining_of(config), varied):
        assert RunConfig.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Nonsense"},
        {"format": 99},
        {"wrong_name": 1},
        {"time": "sometimes"},
        {"data": {"corpus": 3}},
        {"data": {"name": "linear"}},
        {"objective": {"name": "bert"}},
        {"objective": {"name": "discrete-time", "schedule": {"name": "uniform"}}},
        {"objective": {"name": "gaussian", "width": True}},
        {"backbone": {"name": "bert", "layers": [2]}},
        {"data": ["pydoc"]},
    ],
    ids=str,
)
def test_damaged_settings_are_refused(change):
    with pytest.raises(ValueError, match=r"^run\.json.*(unknown|has no field|must be)"):
        RunConfig.from_json(PRESETS["tiny"]("pydoc").to_json() | change, "run.json")


def wrong(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said
    assert "Traceback" not in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data=no-such-file.txt"], "no-such-file"),
        ([], "--data"),
        (["--data=pydoc", "--batch-tokens=9", "--batch-sequences=9"], "exclude"),
        (["--data=pydoc", "--steps=0"], "steps"),
        (["--data=pydoc", "--start=no/such/model"], "no/such/model"),
        (["--data=pydoc", "--resume"], "run.json"),
        (["--data=pydoc", "--schedule=spindle:mean=sentence"], "floor"),
        (["--data=pydoc", "--time-sampling=bell:depth=2"], "depth"),
        (["--data=pydoc", "--preset=paper", "--dropout=0.5"], "dropout"),
    ],
    ids=str,
)
def test_invalid_options_give_one_line_and_exit_code_2(capsys, cache, tmp_path, options, message):
    said = wrong(capsys, "train", f"--output={tmp_path / 'run'}", f"--cache={cache}", *options)
    errors = [line for line in said.splitlines() if line.startswith("diffusionbert: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_a_network_that_is_too_short_is_refused_before_anything_is_written(capsys, cache, masked_run, tmp_path):
    output = tmp_path / "run"
    said = wrong(capsys, "train", "--data=pydoc", f"--output={output}", f"--cache={cache}", f"--start={masked_run}")
    assert "--max-length" in said
    assert not output.exists()


def test_an_existing_run_is_never_overwritten(capsys, cache, masked_run):
    said = wrong(capsys, "train", "--data=pydoc", f"--output={masked_run}", f"--cache={cache}")
    assert "--resume" in said


@pytest.mark.slow
def test_a_run_directory_is_locked_while_it_is_trained(capsys, cache, masked_run, tmp_path):
    run = shutil.copytree(masked_run, tmp_path / "run")
    resume = ["pretrain", "--resume", f"--output={run}", f"--cache={cache}", "--steps=8"]
    before = (run / "log.jsonl").read_text()
    with FileLock(run / ".lock"), pytest.raises(SystemExit) as stopped:
        main(resume)
    assert stopped.value.code == 2
    assert f"another process is training in '{run}'" in capsys.readouterr().err
    assert (run / "log.jsonl").read_text() == before
    main(resume)  # the other is over
    assert log(run)[-1]["step"] == 8


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "Example: diffusionbert" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_never_beat_its_start_says_so_and_how_to_go_on(cache, tmp_path, capsys):
    options = ["--steps=4", "--validate-every=2", "--save-every=2", "--batch-tokens=256", "--max-length=24"]
    start, quick = f"--start={run_of('linear', steps=60)}", f"--cache={cache}"
    main(["train", f"--data={corpus()}", f"--output={tmp_path / 'run'}", start, quick, *options, "--learning-rate=3"])
    printed = capsys.readouterr()
    assert "no validation was better than that of the start" in printed.err
    assert "lower --learning-rate than 3" in printed.err
    assert "at step 0" in printed.out
    assert "diffusionbert adapt" in printed.out


@pytest.mark.slow
def test_another_tokenizer_than_that_of_a_run_beside_is_said(cache, tmp_path, capsys):
    options = [f"--data={corpus()}", f"--cache={cache}", *QUICK, "--layers=1", "--width=32", "--heads=2", *SHORT]
    for name, other in (("a", []), ("b", []), ("c", ["--cased"])):
        main(["train", f"--output={tmp_path / name}", *options, "--vocabulary=600", *other])
        said = "this run's tokenizer differs from that of 'a'" in capsys.readouterr().err
        assert said is (name == "c")


def test_what_lies_beside_a_run_and_cannot_be_read_is_no_concern(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    for method in ("is_file", "iterdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, forbidden)
            run_module._warn_of_other_tokenizers(
                tmp_path / "run", DataConfig("text.txt"), train_wordpiece(["the king ."], 600)
            )


@pytest.mark.slow
def test_a_start_that_has_read_the_same_sentences_is_said(cache, tmp_path, capsys):
    options = [f"--data={corpus()}", f"--cache={cache}", *QUICK]
    main(["pretrain", f"--output={tmp_path / 'start'}", *options, *SMALL])
    found = {}
    for name, other in (("same", []), ("seed", ["--seed=1"]), ("batches", ["--batch-tokens=128"])):
        main(["train", f"--start={tmp_path / 'start'}", f"--output={tmp_path / name}", *options, *SHORT, *other])
        found[name] = "begins with the same sentences; give another --seed than 0" in " ".join(
            capsys.readouterr().err.split()
        )
    assert found == {"same": True, "seed": False, "batches": False}


@pytest.mark.slow
def test_a_small_text_holds_out_a_tenth_also_when_it_is_resumed(cache, tmp_path):
    options = [f"--data={corpus()}", f"--cache={cache}", *QUICK, *SMALL, f"--output={tmp_path / 'run'}"]
    main(["train", *options])
    fraction = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["held_out"]
    assert 0.05 < fraction < 0.15
    main(["train", *options, "--resume", "--steps=8"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["held_out"] == fraction
