"""The model folder that a run exports: a Hugging Face folder, plus what diffusion needs.

config.json  model.safetensors  tokenizer files      open with AutoModelForMaskedLM (a decoder: AutoModelForCausalLM)
                                                     and AutoTokenizer; the weights may be in several files, or in
                                                     model-int8.safetensors, which only this package opens
beside.safetensors                                   parameters outside the backbone: time embeddings, word vectors;
                                                     absent if there are none
diffusionbert.json  token_counts.safetensors         the run's configuration, token counts, length histogram and, for
                                                     uncased models, the usual letter case of words
README.md                                            the model card
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from typing_extensions import Unpack

from diffusionbert import __version__
from diffusionbert.data.corpus import parse_source
from diffusionbert.data.letter_case import NUM_CONTEXTS
from diffusionbert.data.sources import Source
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.absorbing import LearnedExponents
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.loading import FILES, Pretrained, is_causal
from diffusionbert.networks.lora import merged
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, ObjectiveConfig, TrainingModule
from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import atomic_folder, load_tensors, read_json, save_tensors, write_json
from diffusionbert.storage.hub import HubOptions, locate, quiet
from diffusionbert.storage.limits import Limit
from diffusionbert.storage.reader import FLOATS, INTEGERS, TensorRule, stored_tensors
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.storage.weights import WeightFormat, dequantized, reformat_weights
from diffusionbert.training.config import DataConfig, RunConfig
from diffusionbert.training.run_folder import RunFolder

BUNDLED = Path(str(files("diffusionbert"))) / "bundled"
"""The model inside the package, called "bundled"."""
RARE = 20
"""Words that occur less often than this in a text do not change what a model knows about their letter case."""
_NETWORK, _BACKBONE = "network.", "network.backbone."
_OPENS = "opens with `AutoModelFor{family}LM`"
_AFTER_LOADING = " after `diffusionbert.load(FOLDER).save_pretrained(OTHER)`, since its matrices are stored as int8"


@dataclass(frozen=True)
class ValidationRecord:
    """The validation of the exported parameters."""

    step: int
    likelihood: Likelihood
    nats_per_token: float | None = None
    loss_per_token: float | None = None
    """Replaces nats if there is no likelihood."""


@dataclass(frozen=True)
class ModelRecord:
    """What diffusionbert.json says besides the configuration."""

    version: str = __version__
    data_fingerprint: str | None = None
    training_text: tuple[str, ...] | None = None
    """Hashes of the training text."""
    paired: bool = False
    tokens_seen: int | None = None
    pretraining_tokens: int | None = None
    validation: ValidationRecord | None = None


@dataclass(frozen=True, eq=False)
class ModelMetadata:
    """What a model folder holds besides the parameters."""

    config: RunConfig
    vocabulary: Vocabulary
    statistics: TokenStatistics
    length_histogram: Tensor | None = None
    """How many sentences of the training corpus have n tokens; None if unknown."""
    data_fingerprint: str | None = None
    paired: bool = False
    """Whether the model was trained on pairs of source and target."""
    training_text: frozenset[str] | None = None
    """Hashes of the training text (`Source.contents`); None if unknown."""
    trained: RunConfig | None = None
    """The configuration as trained, including what it started from; None if unknown."""
    tokens_seen: int | None = None
    """The number of tokens trained on up to these parameters; None if unknown."""
    pretraining_tokens: int | None = None
    """The number of tokens that the network it started from was trained on; None if unknown."""
    source_lengths: Tensor | None = None
    """How often a source of n tokens has a target of m in the training corpus; None if unknown."""


def write_model(
    folder: Path,
    module: TrainingModule,
    weights: Mapping[str, Tensor],
    metadata: ModelMetadata,
    state: Any,
    form: WeightFormat,
) -> None:
    """Writes parameters, or their EMA, as a model folder."""
    with quiet():
        backbone_of(module).save_pretrained(folder, state_dict=_below(_BACKBONE, weights))
    reformat_weights(folder, form)
    beside = form.convert(_beside(_below(_NETWORK, weights)))
    if beside:
        save_tensors(beside, folder / "beside.safetensors")
    metadata.vocabulary.save(folder)
    tensors = {
        "counts": metadata.statistics.counts,
        "length_histogram": metadata.length_histogram,
        "source_lengths": metadata.source_lengths,
        "exponents": _exponents(module, weights),
        "letter_case": metadata.vocabulary.letter_case,
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_tensors(given, folder / "token_counts.safetensors")
    kind = module.objective.likelihood
    best, step = (state.best, state.best_step) if state.is_validated else (None, state.step)
    # As in the log: a loss is not called nats.
    figures = {"loss_per_token" if kind is Likelihood.NONE else "nats_per_token": best}
    record = ModelRecord(
        data_fingerprint=metadata.data_fingerprint,
        training_text=_text_hashes(metadata.config.data),
        paired=metadata.paired,
        tokens_seen=state.best_tokens if state.is_validated else state.tokens,
        pretraining_tokens=metadata.pretraining_tokens,
        validation=ValidationRecord(step, kind, **figures),
    )
    write_json(folder / "diffusionbert.json", {"config": metadata.config.to_json(), **to_json(record)})
    (folder / "README.md").write_text(_card(module, metadata, state, form), encoding="utf-8")


def training_source(data: DataConfig) -> Source:
    """Where the training text is; raises ValueError if it no longer exists."""
    return parse_source(data.corpus, data.fields)


def _text_hashes(data: DataConfig) -> tuple[str, ...] | None:
    """Hashes to recognize the training text, or a copy of it; None if it has no files."""
    try:
        contents = training_source(data).contents()
    except (OSError, ValueError):  # the text was removed in the meantime, but the model is good
        return None
    return None if contents is None else tuple(sorted(contents))


def backbone_of(module: TrainingModule) -> PreTrainedModel:
    """The Hugging Face model inside a network; every network has one (`networks.HasBackbone`)."""
    backbone = module.network.backbone
    assert isinstance(backbone, PreTrainedModel)
    return backbone


def token_statistics(vocabulary: Vocabulary, counts: Tensor, exponents: Tensor | None = None) -> TokenStatistics:
    """The statistics of a tokenizer and a corpus."""
    never_sampled = tuple(vocabulary.forbidden.nonzero()[:, 0].tolist())
    return TokenStatistics(vocabulary.mask_id, vocabulary.pad_id, vocabulary.allowed, never_sampled, counts, exponents)


def find_model(name: str, **options: Unpack[HubOptions]) -> Path:
    """The folder of a model: "bundled", a run directory, a model folder or a Hub name; downloads it if necessary."""
    if name == "bundled":
        return BUNDLED
    return RunFolder(Path(name)).find_model() or locate("model", name, "a run directory, a model folder", **options)


def find_start(name: str) -> Path:
    """The folder of a language model to start from, or the file of an original `.th` checkpoint."""
    return Path(name) if name.endswith(".th") else locate("language model", name, FILES)


def how_trained(start: str) -> tuple[RunConfig, ModelRecord] | None:
    """How a network to start from was trained; None if another program trained it."""
    file = find_start(start) / "diffusionbert.json"
    return _description(file) if file.exists() else None


def tokens_before(start: str | None) -> int | None:
    """The number of tokens that a network to start from was trained on: 0 for a new one (None), None if unknown."""
    if start is None:
        return 0
    if (known := how_trained(start)) is None:
        return None
    config, record = known
    before = 0 if config.backbone.pretrained is None else record.pretraining_tokens  # earlier versions did not store it
    return None if before is None or record.tokens_seen is None else before + record.tokens_seen


def is_diffusion_model(folder: Path) -> bool:
    """Whether a folder holds a model that this package trained with anything but masked-LM pretraining."""
    file = folder / "diffusionbert.json"
    return file.exists() and not _description(file)[0].objective.is_pretraining


def read_model(folder: Path) -> ModelMetadata:
    """Reads a folder written by `write_model`, or that of any masked or causal language model.

    A plain masked one generates without having been trained for it: order-agnostically, one token at a time.
    """
    causal = is_causal(folder)  # reads config.json first, whose faults would be blamed on the tokenizer
    vocabulary = Vocabulary.load(folder, with_mask=not causal)
    file, backbone = folder / "diffusionbert.json", Pretrained(str(folder))
    if not file.exists():
        name = "autoregressive" if causal else "order-agnostic"
        # Texts are read the way its tokenizer reads them: a cased model must see upper case.
        data = DataConfig("unknown", lower=vocabulary.lowers, max_length=sys.maxsize)
        config = RunConfig(data, backbone, objective=ObjectiveConfig.registry.get(name)())
        counts = torch.zeros(vocabulary.size, dtype=torch.long)
        return ModelMetadata(config, vocabulary, token_statistics(vocabulary, counts))
    config, record = _description(file)
    objective = config.objective
    tensors = _statistics(folder, vocabulary.size, objective.learns_exponents)
    if not bool(tensors["length_histogram"].any()):
        raise ValueError(
            f"{str(folder)!r} has a length_histogram of zeros in token_counts.safetensors; export it again"
        )
    if (table := tensors.get("source_lengths")) is not None:
        longest = int(table[:, :2].max())
        Limit.POSITIONS.require(longest, f"{str(folder)!r} has too long source_lengths", "export it again")
    if bool(tensors["counts"][~vocabulary.allowed].any()):
        raise ValueError(
            f"{str(folder)!r} has a tokenizer whose special tokens do not fit its token_counts.safetensors; restore "
            "the tokenizer that it was trained with"
        )
    vocabulary = replace(vocabulary, letter_case=tensors.get("letter_case"))
    is_conditioned = config.time is not TimeEmbedding.NONE
    if (objective.has_word_vectors or is_conditioned) and not (folder / "beside.safetensors").exists():
        what = "has its own word vectors" if objective.has_word_vectors else "is time-conditioned"
        raise ValueError(f"{str(folder)!r} {what}, but its beside.safetensors is missing; export it again")
    if objective.has_word_vectors or is_conditioned:
        _require_beside(folder / "beside.safetensors", config, vocabulary.size)
    return ModelMetadata(
        replace(config, backbone=backbone),
        vocabulary,
        token_statistics(vocabulary, tensors["counts"], tensors.get("exponents")),
        tensors["length_histogram"],
        record.data_fingerprint,
        record.paired,
        None if record.training_text is None else frozenset(record.training_text),
        config,
        record.tokens_seen,
        record.pretraining_tokens,
        tensors.get("source_lengths"),
    )


def _statistics(folder: Path, num_ids: int, has_exponents: bool) -> dict[str, Tensor]:
    """The tensors besides the weights; a network may have more exponents than its tokenizer has ids.

    Folders of earlier versions, and of models of text without natural case, have no letter case.
    """
    file = folder / "token_counts.safetensors"
    stored = stored_tensors(file).get("exponents")
    num_exponents = max(num_ids, stored.shape[0]) if stored is not None and stored.shape else num_ids
    return load_tensors(
        file,
        {
            "counts": TensorRule((num_ids,), INTEGERS, 0.0),
            "length_histogram": TensorRule((None,), INTEGERS, 0.0),
            "source_lengths": TensorRule((None, 3), INTEGERS, 0.0, is_required=False),
            "exponents": TensorRule((num_exponents,), FLOATS, 0.0, is_required=has_exponents),
            **_letter_case_rule(num_ids),
        },
    )


def _require_beside(file: Path, config: RunConfig, num_ids: int) -> None:
    """Refuses settings that claim larger tables outside the backbone than the file holds, before they are allocated."""
    held = sum(each.size for each in stored_tensors(file).values())
    has_table = config.time in (TimeEmbedding.PREFIX, TimeEmbedding.LAYERS_LEARNED)
    claimed = (config.objective.num_steps or 0) if has_table else 0
    if config.objective.has_word_vectors:
        claimed = num_ids * int(getattr(config.objective, "width", None) or 0)  # None: that of the backbone
    if claimed > held:
        raise ValueError(
            f"{str(file)!r} holds {held:,} values, but diffusionbert.json describes {claimed:,} and more; export again"
        )


def _letter_case_rule(num_ids: int) -> dict[str, TensorRule]:
    return {"letter_case": TensorRule((num_ids, 2, NUM_CONTEXTS), frozenset(["U8"]), is_required=False)}


def started_letter_case(own: Tensor | None, counts: Tensor, folder: Path) -> Tensor | None:
    """The letter case learned from a text; for words that are rare in it, that of the model to start from."""
    file = folder / "token_counts.safetensors"
    start = load_tensors(file, _letter_case_rule(len(counts))).get("letter_case") if file.exists() else None
    if own is None or start is None:
        return start if own is None else own
    return torch.where((counts < RARE)[:, None, None], start, own)


def _description(file: Path) -> tuple[RunConfig, ModelRecord]:
    """The configuration in diffusionbert.json, and everything else in it."""
    try:
        plain = read_json(file)
        if not isinstance(plain, dict):
            raise ValueError("it must be an object")
        config = next((plain.pop(key) for key in ("config", "experiment") if key in plain), None)
        return RunConfig.from_json(config, "config"), from_json(plain, ModelRecord, file.name)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} does not describe a model ({reason_of(error)}); export it again") from error


def save_model(network: nn.Module, vocabulary: Vocabulary, source: Path, target: Path, form: WeightFormat) -> Path:
    """Writes a loaded model, with its parameters as they are now, as a new model folder.

    Args:
        network: The network; it has the attributes of `networks.HasBackbone`.
        vocabulary: Its tokenizer.
        source: The folder that it was loaded from.
        target: A new or empty directory.
        form: How its weights are stored.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} exists and is not an empty directory; choose another")
    backbone = network.backbone
    assert isinstance(backbone, PreTrainedModel)
    with atomic_folder(target) as folder, quiet():
        backbone.save_pretrained(folder)
        reformat_weights(folder, form)
        vocabulary.save(folder)
        beside = {name: tensor.detach().cpu() for name, tensor in _beside(dict(network.named_parameters())).items()}
        if beside:
            save_tensors(form.convert(beside), folder / "beside.safetensors")
        for name in ("diffusionbert.json", "token_counts.safetensors"):
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        if (source / "README.md").exists():
            card = (source / "README.md").read_text(encoding="utf-8").replace(_AFTER_LOADING, "")
            for opening in (_OPENS.format(family=family) for family in ("Masked", "Causal")):
                card = card.replace(opening, opening + _AFTER_LOADING * (form.precision == "int8"))
            (folder / "README.md").write_text(card, encoding="utf-8")
    return target


def push_model(folder: Path, name: str) -> str:
    """Uploads a model folder to the Hub, to a private repository if it is new, and returns its address."""
    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a DiffusionBERT model")
    except Exception as error:  # no connection, no token, no such name: the model itself is safe
        raise OSError(f"{name!r} was not pushed ({reason_of(error)}); log in and try again") from None
    return str(address)


def restore_beside(network: nn.Module, folder: Path, config: RunConfig) -> None:
    """Copies the parameters outside the backbone from a model folder, if it has some of the same kind."""
    file, description = folder / "beside.safetensors", folder / "diffusionbert.json"
    if not file.exists() or not description.exists():
        return
    earlier, _ = _description(description)
    has_same_vectors = earlier.objective.has_word_vectors == config.objective.has_word_vectors
    if earlier.time is not config.time or not has_same_vectors:
        return
    for name, each in stored_tensors(file).items():
        if each.dtype not in {*FLOATS, "I8"}:
            raise ValueError(f"{str(file)!r} stores {name} as {each.dtype}, but floats are expected; export it again")
    stored, own = dequantized(load_tensors(file), str(file)), _beside(dict(network.named_parameters()))
    if {name: weight.shape for name, weight in own.items()} != {name: weight.shape for name, weight in stored.items()}:
        raise ValueError(f"{str(file)!r} does not fit this network; use the settings it was trained with")
    if not all(bool(weight.isfinite().all()) for weight in stored.values()):
        raise ValueError(f"{str(file)!r} has values that are not finite; export it again")
    with torch.no_grad():
        for name, weight in stored.items():
            own[name].copy_(weight)


def learned_exponents(folder: Path) -> Tensor | None:
    """The exponents of a model folder whose schedule was learned; None if it was not."""
    file = folder / "token_counts.safetensors"
    rule = {"exponents": TensorRule((None,), FLOATS, 0.0, is_required=False)}
    return load_tensors(file, rule).get("exponents") if file.exists() else None


def _beside(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a network outside its backbone."""
    return {name: weight for name, weight in weights.items() if not name.startswith("backbone.")}


def _exponents(module: TrainingModule, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The learned exponent of each token, if the objective learns any."""
    for name, part in module.named_modules():
        if isinstance(part, LearnedExponents):
            found: Tensor = functional_call(part, {"logits": weights[f"{name}.logits"]}, ())
            return found
    return None


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _card(module: TrainingModule, metadata: ModelMetadata, state: Any, form: WeightFormat) -> str:
    config, objective = metadata.config, metadata.config.objective
    num_parameters = sum(weight.numel() for weight in merged(dict(module.network.named_parameters())).values())
    family = "causal" if objective.is_causal else "masked"
    opening = _OPENS.format(family=family.title())
    if _beside(dict(module.network.named_parameters())):
        opening = "has parameters outside its backbone, so it opens only with diffusionbert"
    elif form.precision == "int8":
        opening += _AFTER_LOADING
    kind, training = module.objective.likelihood, config.training
    unit = f"nats per token, kind: {kind.value}"
    if kind is Likelihood.NONE:
        unit = "of loss per token; there is no likelihood"
    step = state.best_step if state.is_validated else state.step
    validation = "not validated: training was stopped before the first validation"
    if state.is_validated:
        validation = (
            f"{state.best:.4f} {unit}; at most {training.validation_sentences} sentences, "
            f"{training.validation_draws} stratified draws each, special tokens not counted, length given"
        )
    return f"""---
library_name: diffusionbert
pipeline_tag: {"fill-mask" if objective.generates_on_masks else "text-generation"}
tags: [diffusionbert, {family}-lm]
---
# A DiffusionBERT model

A {family} language model of {num_parameters / 1e6:.1f}M parameters, trained with diffusionbert {__version__}. It
{opening}.

| | |
|---|---|
| objective | {objective} |
| time embedding | {config.time.value} |
| backbone | {str(config.backbone).replace(str(BUNDLED), "bundled")} |
| data | `{config.data.corpus}` (fingerprint {(metadata.data_fingerprint or "unknown")[:16]}) |
| training | {step} of {training.steps} steps, {state.tokens:,} tokens seen in all |
| validation text | {validation} |

It generates text like its training corpus, with that corpus's errors and biases, and has no notion of truth.
"""
