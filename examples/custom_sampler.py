"""A custom sampler, used by name in `generate`, `evaluate` and `compare`.

A sampler is a frozen dataclass of its settings with three methods: `start` returns the first state, `query` the next
query to the network, and `update` the next state, given the answer. It stores nothing, so many threads may share it.

    python examples/custom_sampler.py --steps 40
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import diffusionbert as db
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, TargetLogProbs
from diffusionbert.diffusion.tokens import draw
from diffusionbert.samplers import Query, Sampler, SamplingContext, State


@db.register("random-order")
@dataclass(frozen=True)
class RandomOrder(Sampler):
    """Unmasks `per_call` positions per network call, in random order."""

    per_call: int = 2

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> State:
        tokens = context.absorbing(self).prior(canvas, Noise(seed)).tokens  # raises unless the noise is [MASK]
        return State.begin(context, canvas, seed, tokens, canvas.constant_times(1.0))

    def query(self, state: State) -> Query | None:
        return Query.of(state.x, state.time, state.x.editable & (state.tokens == state.context.mask_id))

    def update(self, state: State, answer: TargetLogProbs | None) -> State:
        masked = state.x.editable & (state.tokens == state.context.mask_id)
        assert answer is not None  # a state in which nothing is masked is done
        noise = Noise(state.seed, step=int(state.calls.max()))
        drawn = draw(state.context.warper(answer), noise.per_position(state.x, Purpose.SAMPLE)[masked])
        order = noise.per_position(state.x, Purpose.ORDER).masked_fill(~masked, 2).argsort(dim=1).argsort(dim=1)
        chosen = masked & (order < self.per_call)
        tokens = torch.where(chosen, state.tokens.masked_scatter(masked, drawn), state.tokens)
        time = (masked & ~chosen).sum(dim=1).double() / state.x.editable.sum(dim=1).clamp(min=1)
        return replace(
            state, tokens=tokens, time=time, calls=state.calls + masked.any(dim=1), done=not bool(time.any())
        )


def main(steps: int, folder: Path) -> None:
    run = db.train("pydoc", folder / "run", steps=steps, cache=folder / "cache")
    model = db.load(run.path)
    print(model.generate(length=12, sampler="random-order:per_call=3", seed=0)[0])
    samplers = ["exact", "random-order"]
    results = [
        db.evaluate(model, "pydoc", sentences=32, samples=16, length=12, steps=16, max_draws=8, sampler=sampler)
        for sampler in samplers
    ]
    print(db.compare(results, names=samplers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().steps, Path(folder))
