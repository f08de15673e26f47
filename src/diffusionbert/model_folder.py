"""The model that a run leaves behind: a Hugging Face folder with what diffusion needs beside it.

config.json  model.safetensors  tokenizer files      open with AutoModelForMaskedLM and AutoTokenizer
conditioning.safetensors                             the time embeddings, unless the network is time-agnostic
diffusionbert.json  token_counts.safetensors         the experiment, the lengths and frequencies of its corpus
README.md                                            the model card
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor

from diffusionbert import __version__
from diffusionbert.checkpoints import load_tensors, read_json, save_tensors, write_json
from diffusionbert.experiments import (
    AnyOrderWriting,
    Data,
    Experiment,
    Lexicon,
    Pretrained,
    Time,
    from_json,
    to_json,
)
from diffusionbert.method import Method
from diffusionbert.networks import Denoiser, quiet
from diffusionbert.vocabulary import Vocabulary

_BACKBONE, _CONDITIONING = "network.backbone.", "network.conditioning."


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a model comes from: what its folder and its card tell."""

    experiment: Experiment
    vocabulary: Vocabulary
    lexicon: Lexicon
    length_histogram: Tensor
    data_fingerprint: str
    paired: bool = False
    """Whether the corpus gave pairs of source and target."""


def write_model(folder: Path, method: Method, weights: Mapping[str, Tensor], origin: Origin, standing: Any) -> None:
    """Writes weights, which may be averaged ones, as a model folder."""
    assert isinstance(method.network, Denoiser)
    with quiet():
        method.network.backbone.save_pretrained(folder, state_dict=_below(_BACKBONE, weights))
    conditioning = _below(_CONDITIONING, weights)
    if conditioning:
        save_tensors(conditioning, folder / "conditioning.safetensors")
    origin.vocabulary.save(folder)
    frequencies = {"counts": origin.lexicon.counts, "length_histogram": origin.length_histogram}
    save_tensors(frequencies, folder / "token_counts.safetensors")
    write_json(
        folder / "diffusionbert.json",
        {
            "version": __version__,
            "experiment": to_json(origin.experiment),
            "data_fingerprint": origin.data_fingerprint,
            "paired": origin.paired,
            "validation": {
                "nats_per_token": standing.best,
                "step": standing.best_step,
                "likelihood": method.objective.likelihood.value,
            },
        },
    )
    (folder / "README.md").write_text(_card(method, origin, standing), encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Opened:
    """What a model folder holds, but for the weights."""

    folder: Path
    experiment: Experiment
    vocabulary: Vocabulary
    lexicon: Lexicon
    length_histogram: Tensor | None
    """How many sentences of the training corpus had n tokens; None if the model does not say."""
    paired: bool
    """Whether it was trained on pairs of source and target."""


def read_model(folder: Path) -> Opened:
    """Reads a folder that `write_model` wrote, or that of any masked language model.

    Such a plain one writes without having been trained for it: in any order, one token at a time.
    """
    vocabulary = Vocabulary.load(folder)
    settings = folder / "diffusionbert.json"
    network = Pretrained(str(folder))
    counts = torch.zeros(vocabulary.size, dtype=torch.long)
    histogram, paired = None, False
    if settings.exists():
        said = _described(settings)
        experiment, paired = replace(said["experiment"], network=network), bool(said.get("paired", False))
        frequencies = load_tensors(folder / "token_counts.safetensors")
        if frequencies.keys() != {"counts", "length_histogram"}:
            raise ValueError(f"{str(folder)!r} lacks counts in token_counts.safetensors; export it anew")
        counts, histogram = frequencies["counts"], frequencies["length_histogram"]
        if experiment.time is not Time.NONE and not (folder / "conditioning.safetensors").exists():
            raise ValueError(f"{str(folder)!r} is told the time, but its conditioning.safetensors is missing")
    else:
        experiment = Experiment(Data("unknown", max_length=sys.maxsize), network, objective=AnyOrderWriting())
    forbidden = tuple(vocabulary.forbidden.nonzero()[:, 0].tolist())
    lexicon = Lexicon(vocabulary.mask_id, vocabulary.pad_id, vocabulary.writable, forbidden, counts)
    return Opened(folder, experiment, vocabulary, lexicon, histogram, paired)


def _described(settings: Path) -> dict[str, Any]:
    """What diffusionbert.json says, its experiment read."""
    try:
        said = dict(read_json(settings))
        experiment = from_json(said["experiment"])
        if not isinstance(experiment, Experiment):
            raise TypeError(f"{type(experiment).__name__} is no experiment")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(settings)!r} does not describe a model ({reason}); export it anew") from error
    return said | {"experiment": experiment}


def push_model(folder: Path, name: str) -> str:
    """Uploads a model folder to the Hub, into a private repository if it is a new one, and gives its address."""
    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a DiffusionBERT model")
    except Exception as error:  # no connection, no token, no such name: the model itself is safe
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"{name!r} was not pushed ({reason}); the model is in {str(folder)!r}, log in and try again"
        ) from None
    return str(address)


def add_conditioning(method: Method, folder: Path) -> None:
    """Gives a method the time embeddings of a model folder, if it has any of the same kind."""
    file = folder / "conditioning.safetensors"
    if file.exists() and isinstance(method.network, Denoiser):
        method.network.conditioning.load_state_dict(load_tensors(file))


def time_of(folder: Path) -> Time | None:
    """How the network of a model folder is told the time; None if it is a plain masked language model."""
    file = folder / "diffusionbert.json"
    return Time(read_json(file)["experiment"]["time"]) if file.exists() else None


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _card(method: Method, origin: Origin, standing: Any) -> str:
    experiment = origin.experiment
    weights = sum(parameter.numel() for parameter in method.network.parameters())
    opening = "opens with `AutoModelForMaskedLM`" if experiment.time is Time.NONE else "is told the time"
    kind = method.objective.likelihood.value
    training = experiment.training
    return f"""---
library_name: diffusionbert
pipeline_tag: fill-mask
tags: [diffusionbert, masked-lm, text-diffusion]
---
# A DiffusionBERT model

A masked language model of {weights / 1e6:.1f}M weights, trained with diffusionbert {__version__}; it {opening}.

| | |
|---|---|
| objective | `{experiment.objective}` |
| network | `{experiment.network}`, time: {experiment.time.value} |
| data | `{experiment.data.corpus}` (fingerprint {origin.data_fingerprint[:16]}) |
| training | {standing.best_step} of {training.steps} steps, {standing.tokens:,} tokens seen in all |
| held-out text | {standing.best:.4f} nats a token, kind: {kind}; at most {training.validation_sentences} sentences, \
{training.validation_draws} stratified draws each, special tokens not counted, length given |

It writes what its corpus was like, with that corpus's errors and biases, and knows nothing of truth.
"""
