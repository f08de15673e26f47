"""The model that a run leaves behind: a Hugging Face folder with what diffusion needs beside it.

config.json  model.safetensors  tokenizer files      open with AutoModelForMaskedLM (a decoder: AutoModelForCausalLM)
                                                     and AutoTokenizer
beside.safetensors                                   what the network has beside its backbone: time embeddings, word
                                                     vectors; not there if it has nothing
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
from torch.func import functional_call
from transformers import PreTrainedModel

from diffusionbert import __version__
from diffusionbert.building import Lexicon, writes_on_masks
from diffusionbert.checkpoints import load_tensors, read_json, save_tensors, write_json
from diffusionbert.errors import reason_of
from diffusionbert.experiments import (
    AnyOrderWriting,
    Data,
    Experiment,
    LearnedDiffusion,
    NextWord,
    Pretrained,
    Time,
    VectorDiffusion,
    from_json,
    to_json,
)
from diffusionbert.hub import quiet
from diffusionbert.method import Likelihood, Method
from diffusionbert.networks import is_causal
from diffusionbert.processes import LearnedExponents
from diffusionbert.text.corpus import parse_source
from diffusionbert.text.sources import Source
from diffusionbert.text.vocabulary import Vocabulary

_NETWORK, _BACKBONE = "network.", "network.backbone."


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
    with quiet():
        backbone_of(method).save_pretrained(folder, state_dict=_below(_BACKBONE, weights))
    beside = _beside(weights)
    if beside:
        save_tensors(beside, folder / "beside.safetensors")
    origin.vocabulary.save(folder)
    frequencies = {"counts": origin.lexicon.counts, "length_histogram": origin.length_histogram}
    exponents = _exponents(method, weights)
    if exponents is not None:
        frequencies["exponents"] = exponents
    save_tensors(frequencies, folder / "token_counts.safetensors")
    kind = method.objective.likelihood
    best, step = (standing.best, standing.best_step) if standing.is_validated else (None, standing.step)
    write_json(
        folder / "diffusionbert.json",
        {
            "version": __version__,
            "experiment": to_json(origin.experiment),
            "data_fingerprint": origin.data_fingerprint,
            "training_text": _known_contents(origin.experiment.data),
            "paired": origin.paired,
            "tokens_seen": standing.best_tokens if standing.is_validated else standing.tokens,
            "validation": {
                # As in the log: a loss is not called nats.
                "loss_per_token" if kind is Likelihood.NONE else "nats_per_token": best,
                "step": step,
                "likelihood": kind.value,
            },
        },
    )
    (folder / "README.md").write_text(_card(method, origin, standing), encoding="utf-8")


def training_source(data: Data) -> Source:
    """Where the text of an experiment lies; raises ValueError if it is not to be found any more."""
    return parse_source(data.corpus, [field for field in (data.field, data.target_field) if field])


def _known_contents(data: Data) -> list[str] | None:
    """The hashes by which the training text is known again, also as a copy; None if it has no files."""
    try:
        contents = training_source(data).contents()
    except (OSError, ValueError):  # the text was removed in the meantime; the model is not lost for that
        return None
    return None if contents is None else sorted(contents)


def backbone_of(method: Method) -> PreTrainedModel:
    """The Hugging Face model inside a method's network; every network has one (`networks.Backed`)."""
    backbone = method.network.backbone
    assert isinstance(backbone, PreTrainedModel)
    return backbone


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
    training_text: frozenset[str] | None
    """Hashes of the text it was trained on (`Source.contents`); None if the model does not say."""
    trained: Experiment | None = None
    """The experiment as it was trained, its start included; None if the model does not say."""
    tokens_seen: int | None = None


def lexicon_of(vocabulary: Vocabulary, counts: Tensor, exponents: Tensor | None = None) -> Lexicon:
    """What a method must know of a vocabulary and a corpus."""
    forbidden = tuple(vocabulary.forbidden.nonzero()[:, 0].tolist())
    return Lexicon(vocabulary.mask_id, vocabulary.pad_id, vocabulary.writable, forbidden, counts, exponents)


def read_model(folder: Path) -> Opened:
    """Reads a folder that `write_model` wrote, or that of any masked or causal language model.

    A plain masked one writes without having been trained for it: in any order, one token at a time.
    """
    vocabulary = Vocabulary.load(folder)
    settings = folder / "diffusionbert.json"
    network = Pretrained(str(folder))
    if not settings.exists():
        objective = NextWord() if is_causal(folder) else AnyOrderWriting()
        # Texts are read as its tokenizer reads them: a cased model must see upper case.
        data = Data("unknown", lower=vocabulary.lowers, max_length=sys.maxsize)
        experiment = Experiment(data, network, objective=objective)
        counts = torch.zeros(vocabulary.size, dtype=torch.long)
        return Opened(folder, experiment, vocabulary, lexicon_of(vocabulary, counts), None, False, None)
    said = _described(settings)
    experiment = replace(said["experiment"], network=network)
    frequencies = load_tensors(folder / "token_counts.safetensors")
    _require_frequencies(folder, frequencies, vocabulary.size, isinstance(experiment.objective, LearnedDiffusion))
    has_vectors = isinstance(experiment.objective, VectorDiffusion)
    if (has_vectors or experiment.time is not Time.NONE) and not (folder / "beside.safetensors").exists():
        what = "has its own word vectors" if has_vectors else "is told the time"
        raise ValueError(f"{str(folder)!r} {what}, but its beside.safetensors is missing; export it anew")
    lexicon = lexicon_of(vocabulary, frequencies["counts"], frequencies.get("exponents"))
    paired = bool(said.get("paired", False))
    hashes = said.get("training_text")
    training_text = None if hashes is None else frozenset(map(str, hashes))
    return Opened(
        folder,
        experiment,
        vocabulary,
        lexicon,
        frequencies["length_histogram"],
        paired,
        training_text,
        said["experiment"],
        said.get("tokens_seen"),
    )


def _require_frequencies(folder: Path, found: Mapping[str, Tensor], num_ids: int, has_exponents: bool) -> None:
    """Refuses what lacks a tensor, or has one for another vocabulary: the rates of a network may be more than its
    tokenizer's ids.
    """
    needed = {"counts", "length_histogram"} | ({"exponents"} if has_exponents else set())
    is_fitting = needed <= found.keys() and len(found["counts"]) == num_ids
    if not is_fitting or (has_exponents and len(found["exponents"]) < num_ids):
        raise ValueError(
            f"{str(folder)!r} lacks {', '.join(sorted(needed))} of {num_ids} tokens in token_counts.safetensors; "
            "export it anew"
        )


def _described(settings: Path) -> dict[str, Any]:
    """What diffusionbert.json says, its experiment read."""
    try:
        said = dict(read_json(settings))
        experiment = from_json(said["experiment"])
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
        raise OSError(
            f"{name!r} was not pushed ({reason_of(error)}); the model is in {str(folder)!r}, log in and try again"
        ) from None
    return str(address)


def restore_beside(method: Method, folder: Path, experiment: Experiment) -> None:
    """Gives a method what a model folder has beside the backbone, if it is there and of the same kind."""
    file, settings = folder / "beside.safetensors", folder / "diffusionbert.json"
    if not file.exists() or not settings.exists():
        return
    said: Experiment = _described(settings)["experiment"]
    has_vectors = [isinstance(one.objective, VectorDiffusion) for one in (said, experiment)]
    if said.time is not experiment.time or has_vectors[0] != has_vectors[1]:
        return
    stored = load_tensors(file)
    own = _beside(dict(method.named_parameters()))
    if {name: weight.shape for name, weight in own.items()} != {name: weight.shape for name, weight in stored.items()}:
        raise ValueError(f"{str(file)!r} does not fit this network: take the settings it was trained with")
    with torch.no_grad():
        for name, weight in stored.items():
            own[name].copy_(weight)


def learned_exponents(folder: Path) -> Tensor | None:
    """The rates of hiding that a model folder's method has learned; None if it has not."""
    file = folder / "token_counts.safetensors"
    return load_tensors(file).get("exponents") if file.exists() else None


def _beside(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a method's network that are not its backbone's."""
    return {name: weight for name, weight in _below(_NETWORK, weights).items() if not name.startswith("backbone.")}


def _exponents(method: Method, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The learned rate of each token, if the method learns any."""
    for name, module in method.named_modules():
        if isinstance(module, LearnedExponents):
            found: Tensor = functional_call(module, {"logits": weights[f"{name}.logits"]}, ())
            return found
    return None


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _card(method: Method, origin: Origin, standing: Any) -> str:
    experiment = origin.experiment
    weights = sum(parameter.numel() for parameter in method.network.parameters())
    is_decoder = isinstance(experiment.objective, NextWord)
    family = "causal" if is_decoder else "masked"
    opening = f"opens with `AutoModelFor{'Causal' if is_decoder else 'Masked'}LM`"
    if _beside(dict(method.named_parameters())):
        opening = "has weights beside its backbone, and opens with diffusionbert alone"
    kind = method.objective.likelihood
    unit = "of loss a token; there is no likelihood" if kind is Likelihood.NONE else f"nats a token, kind: {kind.value}"
    training = experiment.training
    step = standing.best_step if standing.is_validated else standing.step
    held_out = "not validated: training was stopped before"
    if standing.is_validated:
        held_out = (
            f"{standing.best:.4f} {unit}; at most {training.validation_sentences} sentences, "
            f"{training.validation_draws} stratified draws each, special tokens not counted, length given"
        )
    return f"""---
library_name: diffusionbert
pipeline_tag: {"fill-mask" if writes_on_masks(experiment) else "text-generation"}
tags: [diffusionbert, {family}-lm]
---
# A DiffusionBERT model

A {family} language model of {weights / 1e6:.1f}M weights, trained with diffusionbert {__version__}; it {opening}.

| | |
|---|---|
| objective | `{experiment.objective}` |
| network | `{experiment.network}`, time: {experiment.time.value} |
| data | `{experiment.data.corpus}` (fingerprint {origin.data_fingerprint[:16]}) |
| training | {step} of {training.steps} steps, {standing.tokens:,} tokens seen in all |
| held-out text | {held_out} |

It writes what its corpus was like, with that corpus's errors and biases, and knows nothing of truth.
"""
