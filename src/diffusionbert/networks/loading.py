"""Where backbones come from: new networks, Hugging Face models (safetensors only), and `.th` files of the original
release (He et al. 2022).

Files are not trusted: no code in them ever runs, and sizes are checked before anything is allocated. Errors are one
line.
"""

from __future__ import annotations

import logging
import re
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from diffusionbert.networks.lora import CONFIG as ADAPTER
from diffusionbert.networks.lora import apply_adapter, base_of, is_adapter
from diffusionbert.registry import Registry, describe, register
from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import read_json
from diffusionbert.storage.hub import locate, not_found, quiet
from diffusionbert.storage.limits import Limit, memory_bytes, require_regular
from diffusionbert.storage.reader import FLOATS, StoredTensor, foreign, stored_tensors
from diffusionbert.storage.weights import load_int8, weight_files

logger = logging.getLogger(__name__)
FILES = "a folder with config.json and model.safetensors"  # what a model is opened from, for error messages


# ---- backbones of a run ---------------------------------------------------------------------------------------------


class BackboneConfig(ABC):
    """Where a run's backbone comes from."""

    registry: ClassVar[Registry[BackboneConfig]] = Registry(
        "backbone", "diffusionbert.backbones", "diffusionbert.networks.loading"
    )

    @abstractmethod
    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """Makes the backbone.

        Args:
            vocab_size: The number of ids of the tokenizer.
            max_positions: The number of positions of a new network; a pretrained one has its own.
            pad_id: The padding id.
            causal: Whether the objective needs a causal language model rather than a masked one.
        """

    @property
    def pretrained(self) -> str | None:
        """The folder or Hub name that the parameters come from; None if they are new."""
        return None

    def as_causal(self) -> BackboneConfig:
        """The causal language model of the same size."""
        return self

    def __str__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class NewNetwork(BackboneConfig):
    """A network with random parameters."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of a network must be 1 or more, got {getattr(self, name)}")
        Limit.LAYERS.require(self.layers, "`layers` of a network are too many", "give fewer")
        if self.width % self.heads:
            raise ValueError(
                f"`width` must be a multiple of `heads`, got width {self.width} and {self.heads} heads; give a number "
                "of heads that divides the width"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must lie in [0, 1), got {self.dropout}")

    label: ClassVar[str]
    """The architecture's name in messages."""
    is_causal: ClassVar[bool] = False

    @abstractmethod
    def config(self, vocab_size: int, max_positions: int, pad_id: int) -> PreTrainedConfig:
        """The configuration of transformers' class."""

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        if causal != self.is_causal:
            remedy = "the objective autoregressive (--system decoder) with it"
            needed, use = ("causal", f"{type(self.as_causal()).__name__}()") if causal else ("masked", remedy)
            raise ValueError(f"this objective needs a {needed} language model, got a new {self.label}; use {use}")
        kind, config = _CAUSAL if causal else _MASKED, self.config(vocab_size, max_positions, pad_id)
        with foreign(lambda error: ValueError(f"a {self.label} of `width` {self.width} cannot be made: {error}")):
            size, memory = 4 * _num_described(kind, config, 100 * self.layers), memory_bytes()
        if size > memory:
            raise ValueError(
                f"a {self.label} of {self.layers} layers and `width` {self.width} takes {size:,} bytes, and this "
                f"machine has {memory:,.0f}; make it smaller"
            )
        return _new(kind.auto, config)


@register("bert")
@dataclass(frozen=True)
class NewBert(NewNetwork):
    """A BERT with random parameters."""

    label = "BERT"

    def config(self, vocab_size: int, max_positions: int, pad_id: int) -> PreTrainedConfig:
        return transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=max_positions,
            pad_token_id=pad_id,
        )

    def as_causal(self) -> BackboneConfig:
        return NewDecoder(*astuple(self))


@register("gpt2")
@dataclass(frozen=True)
class NewDecoder(NewNetwork):
    """A GPT-2 with random parameters and tied embeddings; its layers are the same size as BERT's."""

    label = "GPT-2"
    is_causal = True

    def config(self, vocab_size: int, max_positions: int, pad_id: int) -> PreTrainedConfig:
        return transformers.GPT2Config(
            vocab_size=vocab_size,
            n_positions=max_positions,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_inner=4 * self.width,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            pad_token_id=pad_id,
            bos_token_id=None,
            eos_token_id=None,
        )


@register("modernbert")
@dataclass(frozen=True)
class NewModernBert(NewNetwork):
    """A ModernBERT with random parameters: norms before the layers, rotary positions, gated MLPs, global attention."""

    label = "ModernBERT"

    def config(self, vocab_size: int, max_positions: int, pad_id: int) -> PreTrainedConfig:
        absent = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
        settings = _modern_settings(self, vocab_size, max_positions, pad_id) | absent
        return transformers.ModernBertConfig(**settings)

    def as_causal(self) -> BackboneConfig:
        return NewModernBertDecoder(*astuple(self))


@register("modernbert-decoder")
@dataclass(frozen=True)
class NewModernBertDecoder(NewNetwork):
    """A ModernBERT that only attends to the left: the same layers, parameters and head as `NewModernBert`."""

    label = "ModernBERT decoder"
    is_causal = True

    def config(self, vocab_size: int, max_positions: int, pad_id: int) -> PreTrainedConfig:
        # Three of them must not be None, and nothing here reads them.
        unused = {"eos_token_id": None, "bos_token_id": pad_id, "cls_token_id": pad_id, "sep_token_id": pad_id}
        settings = _modern_settings(self, vocab_size, max_positions, pad_id) | unused
        return transformers.ModernBertDecoderConfig(**settings)


def _modern_settings(size: NewNetwork, vocab_size: int, max_positions: int, pad_id: int) -> dict[str, Any]:
    # A gated MLP has three matrices. At 8/3 of the hidden size it is as large as BERT's two at 4 times that size.
    multiple = 64 if size.width >= 256 else 8
    return {
        "vocab_size": vocab_size,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": max(1, round(8 * size.width / 3 / multiple)) * multiple,
        "max_position_embeddings": max_positions,
        "pad_token_id": pad_id,
        "global_attn_every_n_layers": 1,
        **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), size.dropout),
    }


_FAMILIES: dict[str, type[NewNetwork]] = {"bert": NewBert, "modern": NewModernBert}


def of_family(backbone: BackboneConfig, family: str) -> BackboneConfig:
    """The same network in another family: equally large, and causal if `backbone` is.

    Args:
        backbone: A network with random parameters.
        family: `bert` (causal: GPT-2) or `modern` (ModernBERT).
    """
    if family not in _FAMILIES:
        raise ValueError(f"unknown family of backbones {family!r}; known: {', '.join(_FAMILIES)}")
    if not isinstance(backbone, NewNetwork):
        raise ValueError(f"a family can be chosen for new networks only, got {backbone}; leave out --backbone")
    made = _FAMILIES[family](*astuple(backbone))
    return made.as_causal() if backbone.is_causal else made


@register("pretrained")
@dataclass(frozen=True)
class Pretrained(BackboneConfig):
    """A masked language model (a causal one for a causal objective) from a folder or the Hub, or an original `.th`."""

    name_or_path: str

    @property
    def pretrained(self) -> str | None:
        return self.name_or_path

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """Opens the model; a causal one gets embeddings for ids that were added to its tokenizer."""
        path = self.name_or_path
        if causal:
            return extend_vocabulary(load_causal_lm(path), vocab_size)
        return load_legacy_checkpoint(Path(path)) if path.endswith(".th") else load_masked_lm(path)


@register("provided")
@dataclass(frozen=True)
class Provided(BackboneConfig):
    """A `PreTrainedModel` that was given to `train` as an object."""

    architecture: str  # the name of its class

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        raise ValueError(f"the backbone {self.architecture} was given as an object; give it again as `backbone=…`")


def extend_vocabulary(backbone: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """Adds embeddings for ids that were added to a decoder's tokenizer, such as `[MASK]` and `[PAD]`.

    They are random, which does no harm: such tokens are never allowed, and never come before a target position.
    """
    if backbone.config.vocab_size < vocab_size:
        # Mean resizing would compute the covariance of the whole table and warn about it.
        backbone.resize_token_embeddings(vocab_size, mean_resizing=False)
    return backbone


def _new(auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    return model


# ---- Hugging Face models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A kind of language model, and the transformers class that opens it."""

    name: str
    auto: Any
    examples: str

    def includes(self, config: PreTrainedConfig) -> bool:
        """Whether a config is of this kind; a BERT could be run as a decoder, but was not trained as one."""
        is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked
        return not config.is_encoder_decoder and (is_masked if self is _MASKED else is_causal)

    def class_of(self, config: PreTrainedConfig) -> Any:
        """The transformers class for a config of this kind."""
        masked, causal = transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        return (masked if self is _MASKED else causal)[type(config)]


_ENCODERS = "a BERT-like encoder (bert, roberta, electra, distilbert, modernbert, deberta-v2, …)"
_MASKED = _Kind("masked language model", transformers.AutoModelForMaskedLM, _ENCODERS)
_DECODERS = "a decoder (gpt2, opt, llama, qwen2, …)"
_CAUSAL = _Kind("causal language model", transformers.AutoModelForCausalLM, _DECODERS)


def load_masked_lm(name_or_folder: str | Path) -> PreTrainedModel:
    """Opens a masked language model in float32, from a folder or by its Hub name.

    An encoder without a head gets a randomly initialized one, with a warning; an encoder with missing weights is
    refused. Only safetensors are read, because a pickle can run code.
    """
    return _load(_MASKED, name_or_folder)


def load_causal_lm(name_or_folder: str | Path) -> PreTrainedModel:
    """Opens a causal language model, such as GPT-2, in the same way."""
    return _load(_CAUSAL, name_or_folder)


def require_reopenable(backbone: PreTrainedModel) -> None:
    """Refuses a model that, once saved, could not be opened again without remote code.

    A user's own class can be opened if `AutoConfig.register` and `AutoModelForMaskedLM.register` (or
    `AutoModelForCausalLM.register`) were called for it in the process that opens it.
    """
    config, own, configs = backbone.config, type(backbone), transformers.CONFIG_MAPPING
    kind = next((kind for kind in (_MASKED, _CAUSAL) if kind.includes(config)), None)
    is_known = config.model_type in configs and configs[config.model_type] is type(config)
    if kind is None or not is_known:
        config_name = type(config).__name__
        raise ValueError(
            f"a saved {own.__name__} could not be opened again, since transformers does not know {config_name} "
            f"(model type {config.model_type!r}): call AutoConfig.register({config.model_type!r}, {config_name}) and "
            f"AutoModelForMaskedLM.register({config_name}, {own.__name__}) first"
        )
    opened = kind.class_of(config)
    if opened is not own:
        raise ValueError(
            f"a saved {own.__name__} would be opened again as a {opened.__name__}: give it a config class with a model "
            f"type of its own, and register both with AutoConfig and {kind.auto.__name__}"
        )


def new_lm(folder: Path, stored: Mapping[str, StoredTensor]) -> PreTrainedModel:
    """Makes the language model that a folder's config.json describes, randomly initialized.

    Args:
        folder: A folder with a config.json.
        stored: The tensors that its parameters will be set to, to check the size that config.json claims.
    """
    kind = _CAUSAL if is_causal(folder) else _MASKED
    config = _config(kind, folder, folder)
    with foreign(lambda error: _unreadable(kind, folder, folder, error)):
        described = _num_described(kind, config, len(stored))
    _require_size(folder, described, stored)
    with foreign(lambda error: _unreadable(kind, folder, folder, error)):
        return _new(kind.auto, config)


def is_causal(folder: Path) -> bool:
    """Whether a folder holds a causal language model."""
    return _CAUSAL.includes(_read_config(_CAUSAL, folder, folder))


def _load(kind: _Kind, name_or_folder: str | Path) -> PreTrainedModel:
    if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
        raise ValueError(f"no folder {str(name_or_folder)!r}: give a model's folder, or its Hub name as a string")
    folder = locate(kind.name, name_or_folder, FILES)
    if is_adapter(folder):
        return _load_adapted(kind, folder)
    if (folder / ADAPTER).exists():  # where PEFT is installed, transformers would apply it unchecked
        raise ValueError(
            f"{str(name_or_folder)!r} has weights and an {ADAPTER}, so it is not clear what it is; remove one of them"
        )
    model: PreTrainedModel
    with quiet():
        config = _config(kind, name_or_folder, folder)
        with foreign(lambda error: _unreadable(kind, name_or_folder, folder, error)):
            stored = {name: each for file in weight_files(folder) for name, each in stored_tensors(file).items()}
            described = _num_described(kind, config, len(stored))
        weights = load_int8(folder)
        # Of int8 weights, those with a scale have been converted to floats by now.
        _require_floats(folder, {name: one for name, one in stored.items() if weights is None or one.dtype != "I8"})
        _require_size(folder, described, stored)
        opener, source = (kind.auto, str(folder)) if weights is None else (kind.class_of(config), None)
        with foreign(lambda error: _unreadable(kind, name_or_folder, folder, error)):
            model, report = opener.from_pretrained(
                source,
                state_dict=weights,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    missing = sorted(report["missing_keys"])
    random = [key for key in missing if key.startswith(f"{model.base_model_prefix}.")]
    random += sorted(key for key, *_ in report["mismatched_keys"])
    if random:
        raise ValueError(
            f"{str(name_or_folder)!r} is not a complete {type(model).__name__}: {len(random)} weights are missing or "
            f"have another shape, {random[0]} first; use a complete checkpoint whose config.json fits its weights"
        )
    _require_all_layers(name_or_folder, model, report["unexpected_keys"])
    if broken := next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None):
        raise ValueError(f"{str(name_or_folder)!r} has values in {broken} that are not finite; export it again")
    _require_usable(name_or_folder, model)
    if missing:
        message = "%s has no %s head; it gets a randomly initialized one, to be trained: %s"
        logger.warning(message, name_or_folder, kind.name.replace(" ", "-"), ", ".join(missing))
    return model


def _load_adapted(kind: _Kind, folder: Path) -> PreTrainedModel:
    """Opens the model that an adapter was trained from, with the adapter added to its weights."""
    base = base_of(folder)
    start = locate(kind.name, base, FILES)
    if is_adapter(start):
        raise ValueError(f"{base!r}, the base model of {str(folder)!r}, is itself an adapter; merge one of them")
    model = _load(kind, str(start))
    apply_adapter(model, folder)
    return model


def _num_described(kind: _Kind, config: PreTrainedConfig, num_stored: int) -> int:
    """The number of values in the network that a config describes, without allocating any of them.

    Raises ValueError as soon as there are many more modules than stored tensors: a config may claim any number of
    layers, experts or groups of layers, whatever the architecture calls them.
    """
    own, left = threading.get_ident(), 10_000 + 20 * num_stored

    def count(*_: object) -> None:
        nonlocal left
        left -= threading.get_ident() == own
        if left < 0:
            raise ValueError(f"config.json describes a network of many more parts than the {num_stored} tensors stored")

    handle = register_module_module_registration_hook(count)
    try:
        with torch.device("meta"):
            model = _new(kind.auto, config)
    finally:
        handle.remove()
    return sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _require_size(folder: Path, described: int, stored: Mapping[str, StoredTensor]) -> None:
    """Refuses a config that claims a much larger network than the files hold; a head or a tied matrix may be absent."""
    found = sum(each.size for each in stored.values())
    if stored and described > 4 * found + 10**6:
        raise ValueError(
            f"{str(folder)!r} is not complete: config.json describes {described:,} weights, but the files hold "
            f"{found:,}; use a complete checkpoint whose config.json fits its weights"
        )


@torch.no_grad()
def _require_usable(name: str | Path, model: PreTrainedModel) -> None:
    """Runs the model on three tokens, to catch settings that no computation accepts and weights that overflow."""

    def refusal(error: BaseException) -> ValueError:
        return ValueError(f"{str(name)!r} cannot compute ({reason_of(error)}); restore its config.json and weights")

    with quiet(), foreign(refusal):
        logits = model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
        if not logits.isfinite().all():
            raise ValueError("its log-probabilities are not finite")


_NUMBERED = re.compile(r"(.*?\.\d+)\.")
"""A parameter's name, up to the number of its layer."""


def _require_all_layers(name: str | Path, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Refuses files with more layers than the config says: without the extra ones, it would be another model."""
    own = {found[1] for key, _ in model.named_parameters() if (found := _NUMBERED.match(key))}
    more = sorted(found[1] for key in unexpected if (found := _NUMBERED.match(key)) and found[1] not in own)
    if more:
        raise ValueError(
            f"{str(name)!r} has weights of {more[0]}, which config.json does not describe; restore its config.json"
        )


def _config(kind: _Kind, name_or_folder: str | Path, folder: Path) -> PreTrainedConfig:
    """Reads the config and refuses models of another kind."""
    config = _read_config(kind, name_or_folder, folder)
    if not kind.includes(config):
        raise ValueError(
            f"{str(name_or_folder)!r} has the model type {config.model_type!r}, which is not a {kind.name}: "
            f"use {kind.examples}"
        )
    if kind is _MASKED and getattr(config, "is_decoder", False):
        raise ValueError(f"{str(name_or_folder)!r} sets is_decoder, so it would only attend left; restore config.json")
    return config


def _read_config(kind: _Kind, name_or_folder: str | Path, folder: Path) -> PreTrainedConfig:
    require_sound_config(folder)
    with quiet(), foreign(lambda error: _unreadable(kind, name_or_folder, folder, error)):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        # A file must not choose how to compute: it could name kernels on the Hub, or weights that were not checked.
        config._attn_implementation = config._experts_implementation = None
        vars(config).pop("transformers_weights", None)
        return config


def require_sound_config(folder: Path) -> None:
    """Refuses a config.json that is damaged, or whose numbers would take all memory as soon as it is read."""
    file = folder / "config.json"
    if not file.exists():
        return
    plain = read_json(file)
    if not isinstance(plain, dict) or not isinstance(plain.get("model_type", ""), str):
        raise ValueError(f"{str(file)!r} must be an object with a model_type; restore it, or copy the model again")
    if plain.get("quantization_config"):
        raise ValueError(
            f"{str(file)!r} has a quantization_config: dequantize the model with the library that quantized it"
        )
    configs, number = [plain], 0
    for one in configs:  # a config may have others inside
        configs += [value for value in one.values() if isinstance(value, dict)]
        number += len(one)
        if number > _MOST_SETTINGS:
            raise ValueError(f"{str(file)!r} has more than {_MOST_SETTINGS:,} settings, far too many; restore it")
        for name, value in one.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, int) and not isinstance(each, bool):
                    _require_sound_number(file, name, each)


_MOST_SETTINGS = 50_000
"""Includes labels, each of which has two settings."""


def _require_sound_number(file: Path, name: str, value: int) -> None:
    if re.search(r"(^|_)(layers?|depths|repeats|block_sizes)$", name):
        Limit.LAYERS.require(value, f"{str(file)!r} has too many layers ({name})", "restore it")
    is_depth = name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
    if (is_depth and value < 1) or abs(value) >= 1 << 62:
        raise ValueError(f"{str(file)!r} has {name} {str(value)[:40]}, which no network has; restore it")
    if name == "num_labels":
        Limit.TOKENS.require(value, f"{str(file)!r} has too many labels ({name})", "restore it")


def _unreadable(kind: _Kind, name_or_folder: str | Path, folder: Path, error: BaseException) -> ValueError:
    damaged = next(filter(_is_damaged, sorted(folder.glob("*.safetensors"))), None)
    if damaged is not None:
        return ValueError(f"{str(damaged)!r} is damaged ({reason_of(error)}): copy the whole file again")
    if any(folder.glob("pytorch_model*.bin")):
        return ValueError(
            f"{str(name_or_folder)!r} stores its weights as pickles, which can run code and are never loaded: "
            "convert them to model.safetensors where you trust them (from_pretrained, then save_pretrained)"
        )
    return not_found(kind.name, name_or_folder, FILES, error)


_BUFFERS = ("position_ids", "token_type_ids", "attn.bias", "masked_bias")
"""Name endings of tensors that are not weights: integer buffers in old checkpoints."""


def _require_floats(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuses weights stored as integers or 8-bit floats: without their scales, the raw numbers would be used."""
    for name, each in stored.items():
        if each.dtype not in FLOATS and not name.endswith(_BUFFERS):
            raise ValueError(
                f"{str(folder)!r} stores {name} as {each.dtype}, which needs a scale per row; export the model again, "
                "or dequantize it with the library that quantized it"
            )


def _is_damaged(weights: Path) -> bool:
    """Whether a file is truncated, or not a safetensors file."""
    try:
        stored_tensors(weights)
    except ValueError:
        return True
    return False


# ---- checkpoints of the original release ----------------------------------------------------------------------------


def load_legacy_checkpoint(path: Path) -> PreTrainedModel:
    """Opens a `.th` checkpoint of the original release, written by torch.save, as a masked language model.

    Only tensors and plain containers are unpickled (`weights_only`), so code in a file never runs. The size of the
    network is read from the shapes of its weights; the vocabulary is that of `bert-base-uncased`.
    """
    weights = _legacy_weights(path)
    config = _legacy_config(weights, path)
    with foreign(lambda error: ValueError(f"{str(path)!r} holds no BERT ({reason_of(error)}): use a complete one")):
        stored = {name: StoredTensor("F32", tuple(value.shape)) for name, value in weights.items()}
        _require_size(path, _num_described(_MASKED, config, len(stored)), stored)
        model = _new(transformers.AutoModelForMaskedLM, config)
        fit = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise ValueError(f"{str(path)!r} has weights that are not finite: use an intact checkpoint")
    missing = sorted(set(fit.missing_keys) - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"})
    if missing:
        raise ValueError(
            f"{str(path)!r} lacks {len(missing)} weights of a BERT, {missing[0]!r} first: use a complete checkpoint"
        )
    unknown = [name for name in fit.unexpected_keys if not name.endswith("position_ids")]
    if unknown:
        logger.warning("%s: ignored %d weights that a BERT does not have: %s", path, len(unknown), ", ".join(unknown))
    return model


def _legacy_weights(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file, without the name prefixes that wrappers add."""
    _require_plain_zip(path)
    with foreign(lambda error: _not_legacy(path, f" ({reason_of(error)[:200]})")):
        # Memory-mapped, so that a size the file claims is not allocated.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{str(path)!r} holds no weights: expected a dictionary with the weights under 'model'")
    weights = {
        re.sub(r"^(module\.)+", "", str(name)): value for name, value in content.items() if isinstance(value, Tensor)
    }
    stored = path.stat().st_size
    if any(value.layout is not torch.strided for value in weights.values()) or (
        sum(value.numel() * value.element_size() for value in weights.values()) > 2 * stored
    ):
        raise ValueError(
            f"{str(path)!r} describes larger tensors than its {stored:,} bytes can hold; use a complete checkpoint"
        )
    return weights


def require_legacy_checkpoint(path: Path) -> None:
    """Refuses a file that is not a checkpoint of the original release, before anything else is loaded."""
    _legacy_config(_legacy_weights(path), path)


def _require_plain_zip(path: Path) -> None:
    """Refuses anything but an uncompressed zip, which is what torch.save writes."""
    require_regular(path)
    if not path.exists():
        raise ValueError(f"no file {str(path)!r}: give the .th file of an original checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        is_plain = False
    if not is_plain:
        raise _not_legacy(path)


def _not_legacy(path: Path, reason: str = "") -> ValueError:
    return ValueError(
        f"{str(path)!r} is not a checkpoint of plain tensors{reason} and was not opened: give the .th file of an "
        "original checkpoint"
    )


def _legacy_config(weights: Mapping[str, Tensor], path: Path) -> transformers.BertConfig:
    """Reads the size of a BERT from its weights; attention heads are 64 wide, as in every published BERT."""
    try:
        vocabulary, width = weights["bert.embeddings.word_embeddings.weight"].shape
        layers = 1 + max(int(m[1]) for m in (re.match(r"bert\.encoder\.layer\.(\d+)\.", name) for name in weights) if m)
        if layers > len(weights) or min(vocabulary, width) < 1:
            raise ValueError("no BERT")
        return transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=weights["bert.encoder.layer.0.intermediate.dense.weight"].shape[0],
            max_position_embeddings=weights["bert.embeddings.position_embeddings.weight"].shape[0],
        )
    except (KeyError, ValueError, IndexError):
        raise ValueError(f"{str(path)!r} holds no BERT: the original release trains BertForMaskedLM only") from None
