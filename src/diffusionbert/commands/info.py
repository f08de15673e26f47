"""`info`: what a model is, and what this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.commands.common import WithModel, print_json


@dataclass(frozen=True)
class Info(WithModel):
    """Say what a model is, and what it runs on.

    Example: diffusionbert info --model runs/tiny
    """

    def run(self) -> None:
        """Prints one fact a line."""
        import torch
        import transformers

        from diffusionbert import __version__
        from diffusionbert.storage.schema import to_json

        model = self.loaded()
        facts = {
            "model": model.name,
            "weights": model.num_weights,
            "vocabulary": model.vocabulary.size,
            "longest_text": model.max_length,
            "time": model.experiment.time.value,
            "objective": to_json(model.experiment.objective),
            "knows_lengths": model.length_histogram is not None,
            "device": str(model.device),
            "diffusionbert": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        if self.json:
            print_json(facts)
            return
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):14} {value}")
