"""Parts of a user's own, registered from outside the package: trained, exported, opened again, sampled and scored."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from shared import encoding_cache
from tiny_models import config_of, corpus
from transformers import BertConfig, BertForMaskedLM

import diffusionbert
from diffusionbert.cli.main import main
from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Mean, NoiseSchedule, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Values
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.model import load
from diffusionbert.networks.loading import Provided
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, ObjectiveConfig, ScoringQuantities
from diffusionbert.objectives.continuous_time import ContinuousTimeConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC, OrderAgnostic
from diffusionbert.registry import register
from diffusionbert.training.run import TrainingRun, stored_config, train

SENTENCE = "the king saw a river today ."


@register("tilted")
@dataclass(frozen=True)
class Tilted(NoiseSchedule):
    """ᾱ_t(v) = 1 - t^(relative information), a token-dependent schedule with the mean of the sentence."""

    floor: float = 0.1
    mean: Mean = Mean.SENTENCE
    by_token = True

    def survival(self, t: Values, relative_information: Values) -> Values:
        return (1 - self.floor) * (1 - t**relative_information) + self.floor * (1 - t)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return (1 - self.floor) * relative_information * t ** (relative_information - 1) + self.floor


@register("half-masked")
@dataclass(frozen=True)
class HalfMaskedConfig(ObjectiveConfig):
    """An objective of one's own: the order-agnostic bound, of which only the loss is scaled."""

    scale: float = 0.5

    def build(self, statistics: TokenStatistics) -> HalfMasked:
        return HalfMasked(statistics.mask_id, self.scale)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))


class HalfMasked(OrderAgnostic):
    def __init__(self, mask_id: int, scale: float):
        super().__init__(mask_id)
        self.scale = scale

    def loss(self, network, x0, noise):
        return self.scale * super().loss(network, x0, noise)


@dataclass(frozen=True)
class Unregistered(Spindle):
    """Works in memory alone."""


def trained(tmp_path, objective: ObjectiveConfig, time: TimeEmbedding = TimeEmbedding.NONE) -> TrainingRun:
    config = replace(config_of("linear", steps=2), objective=objective, time=time)
    return train(config, tmp_path / "run", cache=encoding_cache())


OWN = {
    "schedule over a time grid": (DiscreteTimeConfig(Tilted(), 8), TimeEmbedding.NONE),
    "schedule, time-conditioned": (DiscreteTimeConfig(Tilted(0.2), 8), TimeEmbedding.LAYERS),
    "schedule in continuous time": (ContinuousTimeConfig(Tilted(mean=Mean.CORPUS)), TimeEmbedding.NONE),
    "objective": (HalfMaskedConfig(0.25), TimeEmbedding.NONE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_part_is_trained_exported_loaded_sampled_and_evaluated(name, tmp_path, capsys):
    objective, time = OWN[name]
    run = trained(tmp_path, objective, time)
    assert stored_config(run.path) == run.config
    assert run.config.objective == objective
    model = load(run.path, device="cpu")
    assert model.engine.config.objective == objective
    assert len(model.generate(num_return_sequences=2, length=6, steps=4)) == 2
    [score] = model.score([SENTENCE], precision=1.0)
    assert score.nats > 0
    assert score.kind is Likelihood.BOUND
    sizes = ["--samples=2", "--length=6", "--steps=4", "--max-draws=4"]
    capsys.readouterr()
    main(["evaluate", f"--model={run.path}", f"--data={corpus()}", *sizes, "--device=cpu", "--json"])
    report = capsys.readouterr().out
    assert json.loads(report)
    assert ("tilted" in report) == name.startswith("schedule")
    assert str(objective) in (run.path / "model" / "README.md").read_text()


def test_a_part_can_be_named_on_the_command_line(tmp_path):
    options = ["--layers=1", "--width=16", "--vocabulary=512", "--steps=1", f"--cache={encoding_cache()}"]
    main(["train", f"--data={corpus()}", f"--output={tmp_path}", "--schedule=tilted:floor=0.3", *options])
    assert stored_config(tmp_path).objective.schedule == Tilted(0.3)


@pytest.mark.slow
def test_train_takes_parts_by_name(tmp_path):
    sizes = {"steps": 1, "max_length": 24, "cache": encoding_cache()}
    run = diffusionbert.train(corpus(), tmp_path / "run", schedule="tilted:floor=0.3", **sizes)
    assert run.config.objective.schedule == Tilted(0.3)
    run = diffusionbert.train(corpus(), tmp_path / "other", objective="half-masked:scale=0.75", **sizes)
    assert run.config.objective == HalfMaskedConfig(0.75)
    with pytest.raises(ValueError, match=r"schedule: unknown schedule 'tilde'; did you mean 'tilted'"):
        diffusionbert.train(corpus(), tmp_path / "none", schedule="tilde", **sizes)


def test_the_error_for_a_missing_part_names_its_module(tmp_path, monkeypatch):
    run = trained(tmp_path, DiscreteTimeConfig(Tilted(), 8))
    plain = json.loads((run.path / "run.json").read_text())["objective"]["schedule"]
    assert plain == {"name": "tilted", "module": __name__, "floor": 0.1, "mean": "sentence"}
    monkeypatch.delitem(NoiseSchedule.registry._members, "tilted")
    with pytest.raises(ValueError, match=rf"unknown schedule 'tilted'.*registered by the module '{__name__}'"):
        load(run.path, device="cpu")


def test_an_unregistered_part_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r'Unregistered is not a registered schedule.*put @register\("a-name"\) above'):
        trained(tmp_path, DiscreteTimeConfig(Unregistered(), 8))
    assert not (tmp_path / "run").exists()


def test_an_own_token_dependent_schedule_estimates_the_sentence_mean():
    information = TokenInformation.from_counts(torch.tensor([1, 10, 100, 0]))
    process = Absorbing(Tilted(), 3, information)
    assert process.guesses_center
    assert not Absorbing(Tilted(mean=Mean.CORPUS), 3, information).guesses_center


# ---- backbones ------------------------------------------------------------------------------------------------------


def backbone() -> BertForMaskedLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=600, max_position_embeddings=32, **sizes))


class OwnBert(BertForMaskedLM):
    """Would be opened again as a plain `BertForMaskedLM`."""


def test_a_backbone_given_as_an_object_is_trained(tmp_path):
    config, given = config_of("linear", steps=2), backbone()
    run = train(config, tmp_path / "run", cache=encoding_cache(), backbone=given)
    assert run.config.backbone == Provided("BertForMaskedLM")
    assert load(run.path, device="cpu").backbone.config.hidden_size == 16
    training = replace(config.training, steps=3)
    again = train(replace(config, training=training), run.path, cache=encoding_cache(), resume=True)
    assert again.state.step == 3


def test_a_backbone_that_could_not_be_opened_again_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="OwnBert"):
        train(config_of("linear", steps=2), tmp_path / "run", backbone=OwnBert(backbone().config))
    assert not (tmp_path / "run").exists()


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_has_its_history(tmp_path):
    run = trained(tmp_path, DiscreteTimeConfig(num_steps=8))
    assert [validation.step for validation in run.history] == [0, 2]
    assert {validation.kind for validation in run.history} == {Likelihood.BOUND}
    assert min(validation.nats_per_token for validation in run.history) == run.state.best
    assert not run.is_stopped


@pytest.mark.slow
def test_a_run_is_repeated_from_its_configuration(tmp_path):
    """`train --config`: the same weights in another directory, and other settings where they are given."""
    first = trained(tmp_path, DiscreteTimeConfig(Spindle(0.2), 8))
    common = ["train", f"--config={first.path / 'run.json'}", f"--cache={encoding_cache()}"]
    main([*common, f"--output={tmp_path / 'again'}"])
    main([*common, f"--output={tmp_path / 'other'}", "--steps=3", "--diffusion-steps=5"])
    again, other = stored_config(tmp_path / "again"), stored_config(tmp_path / "other")
    assert again == first.config
    files = [path / "model" / "model.safetensors" for path in (first.path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (other.training.steps, other.objective) == (3, DiscreteTimeConfig(Spindle(0.2), 5))
