"""Trains a tiny network on made-up sentences; run by training/test_processes.py in its own processes.

python tests/training_worker.py FOLDER --steps 30 [--resume] [--kill-at 17] [--sharded] [--dropout 0.1]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, BertConfig

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Spindle, TokenInformation, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, SinusoidalTime
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTime
from diffusionbert.parallel import exit_at_once
from diffusionbert.reporting import set_verbosity
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.trainer import Trainer

VOCABULARY, MASK = 30, 4


class MadeUpSequences:
    """Random sentences of a few tokens with very different frequencies."""

    def __init__(self, count: int, seed: int):
        generator = np.random.default_rng(seed)
        self.lengths = generator.integers(4, 12, count)
        self.words = 5 + generator.geometric(0.4, (count, 12)).clip(1, VOCABULARY - 6)

    def batch(self, indices: list[int]) -> Batch:
        longest = int(self.lengths[indices].max())
        position = np.arange(longest)
        tokens = self.words[indices, :longest]
        attention_mask = position < self.lengths[indices][:, None]
        seen = torch.from_numpy(attention_mask)
        batch = Batch.of(torch.from_numpy(np.where(attention_mask, tokens, 0)), editable=seen, attention_mask=seen)
        return Batch(batch.tokens, batch.attention_mask, batch.editable, torch.as_tensor(indices), batch.strata)


def training_module(dropout: float) -> TrainingModule:
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    backbone = AutoModelForMaskedLM.from_config(config)
    allowed = torch.arange(VOCABULARY) > MASK
    information = TokenInformation.from_counts(torch.arange(VOCABULARY), allowed=allowed)
    process = Absorbing(Spindle(0.3), MASK, information)
    network = Denoiser(backbone, LayerwiseTime(backbone, SinusoidalTime(16)), allowed)
    return TrainingModule(network, DiscreteTime(process, uniform_grid(16)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-while-saving", action="store_true")
    parser.add_argument("--terminate-at", type=int)
    parser.add_argument("--terminate-rank", type=int)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--in-double", action="store_true", help="Muon's products in float64 instead of bfloat16")
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.in_double:
        torch.Tensor.bfloat16 = torch.Tensor.double
    set_verbosity("info")
    settings = TrainingConfig(
        steps=options.steps, batching=FixedSequences(16), micro_tokens=options.micro_tokens, learning_rate=1e-2,
        warmup=5, ema=0.9, log_every=1, validate_every=10, validation_sentences=70,
        validation_draws=40,  # so many that chunks of different lengths take them in different pieces
        save_every=5, sharded=options.sharded, optimizer=options.optimizer,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(options.folder)
    run.checkpoints.mkdir(exist_ok=True)
    trainer = Trainer(
        training_module(options.dropout),
        MadeUpSequences(100, seed=1),
        MadeUpSequences(80, seed=2),
        settings,
        run,
        export=lambda weights, folder: save_file(weights, folder / "weights.safetensors"),
        accelerator=Accelerator(cpu=True),
    )
    if options.resume:
        trainer.resume()
    taken = trainer.step

    def step(batch):
        if trainer.state.step == options.kill_at and not options.kill_while_saving:
            os.kill(os.getpid(), signal.SIGKILL)
        is_mine = options.terminate_rank in (None, trainer.accelerator.process_index)
        if trainer.state.step == options.terminate_at and is_mine:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(batch)

    trainer.step = step
    if options.kill_while_saving:
        import diffusionbert.training.checkpoint as checkpoint

        written = checkpoint.save_tensors

        def save(tensors, path):
            if trainer.state.step >= options.kill_at and path.name == "optimizer.safetensors":
                path.write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            written(tensors, path)

        checkpoint.save_tensors = save
    trainer.train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
    exit_at_once(0)  # as the command line does
