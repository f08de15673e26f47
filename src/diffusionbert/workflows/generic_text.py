"""Generic text: samples of a model before it is adapted, used to measure forgetting.

No corpus ships with a model, but its samples show what it knows. They are drawn once per seed and cached next to
encoded corpora. The bound on samples of the start is lowest for the start itself, so any change of the model shows up
as an increase.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.generate import generate
from diffusionbert.inference.tasks import Task
from diffusionbert.reporting import progress_line
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.files import build_once
from diffusionbert.storage.limits import read_text

NUM_TEXTS = 96
STEPS = 16
"""The steps of the time grid. Several tokens are drawn independently per step, which is cheap and good enough here."""
_FILE = "generic.txt"


def generic_texts(engine: Engine, cache: Path, *, number: int = NUM_TEXTS, seed: int = 0) -> list[str]:
    """Samples of a model at temperature 1, from the cache if they were drawn before.

    Args:
        engine: The model.
        cache: The folder that holds them.
        number: The number to draw; a few may be empty or too long when encoded again, and are left out.
        seed: The seed of the samples.
    """
    key = hashlib.sha256(f"generic 1 {fingerprint(engine.folder)} {number} {seed}".encode()).hexdigest()

    def draw(folder: Path) -> None:
        texts = _drawn(engine, number, seed)
        (folder / _FILE).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    folder = build_once(cache / f"generic-{key[:32]}", draw)
    texts = read_text(folder / _FILE).splitlines()
    special = engine.vocabulary.num_special(paired=False)
    lengths = map(len, engine.vocabulary.encode(texts))
    return [text for text, length in zip(texts, lengths, strict=True) if special < length <= engine.max_positions]


def fingerprint(folder: Path) -> str:
    """A hash of a model folder's weights and settings."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _drawn(engine: Engine, number: int, seed: int) -> list[str]:
    # Int8 is two to three times as fast on a CPU, and its error is far below that of a small sample.
    is_cpu = engine.device.type == "cpu"
    sampled = load_engine(engine.folder, engine.device, torch.int8) if is_cpu else engine
    request = SamplingRequest(config=SamplerConfig(steps=STEPS))
    texts: list[str] = []
    with progress_line(number) as show:
        for generated in generate(sampled, Task(number, seed=seed, capitalize=False), request):
            texts.append(" ".join(generated.text.split()))
            show(len(texts), "generic text: samples of the start")
    return texts
