"""Keeps the part of an experiment to commit: settings, logs, scores and a few samples of every row, without weights.

    python benchmarks/experiment.py experiment docs/results/second

`keep` may be called repeatedly while rows are added. `restore` is its inverse; `report.py` reads evaluations with it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
import tyro

from diffusionbert.storage.files import load_tensors, read_json, save_tensors, write_json
from diffusionbert.training.model_folder import BUNDLED

Folder = tyro.conf.Positional[Path]


def keep(source: Folder, target: Folder, samples: int = 20) -> None:
    """Copy settings, logs, scores in single precision and some samples per evaluation; `runs` becomes `trained`.

    The part of an evaluation set that all systems share is stored once, in sentences/HASH.safetensors. A network that
    was trained again elsewhere, for others to start from, is kept next to the first one, as NAME-again.
    """
    (target / "sentences").mkdir(parents=True, exist_ok=True)
    for name in (
        "settings.json",
        "seconds/*.json",
        "runs/*/run.json",
        "runs/*/log.jsonl",
    ):
        for path in source.glob(f"*/{name}"):
            copy = _kept_as(path, source, target)
            if copy is None:
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Where the package lies on a machine is not a setting.
            content = path.read_text(encoding="utf-8").replace(str(BUNDLED), "src/diffusionbert/bundled")
            copy.write_text(content, encoding="utf-8")
    for path in source.glob("*/evaluations/*/evaluation.json"):
        copy, report = target / path.parent.relative_to(source), read_json(path)
        copy.mkdir(parents=True, exist_ok=True)
        tensors = load_tensors(path.with_name("scores.safetensors")).items()
        small = {name: one.float() if one.is_floating_point() else one.int() for name, one in tensors}
        shared = {name: small.pop(name) for name in ("bytes", "example", "tokens", "words") if name in small}
        if shared:
            data = b"".join(name.encode() + one.numpy().tobytes() for name, one in shared.items())
            report["sentences"] = hashlib.sha256(data).hexdigest()[:16]
            save_tensors(shared, target / "sentences" / f"{report['sentences']}.safetensors")
        own = {name: one for name, one in small.items() if not name.startswith("draw_variance.")}
        save_tensors(own, copy / "scores.safetensors")
        write_json(copy / "evaluation.json", report)
        texts = path.with_name("samples.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        if texts[:samples]:
            (copy / "samples.txt").write_text("".join(texts[:samples]), encoding="utf-8")


def _kept_as(path: Path, source: Path, target: Path) -> Path | None:
    """Where a file of a row is kept: under its name, unless others have it; None if it is unfinished then."""
    group, kind, *inner = path.relative_to(source).parts
    if not inner:
        return target / group / kind
    row = Path(inner[0]).stem if kind == "seconds" else inner[0]
    own, name = _weights(source / group / "seconds" / f"{row}.json"), row
    if own is None and _weights(target / group / "seconds" / f"{name}.json") is not None:
        return None
    while _weights(target / group / "seconds" / f"{name}.json") not in (None, own):
        name += "-again"
    folder = target / group / ("trained" if kind == "runs" else kind)
    return folder / f"{name}.json" if kind == "seconds" else folder / name / inner[1]


def _weights(record: Path) -> str | None:
    """The hash of a row's weights; None if it has no record."""
    return read_json(record)["weights"] if record.exists() else None


def restore(kept: Path, sentences: Path, folder: Path) -> Path:
    """Writes a kept evaluation in the format of `evaluate`; variances over draws, which were not kept, are NaN."""
    shutil.copytree(kept, folder)
    (folder / "samples.txt").touch()
    report = read_json(folder / "evaluation.json")
    if name := report.pop("sentences", None):
        write_json(folder / "evaluation.json", report)
        tensors = load_tensors(folder / "scores.safetensors") | load_tensors(sentences / f"{name}.safetensors")
        nats = [name for name in tensors if name.startswith("nats.")]
        tensors |= {name.replace("nats", "draw_variance"): torch.full_like(tensors[name], torch.nan) for name in nats}
        wide = {name: one.double() if one.is_floating_point() else one.long() for name, one in tensors.items()}
        save_tensors(wide, folder / "scores.safetensors")
    return folder


if __name__ == "__main__":
    tyro.cli(keep, description=__doc__)
