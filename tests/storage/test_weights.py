"""Weights as int8 with a scale per row: rounding, folders that store them, and damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shared import encoding_cache, shared
from tiny_models import model_of, plain_roberta, run_of
from transformers import AutoModelForMaskedLM, AutoTokenizer

from diffusionbert.cli.main import main
from diffusionbert.model import load
from diffusionbert.storage.weights import dequantize_rows, dequantized, quantize_rows, quantized

numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    magnitude = draw(st.sampled_from([1e-12, 1e-3, 1.0]))
    return torch.tensor(values).reshape(rows, columns) * magnitude


@given(matrices())
def test_no_value_is_off_by_more_than_half_the_scale_of_its_row(matrix):
    integers, scale = quantize_rows(matrix)
    assert (integers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, matrix.shape[:1])
    assert int(integers.min()) >= -127
    error = (dequantize_rows(integers, scale).double() - matrix.double()).abs()
    assert (error <= scale.double()[:, None] / 2 * (1 + 1e-4) + 1e-38).all()


@given(matrices())
def test_what_was_rounded_once_is_stored_exactly(matrix):
    once = dequantize_rows(*quantize_rows(matrix))
    assert torch.allclose(dequantize_rows(*quantize_rows(once)), once, rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero():
    integers, scale = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, -127.0]]))
    assert integers.tolist() == [[0, 0], [1, -127]]
    assert scale.tolist() == [0.0, 1.0]


def test_matrices_alone_are_rounded():
    tensors = {
        "norm": torch.randn(3),
        "matrix": torch.randn(2, 3),
        "cube": torch.randn(2, 3, 4),
        "ids": torch.ones(2, 2).long(),
    }
    stored = quantized(tensors)
    assert stored.keys() == tensors.keys() | {"matrix.scale", "cube.scale"}
    assert stored["cube.scale"].shape == (2, 3)
    again = dequantized(stored, "here")
    assert again.keys() == tensors.keys()
    assert torch.equal(again["norm"], tensors["norm"])
    assert torch.equal(again["ids"], tensors["ids"])
    assert torch.allclose(again["cube"], tensors["cube"], atol=0.05)


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite cannot be stored as int8; use fp32"):
        quantize_rows(torch.tensor([[torch.nan, 1.0]]))


# ---- folders --------------------------------------------------------------------------------------------------------


def int8_folder() -> Path:
    return shared("int8-linear", lambda output: model_of("linear").save_pretrained(output, precision="int8"))


@pytest.mark.parametrize("kind", ["linear", "layers", "vectors", "decoder"])
def test_a_model_is_stored_as_int8(kind, tmp_path):
    model = model_of(kind)
    saved = model.save_pretrained(tmp_path / "int8", precision="int8", shard_size="8KB")
    assert not list(saved.glob("model.safetensors*"))
    assert all(file.stat().st_size <= 8000 for file in saved.glob("model-int8-*.safetensors"))
    rounded = load(saved, device="cpu")
    expected = (dequantize_rows(*quantize_rows(value)) if value.ndim > 1 else value for value in parameters(model))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(expected, parameters(rounded), strict=True))


def parameters(model) -> list[torch.Tensor]:
    return [value.detach() for value in model.engine.module().network.parameters()]


def test_one_call_makes_an_ordinary_folder_for_transformers(tmp_path):
    with pytest.raises(OSError, match="no file named model"):  # and no garbage
        AutoModelForMaskedLM.from_pretrained(int8_folder())
    model = load(int8_folder(), device="cpu")
    assert "AutoModelForMaskedLM` after `diffusionbert.load" in (int8_folder() / "README.md").read_text()
    folder = model.save_pretrained(tmp_path / "floats")
    theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)("the [MASK] king .", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(theirs(**inputs).logits, model.backbone(**inputs).logits)
    assert "AutoModelForMaskedLM`.\n" in (folder / "README.md").read_text()


def test_a_run_exports_int8_and_another_starts_from_it(tmp_path):
    config, cache = run_of("linear") / "run.json", f"--cache={encoding_cache()}"
    first, second = (["train", f"--config={config}", cache, f"--output={tmp_path / name}"] for name in ("one", "two"))
    main([*first, "--steps=1", "--export-precision=int8"])
    assert (tmp_path / "one" / "model" / "model-int8.safetensors").exists()
    main([*second, "--steps=1", f"--start={tmp_path / 'one'}", "--learning-rate=1e-12"])
    start = load(tmp_path / "one", device="cpu")
    assert all(map(torch.allclose, parameters(start), parameters(load(tmp_path / "two", device="cpu"))))


def test_a_plain_model_is_stored_as_int8(tmp_path):
    saved = load(plain_roberta(), device="cpu").save_pretrained(tmp_path / "int8", precision="int8")
    assert load(saved, device="cpu").probabilities("the <mask> king")


def damaged(tmp_path: Path, change) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(int8_folder(), folder)
    file = folder / "model-int8.safetensors"
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.dtype == torch.int8)
    change(tensors, name)
    file.unlink()
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.scale"), "is stored as int8 without a scale per row"),
        (lambda tensors, name: tensors.update({f"{name}.scale": torch.ones(1)}), "without a scale per row"),
        (lambda tensors, name: tensors.update({f"{name}.scale": tensors[f"{name}.scale"].long()}), "without a scale"),
        (lambda tensors, name: tensors[f"{name}.scale"].fill_(torch.inf), "scale must be finite and not negative"),
        (lambda tensors, name: tensors[f"{name}.scale"].neg_(), "scale must be finite and not negative"),
        (lambda tensors, name: (tensors.pop(name), tensors.pop(f"{name}.scale")), "is not a complete BertForMaskedLM"),
    ],
)
def test_damage_is_refused_in_one_line(change, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        load(damaged(tmp_path, change))
    assert "\n" not in str(error.value)


def test_integers_without_scales_in_an_ordinary_folder_are_refused(tmp_path):
    folder = model_of("linear").save_pretrained(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name, value in tensors.items() if value.ndim > 1)
    (folder / "model.safetensors").unlink()
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"stores {name} as I8, which needs a scale per row"):
        load(folder)


def test_a_missing_file_is_named(tmp_path):
    folder = model_of("linear").save_pretrained(tmp_path / "model", precision="int8", shard_size="8KB")
    missing = min(folder.glob("model-int8-*.safetensors"))
    missing.unlink()
    with pytest.raises(ValueError, match=missing.name):
        load(folder)
    index = folder / "model-int8.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../a.safetensors"}}))
    with pytest.raises(ValueError, match="not a file next to it"):
        load(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="index"):
        load(folder)
