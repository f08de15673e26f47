"""Ready-made experiments: functions that say what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diffusionbert.batches import FixedRows, TokenBudget
from diffusionbert.experiments import Data, Diffusion, Experiment, Masking, NewBert, NewDecoder, NextWord, Pretrained
from diffusionbert.proposals import Bell
from diffusionbert.training.settings import Training


def tiny(data: str) -> Experiment:
    """Two CPU cores, about a minute: a BERT of 0.7M weights, 800 steps of 1k tokens, T = 128."""
    return Experiment(
        Data(data, vocabulary=2000, max_length=64),
        NewBert(layers=2, width=128, heads=4),
        objective=Diffusion(num_steps=128),
        training=Training(
            steps=800,
            batching=TokenBudget(1024),
            learning_rate=2e-3,
            warmup=40,
            validate_every=200,
            validation_sentences=256,
            validation_draws=16,
            save_every=200,
        ),
    )


def small(data: str) -> Experiment:
    """One GPU, minutes: a BERT of 35M weights (6 layers, width 512), 5,000 steps of 32k tokens in bf16, T = 512."""
    return Experiment(
        Data(data, vocabulary=16_000, max_length=128),
        NewBert(layers=6, width=512, heads=8),
        objective=Diffusion(num_steps=512),
        training=Training(
            steps=5000,
            batching=TokenBudget(32_768),
            learning_rate=5e-4,
            warmup=500,
            averaging=0.999,
            precision="bf16",
            validate_every=500,
            save_every=1000,
            log_every=50,
        ),
    )


def paper(data: str) -> Experiment:
    """He et al. 2022: BERT-base, T = 2048, AdamW, 3e-6, 10k warm-up steps, batch 32, length 128, 1.9M steps.

    61 million sentences, about 1.9 billion tokens of LM1B. A batch of 32 keeps no modern GPU busy: docs/scaling.md
    has the arithmetic.
    """
    return Experiment(
        Data(data, vocabulary="bert-base-uncased", max_length=128),
        Pretrained("bert-base-uncased"),
        objective=Diffusion(num_steps=2048, hybrid=0.01),
        training=Training(
            steps=1_900_000,
            batching=FixedRows(32),
            learning_rate=3e-6,
            warmup=10_000,
            decay="inverse_sqrt",
            precision="bf16",
            validate_every=10_000,
            validation_sentences=2048,
            save_every=10_000,
            log_every=100,
        ),
    )


def wiki_small(data: str) -> Experiment:
    """The bundled model: 18.8M weights (7 layers, width 384), 10,060 steps of 64k tokens; ten minutes on one H200.

    Meant to start from its own pretraining (`--start`), on English Wikipedia sentences. Of the recipes that were
    tried this one had the lowest bound: times from a bell, not weighted back, and a rather low learning rate.
    """
    return _wiki(data, NewBert(layers=7, width=384, heads=6, dropout=0.0))


def wiki_medium(data: str) -> Experiment:
    """The same on a network of 33.8M weights (8 layers, width 512)."""
    return _wiki(data, NewBert(layers=8, width=512, heads=8, dropout=0.0))


def _wiki(data: str, network: NewBert) -> Experiment:
    return Experiment(
        Data(data, vocabulary=16_000, max_length=128),
        network,
        objective=Diffusion(num_steps=512, proposal=Bell(0.8, weighted=False)),
        training=Training(
            steps=10_060,
            batching=TokenBudget(65_536),
            learning_rate=5e-4,
            warmup=500,
            averaging=0.9995,
            precision="bf16",
            compile=True,
            validate_every=1676,
            validation_sentences=2048,
            validation_draws=8,
            save_every=1676,
            log_every=50,
        ),
    )


PRESETS: dict[str, Callable[[str], Experiment]] = {
    "tiny": tiny,
    "small": small,
    "paper": paper,
    "wiki-small": wiki_small,
    "wiki-medium": wiki_medium,
}


_PRETRAINING = {
    ("wiki-small", False): 6953,
    ("wiki-small", True): 5000,
    ("wiki-medium", False): 2600,
    ("wiki-medium", True): 2600,
}
"""Steps by preset and whether it is a decoder: four to seven minutes on one H200 each."""


def by_name(preset: str, data: str) -> Experiment:
    """A preset's experiment."""
    return PRESETS[preset](data)


def pretraining(preset: str, data: str, *, decoder: bool = False) -> Experiment:
    """The ordinary masking from which a preset's diffusion starts; or next words, from which a decoder does."""
    experiment = (next_word if decoder else masked)(by_name(preset, data))
    steps = _PRETRAINING.get((preset, decoder))
    if steps is None:
        return experiment
    every = steps // 8
    training = replace(experiment.training, steps=steps, learning_rate=1.5e-3, validate_every=every, save_every=every)
    return replace(experiment, training=training)


def as_new(network: NewBert | NewDecoder | Pretrained) -> NewBert | NewDecoder:
    """A network of random weights; in place of a pretrained one, a BERT-base."""
    return NewBert(12, 768, 12) if isinstance(network, Pretrained) else network


def as_decoder(network: NewBert | NewDecoder | Pretrained) -> NewDecoder | Pretrained:
    """A decoder of the same size as a BERT."""
    if isinstance(network, NewBert):
        return NewDecoder(network.layers, network.width, network.heads, network.dropout)
    return network


def next_word(experiment: Experiment) -> Experiment:
    """A decoder of the same size on the same data: the network that a pretrained decoder starts from."""
    experiment = masked(experiment)
    return replace(experiment, network=as_decoder(experiment.network), objective=NextWord())


def masked(experiment: Experiment) -> Experiment:
    """The same network and data, trained by ordinary masking: the network that diffusion starts from."""
    network = as_new(experiment.network)
    vocabulary = experiment.data.vocabulary if isinstance(experiment.data.vocabulary, int) else 30_000
    training = experiment.training
    if training.learning_rate < 1e-4:  # the paper's is for a network that is trained already
        training = replace(training, learning_rate=1e-4, steps=1_000_000, decay="linear", batching=TokenBudget(131_072))
    data = replace(experiment.data, vocabulary=vocabulary)
    return replace(experiment, network=network, objective=Masking(), data=data, training=training)
