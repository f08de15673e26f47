"""A scale of reproduction that takes seconds."""

from __future__ import annotations

from tiny_models import MAX_LENGTH

from diffusionbert.networks.loading import NewBert
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.recipes import pretraining_of
from diffusionbert.reproduce.reproduction import Scale
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig

STEPS = 3


def smallest(data: str) -> RunConfig:
    training = TrainingConfig(
        steps=STEPS, batching=TokenBudget(256), warmup=1, validate_every=2,
        validation_sentences=4, validation_draws=2, save_every=2,
    )  # fmt: skip
    return RunConfig(
        DataConfig(data, vocabulary=512, max_length=MAX_LENGTH),
        NewBert(layers=1, width=32, heads=2, dropout=0.0),
        objective=DiscreteTimeConfig(num_steps=8),
        training=training,
    )


SMALLER_THAN_SMOKE = Scale(
    smallest,
    lambda data, decoder: pretraining_of(smallest(data), decoder=decoder),
    sentences=4, samples=4, length=6, max_draws=4,
    vector_steps=4, step_counts=(2, 5), timed_samples=4, decoder_rate_factor=1.0,
)  # fmt: skip
