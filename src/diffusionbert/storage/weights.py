"""The weights of a model folder on disk: in which precision, and in files of at most which size.

Files are named as transformers names them: model.safetensors, or model-00001-of-00003.safetensors and so on, with
model.safetensors.index.json, which says where each tensor is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffusionbert.storage.files import load_tensors, write_json

EXPORT_PRECISIONS = "fp32", "fp16", "bf16"
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_METADATA = {"format": "pt"}  # transformers opens no file without it


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored; the default leaves them as they are, in one file."""

    precision: str | None = None
    """fp32, fp16 or bf16."""
    shard_size: str | None = None
    """The size of a file, such as 15MB (a megabyte is 10⁶ bytes); only a larger tensor makes a larger file."""

    def __post_init__(self) -> None:
        if self.precision not in (None, *EXPORT_PRECISIONS):
            known = ", ".join(EXPORT_PRECISIONS)
            raise ValueError(f"the precision of stored weights must be one of {known}, got {self.precision!r}")
        _ = self.max_bytes

    @property
    def max_bytes(self) -> int | None:
        """The size of a file in bytes; None if there is no limit."""
        if self.shard_size is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B", self.shard_size.strip(), re.IGNORECASE)
        size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
        if size < 1:
            raise ValueError(f"`shard_size` must be a size such as 500KB, 15MB or 2GB, got {self.shard_size!r}")
        return size

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in this precision; raises ValueError if one is too large for it."""
        if self.precision is None:
            return dict(tensors)
        kind = _TYPES[self.precision]
        converted = {name: value.to(kind) if value.is_floating_point() else value for name, value in tensors.items()}
        for name, value in converted.items():
            if value.isinf().any() and not tensors[name].isinf().any():
                raise ValueError(f"{name} has values beyond the range of {self.precision}; export in bf16 or fp32")
        return converted


def reformat_weights(folder: Path, form: WeightFormat) -> None:
    """Stores the weights of a Hugging Face folder, as `save_pretrained` left them, in another format."""
    if form == WeightFormat():
        return
    files = list(folder.glob("model*.safetensors"))
    tensors = {name: value.clone() for file in files for name, value in load_tensors(file).items()}
    for file in (*files, *folder.glob("model*.safetensors.index.json")):
        file.unlink()
    save_weights(form.convert(tensors), folder, form.max_bytes)


def save_weights(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int | None = None) -> None:
    """Writes the weights of a Hugging Face folder into as few files as their size allows."""
    shards = list(_shards(tensors, max_bytes))
    many = f"-of-{len(shards):05d}"
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}{many}.safetensors"
        places |= dict.fromkeys(names, file)
        try:
            save_file({name: tensors[name].contiguous() for name in names}, folder / file, _METADATA)
        except SafetensorError as error:
            raise OSError(f"{str(folder / file)!r} cannot be written ({error})") from None
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))},
        )


def _shards(tensors: Mapping[str, Tensor], max_bytes: int | None) -> Iterator[list[str]]:
    """The names of the tensors of each file, in order."""
    names: list[str] = []
    empty = size = 8 + 7 + len(json.dumps({"__metadata__": _METADATA}))  # a length, and a header filled up with blanks
    for name, tensor in tensors.items():
        offsets = [10**15, 10**15]  # as many digits as any
        entry = {name: {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}}
        added = tensor.nbytes + len(json.dumps(entry))
        if names and max_bytes is not None and size + added > max_bytes:
            yield names
            names, size = [], empty
        names.append(name)
        size += added
    yield names
