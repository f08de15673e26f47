"""`info`: describes a model and the versions in use."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.cli.common import WithModel, print_json
from diffusionbert.reporting import printable


@dataclass(frozen=True)
class Info(WithModel):
    """Describe a model: size, objective, maximum length, device and versions.

    Example: diffusionbert info --model runs/tiny
    """

    def run(self) -> None:
        import torch
        import transformers

        from diffusionbert import __version__
        from diffusionbert.storage.schema import to_json

        model = self.loaded()
        engine, objective = model.engine, model.engine.config.objective
        facts = {
            "model": model.name,
            "parameters": model.num_parameters,
            "vocabulary": engine.vocabulary.size,
            "max_length": model.max_length,
            "time": engine.config.time.value,
            "objective": to_json(objective),
            "length_histogram": engine.length_histogram is not None,
            "device": str(model.device),
            "diffusionbert": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        if self.json:
            print_json(facts)
            return
        shown = {
            "parameters": f"{model.num_parameters:,}",
            "objective": str(objective),
            "length_histogram": "no" if engine.length_histogram is None else "yes",
        }
        for name, value in (facts | shown).items():
            print(f"{name.replace('_', ' '):16} {printable(str(value))}")
