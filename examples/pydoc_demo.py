"""A minute with DiffusionBERT: train a tiny one on Python's own documentation, then watch it write.

Everything is the package's own: no corpus to download, no GPU, no checkpoint. The texts of `pydoc_data.topics` come
with every Python. A model this small, trained on a thousand sentences for a minute, learns which words stand near
each other in that text, and no more.

    python examples/pydoc_demo.py --steps 800 --sentences 3
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.live import Live
from rich.text import Text

from diffusionbert.categorical import Shaping
from diffusionbert.checkpoints import RunFolder
from diffusionbert.experiments import Diffusion, build
from diffusionbert.method import Method, State
from diffusionbert.presets import tiny
from diffusionbert.runs import Prepared, prepare
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.schedules import Spindle, uniform_grid
from diffusionbert.shapes import Batch
from diffusionbert.training import Trainer
from diffusionbert.vocabulary import Vocabulary


def trained(folder: Path, steps: int, console: Console) -> tuple[Method, Prepared]:
    """A tiny time-agnostic BERT under the spindle schedule with its strict bound, trained from scratch."""
    experiment = tiny("pydoc")
    training = replace(experiment.training, steps=steps, warmup=steps // 10, validate_every=max(1, steps // 4))
    experiment = replace(experiment, objective=Diffusion(Spindle(0.3)), training=training)
    prepared = prepare(experiment.data, folder)
    torch.manual_seed(0)
    method = build(experiment, prepared.lexicon)
    weights = sum(parameter.numel() for parameter in method.parameters())
    console.print(
        f"{len(prepared.rows)} sentences of Python's documentation, {prepared.vocabulary.size} word pieces, "
        f"a BERT of {weights / 1e6:.1f}M weights from scratch, {steps} steps:"
    )
    run = RunFolder(folder / "run")
    run.checkpoints.mkdir(parents=True)
    Trainer(
        method, prepared.rows, prepared.validation, training, run, export=lambda *_: None, accelerator=Accelerator()
    ).train()
    return method.cpu().eval(), prepared


def shown(vocabulary: Vocabulary, state: State) -> Text:
    """One line: hidden places as dim bars, written words plain."""
    line = Text(f"t = {float(state.time[0]):4.2f} ", style="dim")
    for token in state.tokens[0].tolist()[1:-1]:
        word = str(vocabulary.tokenizer.convert_ids_to_tokens(token))
        is_hidden = token == vocabulary.mask_id
        line.append(" ▁▁▁" if is_hidden else f" {word}" if not word.startswith("##") else word[2:], "dim" * is_hidden)
    return line


def write(method: Method, vocabulary: Vocabulary, length: int, seed: int, console: Console) -> None:
    """One sentence denoised: in place on a terminal, else every eighth state on a line of its own."""
    [frame] = vocabulary.encode([""])
    tokens = torch.tensor([[frame[0], *[vocabulary.mask_id] * length, frame[-1]]])
    editable = tokens == vocabulary.mask_id
    states = method.sample(Batch.of(tokens, editable), seed)
    if not console.is_terminal:
        for index, state in enumerate(states):
            if index % 8 == 0:
                console.print(shown(vocabulary, state), soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=30) as live:
        for state in states:
            live.update(shown(vocabulary, state))
            time.sleep(0.04)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="how long to train")
    parser.add_argument("--sentences", type=int, default=3, help="how many sentences to write")
    options = parser.parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        method, prepared = trained(Path(folder), options.steps, console)
        assert isinstance(method.sampler, Ancestral)
        shaping = Shaping(temperature=0.7, forbidden=prepared.lexicon.forbidden)
        method.sampler = Ancestral(method.sampler.process, uniform_grid(64), shaping)
        for seed in range(options.sentences):
            console.print()
            write(method, prepared.vocabulary, length=8 + 4 * (seed % 3), seed=seed, console=console)


if __name__ == "__main__":
    main()
