"""A custom backbone: any `PreTrainedModel` with a config class that transformers can open again.

python examples/custom_backbone.py --steps 40
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

import diffusionbert as db


class MixerConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "example-mixer"

    def __init__(
        self, vocab_size: int = 2048, hidden_size: int = 64, max_position_embeddings: int = 128, **kwargs: Any
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class MixerForMaskedLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Mixes neighboring tokens with a convolution instead of attention."""

    config_class = MixerConfig

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Conv1d(config.hidden_size, config.hidden_size, kernel_size=9, padding=4)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None:
            x = x * attention_mask[..., None]  # padding must not change the logits of a text
        return MaskedLMOutput(logits=self.head(x + nn.functional.gelu(self.mix(x.mT)).mT))


AutoConfig.register(MixerConfig.model_type, MixerConfig)
AutoModelForMaskedLM.register(MixerConfig, MixerForMaskedLM)


def main(steps: int, folder: Path) -> None:
    backbone = MixerForMaskedLM(MixerConfig())
    run = db.train("pydoc", folder / "mixer", backbone=backbone, vocabulary=2048, steps=steps, cache=folder / "cache")
    bert = db.train("pydoc", folder / "bert", vocabulary=2048, steps=steps, cache=folder / "cache")
    model = db.load(run.path)
    print(f"{type(model.backbone).__name__}: {model.generate(length=12, steps=16, seed=0)[0]}")
    results = [
        db.evaluate(one, "pydoc", sentences=32, samples=16, length=12, steps=16, max_draws=8)
        for one in (model, bert.path)
    ]
    print(db.compare(results, names=["mixer", "bert"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().steps, Path(folder))
