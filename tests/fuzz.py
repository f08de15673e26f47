"""Mutated files of every kind that the commands read, with one invariant: they open, or there is one line and exit
code 2, under limits on memory and time.

A case is plain JSON, so what was found is kept in `data_files/fuzz/` and tried by every test run:

    python tests/fuzz.py 10    # minutes; `make fuzz`
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hostile import Outcome, attempt, edit_json, edit_tensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from shared import encoding_cache, shared
from tiny_models import corpus, model_of, plain_roberta, run_of, toy_sentences

from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.storage.reader import stored_tensors

FOUND = Path(__file__).parent / "data_files" / "fuzz"
FORMAT_1 = Path(__file__).parent / "data_files" / "evaluation_format_1"
Case = dict[str, Any]
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 10**4, 10**9, 10**18, 10**30, -(10**30), 0.5, -0.5, 1e308, 1e-308),
    *(float("nan"), float("inf"), "", "x", "1", "inf", "x" * 5000, "\x1b[31m", "../../x", "\ud800"),
    *([], {}, [0], ["x"], [[]], {"name": "linear"}, {"": None}, [1] * 5000, "flex_attention", "owner/kernels"),
]
"""What a value of JSON is replaced by; kept cases have the number of one, so new ones come last."""
SETTINGS = [
    *("attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config", "auto_map"),
    *("chunk_size_feed_forward", "is_decoder", "add_cross_attention", "is_encoder_decoder", "pruned_heads", "dtype"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "torchscript", "id2label"),
    *("transformers_weights", "tie_word_embeddings", "text_config", "position_embedding_type", "architectures"),
    *("added_tokens_decoder", "extra_special_tokens", "chat_template", "model_max_length", "use_rslora", "use_dora"),
]
"""What a config may have that ours have not."""
DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int64, torch.int32, torch.bool),
]
UNHURRIED = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "remove": lambda tensor: None,
    "scalar": lambda tensor: tensor.flatten()[:1].reshape(()),
    "empty": lambda tensor: tensor[:0],
    "shorter": lambda tensor: tensor[:-1],
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "deeper": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.flatten(),
    "negative": lambda tensor: -tensor.double().abs().to(tensor.dtype) - 1,
    "nan": lambda tensor: torch.full(tensor.shape, torch.nan),
    "zeros": torch.zeros_like,
    **{str(dtype).removeprefix("torch."): partial(torch.Tensor.to, dtype=dtype) for dtype in DTYPES},
}


# ---- what is mutated, and the commands that read it -----------------------------------------------------------------


def _evaluation(output: Path) -> None:
    shutil.copytree(FORMAT_1, output, dirs_exist_ok=True)


def _texts(output: Path) -> None:
    import bz2
    import gzip
    import lzma

    import zstandard

    plain = ("\n".join(toy_sentences(60)) + "\n").encode()
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    compress["zst"] = zstandard.ZstdCompressor().compress
    for suffix, function in compress.items():
        (output / f"text.txt.{suffix}").write_bytes(function(plain))
    (output / "text.jsonl").write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in [*"ab c"]))
    (output / "text.txt").write_bytes(plain)
    (output / "text.tsv").write_bytes(plain.replace(b" saw ", b"\t"))


def _adapter(output: Path) -> None:
    """The model `linear` with factors beside the weights of its queries."""
    base = run_of("linear") / "model"
    shutil.copytree(base, output, dirs_exist_ok=True)
    (output / "model.safetensors").unlink()
    name, width = "bert.encoder.layer.0.attention.self.query", 32
    sides = {"lora_A": torch.linspace(-1, 1, 2 * width).view(2, width), "lora_B": torch.ones(width, 2)}
    factors = {f"base_model.model.{name}.{side}.weight": factor for side, factor in sides.items()}
    save_file(factors, output / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4.0, "bias": "none"}
    (output / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _legacy(output: Path) -> None:
    backbone = model_of("linear").backbone
    torch.save({"model": {f"module.{name}": value for name, value in backbone.state_dict().items()}}, output / "old.th")


def _compare(folder: Path, file: str) -> list[list[str]]:
    return [["compare", str(folder)], ["compare", str(folder), "--format=latex"]]


def _on_pairs(folder: Path, file: str) -> list[list[str]]:
    model = [f"--model={folder}", "--device=cpu"]
    return [["info", *model], ["generate", "the king saw a river today .", "--seed=1", *model]]


def _on_model(folder: Path, file: str) -> list[list[str]]:
    model = [f"--model={folder}", "--device=cpu"]
    return [["info", *model], ["score", "the king .", "--precision=1.0", *model], ["generate", "--seed=1", *model]]


def _resume(folder: Path, file: str) -> list[list[str]]:
    return [["train", "--resume", f"--output={folder}", f"--cache={encoding_cache()}", "--verbosity=error"]]


def _on_text(folder: Path, file: str) -> list[list[str]]:
    start = [f"--config={run_of('linear') / 'run.json'}", "--steps=1", "--verbosity=error"]
    return [["train", *start, f"--data={folder / file}", f"--output={folder / 'run'}", f"--cache={folder / 'cache'}"]]


def _start(folder: Path, file: str) -> list[list[str]]:
    start = [f"--start={folder / file}", f"--data={corpus()}", "--vocabulary=512", "--preset=tiny", "--max-length=24"]
    return [["train", *start, "--steps=1", f"--output={folder / 'run'}", "--verbosity=error"]]


@cache
def targets() -> dict[str, tuple[Path, Callable[[Path, str], list[list[str]]]]]:
    """The folders by name, and the commands that read them."""
    int8 = shared("int8-layers", lambda output: model_of("layers").save_pretrained(output, precision="int8"))
    return {
        "model": (run_of("linear") / "model", _on_model),
        "spindle": (run_of("spindle-layers") / "model", _on_model),
        "learned": (run_of("learned") / "model", _on_model),
        "decoder": (run_of("decoder") / "model", _on_model),
        "int8": (int8, _on_model),
        "roberta": (plain_roberta(), _on_model),
        "run": (run_of("linear"), _resume),
        "pairs": (run_of("pairs") / "model", _on_pairs),
        "adapter": (shared("fuzz-adapter", _adapter), _on_model),
        "evaluation": (shared("evaluation-1", _evaluation), _compare),
        "evaluation-2": (shared("evaluation-2", lambda output: EvaluationResult.load(FORMAT_1).save(output)), _compare),
        "texts": (shared("fuzz-texts", _texts), _on_text),
        "legacy": (shared("fuzz-legacy", _legacy), _start),
    }


# ---- cases ----------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A file and a change of its bytes, of a value in its JSON, or of one of its tensors."""
    target = draw(st.sampled_from(sorted(targets())))
    folder, _ = targets()[target]
    files = sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.stat().st_size
    )
    file = draw(st.sampled_from([name for name in files if not name.endswith((".md", ".lock"))]))
    case: Case = {"target": target, "file": file}
    kinds = {".json": ["json", "json", "json", "bytes"], ".safetensors": ["tensor", "tensor", "bytes"]}
    kind = draw(st.sampled_from(kinds.get(Path(file).suffix, ["bytes"])))
    if kind == "json":
        paths = _paths(json.loads((folder / file).read_text(encoding="utf-8")))
        added = [[name] for name in SETTINGS] if file.endswith("config.json") else []
        path = draw(st.sampled_from(paths + added))
        change = {"path": path, "value": draw(st.integers(0 if path in added else -1, len(VALUES) - 1))}
    elif kind == "tensor":
        names = sorted(stored_tensors(folder / file))
        if not names:
            return {**case, "kind": "bytes", "at": 0.0, "remove": 1, "insert": ""}
        change = {"name": draw(st.sampled_from(names)), "change": draw(st.sampled_from(sorted(TENSOR_CHANGES)))}
    else:
        inserted = draw(st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 64, b"\n" * 1000])))
        removed = draw(st.sampled_from([0, 1, 8, 100, 10**9]))
        change = {"at": draw(st.floats(0, 1, width=16)), "remove": removed, "insert": inserted.hex()}
    return {**case, "kind": kind, **change}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[list[Any]]:
    """Where the values of JSON are; of long lists and objects, some of them."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    chosen = items if len(items) < 40 else items[:5] + items[-5:]
    return [list(path), *(each for key, item in chosen for each in _paths(item, (*path, key)))]


def applied(case: Case, folder: Path) -> None:
    """Changes the file of a case in a copy of its folder."""
    file = folder / case["file"]
    if case["kind"] == "json":
        edit_json(file, lambda value: _replaced(value, case["path"], case["value"]))
    elif case["kind"] == "tensor":
        edit_tensors(file, lambda tensors: _changed(tensors, case["name"], case["change"]))
    else:
        content = file.read_bytes()
        at = int(case["at"] * len(content))
        file.write_bytes(content[:at] + bytes.fromhex(case["insert"]) + content[at + case["remove"] :])


def _replaced(value: Any, path: list[Any], number: int) -> Any:
    if not path:
        return VALUES[number]
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if number < 0:
        del inner[path[-1]]
    else:
        inner[path[-1]] = VALUES[number]
    return value


def _changed(tensors: dict[str, torch.Tensor], name: str, change: str) -> None:
    tensor = tensors.pop(name)
    if tensor.ndim == 0 and change in ("empty", "shorter", "longer"):
        tensor = tensor[None]
    changed = TENSOR_CHANGES[change](tensor)
    if changed is not None:
        tensors[name] = changed.contiguous()


def tried(case: Case) -> Outcome:
    """What becomes of the commands on the changed copy."""
    source, commands = targets()[case["target"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(source, folder)
        applied(case, folder)
        return attempt(*commands(folder, case["file"]))


def is_sound(outcome: Outcome) -> bool:
    """The invariant."""
    return outcome.kind in ("fine", "refused")


def fuzz(minutes: float) -> int:
    """Tries new cases for a time, keeps those that break the invariant, and returns their number."""
    end, tally, finds = time.monotonic() + 60 * minutes, Counter[str](), dict[str, Case]()

    @settings(UNHURRIED, max_examples=50, phases=[Phase.generate])
    @given(cases())
    def search(case: Case) -> None:
        if time.monotonic() > end:
            return
        outcome = tried(case)
        tally[outcome.kind] += 1
        if not is_sound(outcome):
            last = (outcome.said.strip().splitlines() or [""])[-1]
            if last not in finds:
                finds[last] = case
                print(f"{outcome.kind}: {json.dumps(case)[:200]}\n    {last[:200]}", flush=True)
                name = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:12]
                (FOUND / f"{name}.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")

    number = int.from_bytes(os.urandom(4), "big")
    while time.monotonic() < end:
        number += 1
        seed(number)(search)()
    print(f"{sum(tally.values())} cases in {minutes:g} minutes: {dict(tally)}; {len(finds)} kinds of flaws")
    return len(finds)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    sys.exit(1 if fuzz(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0) else 0)
