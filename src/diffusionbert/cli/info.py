"""`info`: what a model is, and what this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.cli.common import WithModel, print_json


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
        engine = model.engine
        facts = {
            "model": model.name,
            "weights": model.num_parameters,
            "vocabulary": engine.vocabulary.size,
            "longest_text": model.max_length,
            "time": engine.config.time.value,
            "objective": to_json(engine.config.objective),
            "knows_lengths": engine.length_histogram is not None,
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
