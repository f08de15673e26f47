"""The weights of a model folder on disk: their precision, and the maximum size of their files.

Files are named as in transformers: model.safetensors, or model-00001-of-00003.safetensors and so on, with
model.safetensors.index.json, which says where each tensor is.

With int8, a matrix W is stored as integers Q and one scale per row, W ≈ scale · Q, under the names W and W.scale.
transformers would take Q for W without a warning, so these files have a name that it does not look for:
model-int8.safetensors. `diffusionbert.load(folder).save_pretrained(other)` writes an ordinary folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffusionbert.storage.files import load_tensors, read_json, write_json
from diffusionbert.storage.schema import from_json

EXPORT_PRECISIONS = "fp32", "fp16", "bf16", "int8"
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INT8 = "model-int8"
"""The name of files whose matrices are stored as int8."""
_SCALE = ".scale"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_METADATA = {"format": "pt"}  # transformers does not open files without it


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored; the default leaves them as they are, in one file."""

    precision: str | None = None
    """fp32, fp16, bf16, or int8 for matrices (everything else unchanged)."""
    shard_size: str | None = None
    """The maximum size of a file, such as 15MB (a megabyte is 10⁶ bytes); only a larger tensor exceeds it."""

    def __post_init__(self) -> None:
        if self.precision not in (None, *EXPORT_PRECISIONS):
            known = ", ".join(EXPORT_PRECISIONS)
            raise ValueError(f"the precision of stored weights must be one of {known}, got {self.precision!r}")
        _ = self.max_bytes

    @property
    def max_bytes(self) -> int | None:
        """The maximum size of a file in bytes; None if there is no limit."""
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
        if self.precision == "int8":
            return quantized(tensors)
        kind = _TYPES[self.precision]
        converted = {name: value.to(kind) if value.is_floating_point() else value for name, value in tensors.items()}
        for name, value in converted.items():
            if value.isinf().any() and not tensors[name].isinf().any():
                raise ValueError(f"{name} has values beyond the range of {self.precision}; export in bf16 or fp32")
        return converted


def reformat_weights(folder: Path, form: WeightFormat) -> None:
    """Converts the weights of a Hugging Face folder, as written by `save_pretrained`, to another format."""
    if form == WeightFormat():
        return
    files = list(folder.glob("model*.safetensors"))
    tensors = {name: value.clone() for file in files for name, value in load_tensors(file).items()}
    for file in (*files, *folder.glob("model*.safetensors.index.json")):
        file.unlink()
    save_weights(form.convert(tensors), folder, form.max_bytes, INT8 if form.precision == "int8" else "model")


def save_weights(
    tensors: Mapping[str, Tensor], folder: Path, max_bytes: int | None = None, name: str = "model"
) -> None:
    """Writes weights to an atomic folder, in as few files as the size limit allows."""
    shards = list(_shards(tensors, max_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = f"{name}{part}.safetensors"
        places |= dict.fromkeys(names, file)
        save_file({key: tensors[key].contiguous() for key in names}, folder / file, _METADATA)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            folder / f"{name}.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))},
        )


def load_int8(folder: Path) -> dict[str, Tensor] | None:
    """The weights, in float32, of a folder that stores them only as int8; None if it does not.

    Raises ValueError if a file is missing or damaged, or if integers and scales do not fit each other.
    """
    index = folder / f"{INT8}.safetensors.index.json"
    if not _is_int8(folder):
        return None
    files = weight_files(folder)
    stored = {name: value for file in files for name, value in load_tensors(file).items()}
    if index.exists() and (missing := _places(index).keys() - stored.keys()):
        raise ValueError(
            f"{str(folder)!r} lacks {min(missing)}, which {index.name!r} names; copy the whole folder again"
        )
    return dequantized(stored, str(folder))


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, as named by its index if it has one."""
    name = INT8 if _is_int8(folder) else "model"
    index, whole = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else sorted(folder.glob(f"{name}*.safetensors"))
    return [folder / file for file in sorted(set(_places(index).values()))]


def _is_int8(folder: Path) -> bool:
    """Whether a folder stores its weights only as int8."""
    has_floats = any(folder.glob("model.safetensors*"))  # or their index
    return not has_floats and any(folder.glob(f"{INT8}*.safetensors*"))


def _places(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index."""
    plain = read_json(index)
    places = from_json(plain.get("weight_map") if isinstance(plain, dict) else None, dict[str, str], index.name)
    # The files that transformers would open must be the ones that were checked.
    if elsewhere := next((file for file in places.values() if not _is_name(file)), None):
        raise ValueError(f"{str(index)!r} names {elsewhere[:40]!r}, which is not a file next to it; export it again")
    return places


def _is_name(file: str) -> bool:
    return file.endswith(".safetensors") and not set(file) & set("/\\\0")


def _shards(tensors: Mapping[str, Tensor], max_bytes: int | None) -> Iterator[list[str]]:
    """The names of the tensors in each file, in order."""
    names: list[str] = []
    empty = size = 8 + 7 + len(json.dumps({"__metadata__": _METADATA}))  # a length, and a header padded with spaces
    for name, tensor in tensors.items():
        offsets = [10**15, 10**15]  # more digits than any real offset
        entry = {name: {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}}
        added = tensor.nbytes + len(json.dumps(entry))
        if names and max_bytes is not None and size + added > max_bytes:
            yield names
            names, size = [], empty
        names.append(name)
        size += added
    yield names


# ---- int8 -----------------------------------------------------------------------------------------------------------


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row (the last dimension) to 255 levels: integers in [-127, 127], and a scale per row in float32.

    No value is off by more than half its row's scale.
    """
    values = matrix.float()
    if not values.isfinite().all():
        raise ValueError("values that are not finite cannot be stored as int8; use fp32")
    scale = values.abs().amax(dim=-1) / 127
    steps = torch.where(scale > 0, scale, 1.0)  # a row of zeros has the scale 0
    return (values / steps[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_rows(integers: Tensor, scale: Tensor) -> Tensor:
    """The matrix that integers and scales stand for, in float32."""
    return integers.float() * scale[..., None]


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with matrices as int8, each along with its scales."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim >= 2 and value.is_floating_point():
            stored[name], stored[name + _SCALE] = quantize_rows(value)
        else:
            stored[name] = value
    return stored


def dequantized(stored: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Undoes `quantized`, up to rounding; tensors that are not int8 stay as they are.

    Args:
        stored: Tensors by name.
        where: Where they come from, for error messages.
    """
    tensors, scales = dict(stored), set()
    for name, value in stored.items():
        if value.dtype != torch.int8:
            continue
        scale = stored.get(name + _SCALE)
        if scale is None or scale.shape != value.shape[:-1] or scale.dtype not in _TYPES.values():
            raise ValueError(
                f"{where!r}: {name} is stored as int8 without a scale per row ({name}{_SCALE}); export it again"
            )
        if not (scale.isfinite() & (scale >= 0)).all():
            raise ValueError(f"{where!r}: {name}{_SCALE} must be finite and not negative; export it again")
        tensors[name] = dequantize_rows(value, scale)
        scales.add(name + _SCALE)
    return {name: value for name, value in tensors.items() if name not in scales}
