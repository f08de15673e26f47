"""Model folders that a test makes in a second: a toy English, runs of every kind on it, plain masked models."""

from __future__ import annotations

import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from shared import encoding_cache, folder, shared
from tiny_tokenizers import byte_level
from tokenizers import AddedToken, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from diffusionbert.data.tokenizer import train_wordpiece
from diffusionbert.diffusion.schedules import Cosine, Mean, Spindle
from diffusionbert.model import Model, load
from diffusionbert.networks.loading import NewBert, NewDecoder
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.autoregressive import AutoregressiveConfig
from diffusionbert.objectives.continuous_time import ContinuousTimeConfig, LearnedScheduleConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig, Quantity
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.objectives.masked_lm import BertMouthConfig, CMLMConfig, MaskedLMConfig
from diffusionbert.objectives.order_agnostic import OrderAgnosticConfig
from diffusionbert.objectives.sundae import SundaeConfig
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.run import train

MAX_LENGTH = 24
"""The positions of a sequence, special tokens included, of every run here."""
SUBJECTS = [
    *("the king", "the old king", "a queen", "the young queen"),
    *("my brother", "her sister", "nobody", "the artist"),
]
VERBS = ["saw", "met", "painted", "praised", "followed"]
OBJECTS = ["a river", "the white castle", "an art museum", "the sea", "two red houses", "the city of paris"]
TIMES = ["today", "in winter", "last year", "again", "on monday morning", "after the long war"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
"""Of plain models."""


def toy_sentences(number: int, seed: int = 0) -> list[str]:
    """Sentences of a small English: a subject, a verb, an object, a time, a full stop."""
    chance = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS, TIMES)
    return [" ".join([*map(chance.choice, parts), "."]) for _ in range(number)]


EXPERIMENTS: dict[str, tuple[TimeEmbedding, object]] = {
    "linear": (TimeEmbedding.NONE, DiscreteTimeConfig(num_steps=16)),
    "cosine": (TimeEmbedding.NONE, ContinuousTimeConfig(Cosine())),
    "any-order": (TimeEmbedding.NONE, OrderAgnosticConfig()),
    "masking": (TimeEmbedding.NONE, MaskedLMConfig()),
    "spindle": (TimeEmbedding.NONE, DiscreteTimeConfig(Spindle(0.3, Mean.CORPUS), num_steps=16)),
    "spindle-sentence": (TimeEmbedding.NONE, DiscreteTimeConfig(Spindle(0.3, Mean.SENTENCE, 0.05), num_steps=16)),
    "spindle-paper": (
        TimeEmbedding.NONE,
        DiscreteTimeConfig(Spindle(0.3, Mean.SENTENCE), num_steps=16, quantity=Quantity.PAPER),
    ),
    "spindle-layers": (TimeEmbedding.LAYERS, DiscreteTimeConfig(Spindle(0.3, Mean.CORPUS), num_steps=16)),
    "prefix": (TimeEmbedding.PREFIX, DiscreteTimeConfig(num_steps=16)),
    "layers": (TimeEmbedding.LAYERS, DiscreteTimeConfig(num_steps=16)),
    "layers-learned": (TimeEmbedding.LAYERS_LEARNED, DiscreteTimeConfig(num_steps=16)),
    "uniform": (TimeEmbedding.NONE, DiscreteTimeConfig(num_steps=16, uniform_noise=True)),
    "uniform-layers": (TimeEmbedding.LAYERS, DiscreteTimeConfig(num_steps=16, uniform_noise=True)),
    "learned": (TimeEmbedding.NONE, LearnedScheduleConfig()),
    "mouth": (TimeEmbedding.NONE, BertMouthConfig()),
    "mask-predict": (TimeEmbedding.NONE, CMLMConfig()),
    "unrolled": (TimeEmbedding.NONE, SundaeConfig()),
    "vectors": (TimeEmbedding.NONE, GaussianConfig(num_steps=50, width=16)),
    "decoder": (TimeEmbedding.NONE, AutoregressiveConfig()),
}
"""Runs by what is particular to them."""


def corpus() -> Path:
    """A file of toy sentences."""
    return shared("texts", _write_texts) / "toy.txt"


def pairs() -> Path:
    """A file of pairs: a sentence, and the same without its time."""
    return shared("texts", _write_texts) / "toy.tsv"


def _write_texts(output: Path) -> None:
    (output / "toy.txt").write_text("\n".join(toy_sentences(400)) + "\n", encoding="utf-8")
    lines = []
    for sentence in toy_sentences(300, seed=1):
        time = next(time for time in TIMES if sentence.endswith(f"{time} ."))
        lines.append(f"{sentence}\t{sentence.removesuffix(f' {time} .')} .")
    (output / "toy.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def config_of(kind: str, *, steps: int, data: Path | None = None) -> RunConfig:
    time, objective = EXPERIMENTS[kind]
    return RunConfig(
        DataConfig(str(data or corpus()), held_out=0.01, vocabulary=512, max_length=MAX_LENGTH),
        (NewDecoder if kind == "decoder" else NewBert)(layers=1, width=32, heads=2, dropout=0.0),
        time,
        objective,  # type: ignore[arg-type]
        TrainingConfig(
            steps=steps, batching=TokenBudget(512), learning_rate=1e-2, warmup=2,
            validate_every=steps, validation_sentences=8, validation_draws=1, save_every=steps,
        ),
    )  # fmt: skip


def run_of(kind: str, *, steps: int = 2) -> Path:
    """The folder of a run of this kind, hardly trained; `pairs` is linear on pairs."""
    paired = kind == "pairs"
    config = config_of("linear" if paired else kind, steps=steps, data=pairs() if paired else None)
    return shared(f"{kind}-{steps}", lambda output: train(config, output, cache=encoding_cache()))


def model_of(kind: str, *, steps: int = 2) -> Model:
    """The model of such a run."""
    return _model(kind, steps)


@cache
def _model(kind: str, steps: int) -> Model:
    return load(run_of(kind, steps=steps), device="cpu")


@cache
def bundled() -> Model:
    """The model inside the package."""
    return load(device="cpu")


def trained() -> Model:
    """A linear model that has learned the toy English."""
    return model_of("linear", steps=150)


def trained_run() -> Path:
    """Its run folder."""
    return run_of("linear", steps=150)


def plain_bert() -> Path:
    """The folder of a BERT as `save_pretrained` leaves it: cased, and its vocabulary larger than its tokenizer's."""
    return shared("plain-bert", _write_plain_bert)


def _write_plain_bert(output: Path) -> None:
    vocabulary = train_wordpiece([sentence.capitalize() for sentence in toy_sentences(400)], 512, lower=False)
    config = BertConfig(vocab_size=vocabulary.size + 5, max_position_embeddings=32, **SIZES, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(output)
    vocabulary.save(output)


def plain_roberta() -> Path:
    """The folder of a RoBERTa: byte-level pieces, another mask token, positions that begin after the padding's."""
    return shared("plain-roberta", _write_plain_roberta)


def _write_plain_roberta(output: Path) -> None:
    tokenizer = byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], toy_sentences(400))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)
    wrapped.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    wrapped.save_pretrained(output)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = RobertaConfig(vocab_size=len(wrapped), max_position_embeddings=34, **SIZES, initializer_range=0.3, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        RobertaForMaskedLM(config).save_pretrained(output)


def damaged(source: Path, name: str, change: dict[str, bytes | None]) -> Path:
    """A copy of a model folder in which files have other contents, or are gone."""
    output = Path(tempfile.mkdtemp(dir=folder())) / name
    shutil.copytree(source, output)
    for file, content in change.items():
        (output / file).unlink(missing_ok=True)
        if content is not None:
            (output / file).write_bytes(content)
    return output
