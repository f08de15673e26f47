"""Run directories and model folders of earlier versions still open, with the same scores.

`data/v0` was written by version 0.1.0.dev0 before configurations had registered names: a time-conditioned spindle model
and a linear run with its checkpoint. The scores were recorded with that version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from diffusionbert.cli.main import main
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule, Spindle
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.inference.score import estimate_nats
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.model import load
from diffusionbert.networks.loading import BackboneConfig, NewBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.storage.schema import from_json
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import _NAMES, RunConfig, TrainingConfig, upgraded
from diffusionbert.training.run import stored_config

V0 = Path(__file__).parent.parent / "data_files" / "v0"
SENTENCES = ["the cat sat on the mat .", "a mat sat ."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nats"),
    [("model", [29.621429279985477, 18.093799893547793]), ("run", [31.111673289123505, 18.018793549802567])],
)
def test_scores_are_those_of_the_version_that_wrote_the_folder(name, nats):
    """With its noise, which was keyed by the number of a sentence."""
    model = load(V0 / name, device="cpu")
    found = estimate_nats(model.engine, SENTENCES, EstimationBudget(precision=0.05, seed=0), given=True)
    assert found.scores.nats.tolist() == pytest.approx(nats, abs=1e-4)


def test_an_old_configuration_is_converted():
    model, run = load(V0 / "model", device="cpu").engine.config, stored_config(V0 / "run")
    assert model.objective == DiscreteTimeConfig(Spindle(0.3), 8, hybrid=0.01, time_sampling=Bell(0.5))
    assert (model.time, model.training.ema) == (TimeEmbedding.LAYERS, 0.9)
    assert (run.backbone, run.time) == (NewBert(1, 12, 2, 0.0), TimeEmbedding.NONE)
    assert run.objective == DiscreteTimeConfig(Linear(), 8)
    assert (run.training.steps, run.training.ema, run.data.validation) == (2, None, "text.txt")


def test_an_old_run_is_resumed(tmp_path, monkeypatch):
    shutil.copytree(V0, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    main(["train", "--resume", "--output=run", "--cache=cache", "--steps=3"])
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["format"] == 1
    assert stored_config(tmp_path / "run").training.steps == 3
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize("kind", _NAMES)
def test_every_old_kind_has_a_registered_name(kind):
    """With its defaults, but for what had none."""
    plain = upgraded({"kind": kind} | ({"name": "some/model"} if kind == "Pretrained" else {}), "old")
    families = [NoiseSchedule, ObjectiveConfig, type(Bell()).__mro__[1], BackboneConfig]
    [family] = [family for family in families if plain["name"] in family.registry.names()]
    assert type(from_json(plain, family, "old")).__module__.startswith("diffusionbert.")


def test_an_old_batch_size_in_sequences_is_converted():
    old = {"kind": "Training", "batching": {"kind": "FixedRows", "rows": 24}, "averaging": 0.9}
    training = from_json(upgraded(old, "old"), TrainingConfig, "old")
    assert (training.batching, training.ema) == (FixedSequences(24), 0.9)


def test_the_earlier_spelling_of_detokenize_is_read():
    stored = stored_config(V0 / "run").to_json()
    data = {name: value for name, value in stored["data"].items() if name != "detokenize"} | {"detokenise": True}
    assert RunConfig.from_json(stored | {"data": data}).data.detokenize


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"^run\.json\.data: unknown kind 'Nonsense'$"):
        RunConfig.from_json({"kind": "Experiment", "data": {"kind": "Nonsense"}}, "run.json")
