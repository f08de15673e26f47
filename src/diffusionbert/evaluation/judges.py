"""Judges text with another model: generative perplexity, always with entropy, and MAUVE (Pillutla et al. 2021, eq. 4).

    perplexity = exp( Σ_i -log q(text_i) / Σ_i tokens_i )        each text on its own, in the judge's tokens

The judge is a causal language model q. Each text is preceded by the judge's start token (for GPT-2, its end token in
that role), so that every token of the text is scored; the start token itself is not counted, and no end token is
scored. A low perplexity alone says little: "the the the" has one. It is therefore reported with the mean entropy of
each text's own tokens, and with the same figures for real sentences. This module does not depend on diffusion: texts
are strings.
"""

from __future__ import annotations

import importlib
import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diffusionbert.evaluation.metrics import entropy
from diffusionbert.likelihood.intervals import Numbers, ratio_intervals
from diffusionbert.parallel import current
from diffusionbert.storage.hub import MODEL, fetch, not_found, quiet
from diffusionbert.training.batches import TokenBudget

USUAL_FEATURES = "gpt2-large"
"""The model whose features MAUVE was published with."""
_POSITIONS_PER_CALL = 2048  # positions whose logits are in memory at a time

Advance = Callable[[int], None]
"""Progress callback, called with the number of texts just read."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What a judge computed for each text."""

    nats: Numbers
    tokens: Numbers
    """The number of predicted tokens."""
    entropy: Numbers
    """The entropy of the text's token frequencies, in nats."""
    features: NDArray[np.float32]
    """The last layer's hidden state at the last token."""
    num_truncated: int

    def judged(self, seed: int = 0) -> Judged:
        """Summarizes all texts; empty ones are left out."""
        total = float(self.tokens.sum())
        if not total:
            raise ValueError(f"all {len(self.tokens)} texts are empty to the judge; give other texts")
        rate, some = float(self.nats.sum()) / total, self.tokens > 0
        low = high = rate
        if some.sum() > 1:
            [(low, high)] = ratio_intervals(self.nats[some], [self.tokens[some]], seed)
        return Judged(
            math.exp(rate),
            (math.exp(low), math.exp(high)),
            float(self.entropy[some].mean()),
            int(total),
            int((~some).sum()),
            self.num_truncated,
        )


@dataclass(frozen=True)
class Judged:
    """A judge's figures for a set of texts."""

    perplexity: float
    """The perplexity per token of the judge."""
    ci95: tuple[float, float]
    """The 95 % interval over texts, by bootstrap."""
    entropy: float
    """The mean over texts of the entropy of the text's own tokens, in nats."""
    num_tokens: int
    num_empty: int
    num_truncated: int
    """The number of texts that were truncated to the judge's maximum length."""


@final
@dataclass(frozen=True)
class Judgment:
    """One judge's figures for samples and for real sentences."""

    name: str
    convention: str
    samples: Judged
    real: Judged


@final
@dataclass(frozen=True, eq=False)
class Judge:
    """A causal language model that scores texts."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def start(self) -> int | None:
        """The token before each text; None if the tokenizer has none: then the first token is given."""
        tokens = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return next((int(token) for token in tokens if token is not None), None)

    @property
    def is_gpt2(self) -> bool:
        """Whether it belongs to the family whose features MAUVE was published with."""
        return bool(self.model.config.model_type == "gpt2")

    @property
    def convention(self) -> str:
        """What is counted, in words."""
        begin = (
            "the first token is given and not counted"
            if self.start is None
            else f"after {self.tokenizer.convert_ids_to_tokens(self.start)!r}, which is not counted"
        )
        return f"per token of the judge, each text by itself, {begin}; no end token; Σ nats / Σ tokens; float32"

    @torch.no_grad()
    def read(self, texts: Sequence[str], advance: Advance = lambda num_texts: None) -> Reading:
        """Scores texts in batches of similar length; batching does not change the scores."""
        before = [] if self.start is None else [self.start]
        ids = [list(tokens) for tokens in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
        entropies = np.array([entropy([*Counter(tokens).values()]) for tokens in ids])
        room = self._longest - len(before)
        sequences = [before + tokens[:room] for tokens in ids]
        lengths = np.array([len(sequence) for sequence in sequences])
        nats, features = np.zeros(len(ids)), np.zeros((len(ids), self.model.config.hidden_size), np.float32)
        order = np.argsort(-lengths, kind="stable")[: int((lengths > 0).sum())]
        edges = np.cumsum(TokenBudget(max(_POSITIONS_PER_CALL, int(lengths.max(initial=1)))).cut(lengths[order]))[:-1]
        batches = [index for index in np.split(order, edges) if len(index)]
        read = current().share(batches, lambda index: self._read([sequences[number] for number in index]))
        for index, (own_nats, own_features) in zip(batches, read, strict=True):
            nats[index], features[index] = own_nats, own_features
            advance(len(index))
        advance(int((lengths == 0).sum()))
        num_truncated = sum(len(tokens) > room for tokens in ids)
        return Reading(nats, np.maximum(lengths - 1, 0).astype(np.float64), entropies, features, num_truncated)

    @property
    def _longest(self) -> int:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return int(limit or min(self.tokenizer.model_max_length, 1 << 20))

    def _read(self, sequences: list[list[int]]) -> tuple[Numbers, NDArray[np.float32]]:
        device = self.model.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        positions = torch.arange(int(lengths.max()), device=device)
        attention_mask = positions < lengths[:, None]
        tokens = torch.zeros(attention_mask.shape, dtype=torch.long, device=device)
        tokens[attention_mask] = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        output = self.model(tokens, attention_mask=attention_mask.long(), output_hidden_states=True, use_cache=False)
        logits: Tensor = output.logits[:, :-1].float()
        nats = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        last = output.hidden_states[-1][torch.arange(len(sequences), device=device), lengths - 1]
        sums: Numbers = (nats.double() * attention_mask[:, 1:]).sum(dim=1).cpu().numpy()
        return sums, last.float().cpu().numpy()


def load_judge(name: str, device: torch.device) -> Judge:
    """Opens a causal language model from a folder, a GGUF file or the Hub; safetensors or GGUF only, never pickle."""
    folder, options = _located(name)
    try:
        folder = str(fetch(folder, MODEL))
        with quiet(), _without_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
            weights = options or {"use_safetensors": True}
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **weights)
    except Exception as error:  # whatever the library raises, the user gets one line
        hint = " (which needs the package gguf: pip install gguf)" if options else ""
        expected = f"a causal language model's folder with safetensors, a .gguf file{hint}"
        raise not_found("judge", name, expected, error) from error
    model.to(device).eval()  # type: ignore[arg-type]
    return Judge(name, model, tokenizer)


def _located(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or name, with the GGUF file in it as an option, if there is one."""
    path = Path(name).expanduser()
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or (path / "config.json").exists():
        return (str(path) if path.is_dir() else name), {}
    if len(files) > 1:
        raise ValueError(f"{name!r} holds {len(files)} GGUF files, {files[0].name!r} first; name the one you want")
    return str(files[0].parent), {"gguf_file": files[0].name}


def _without_bars() -> AbstractContextManager[object]:
    """Hides the progress bars of the GGUF conversion and of MAUVE outside a terminal."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


# ---- MAUVE ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Mauve:
    """The similarity of two sets of texts: 1 for equal distributions, near 0 for very different ones."""

    value: float
    smoothed: float
    """MAUVE* of Pillutla et al. 2023, which is less biased for few texts."""
    features: str
    """The model whose features were compared; values of different features are not comparable."""
    num_buckets: int
    num_samples: int
    num_real: int


def featurizer(judge: Judge | None, device: torch.device) -> Judge:
    """GPT-2 large, which MAUVE was published with, if available; otherwise the judge."""
    if judge is not None and judge.is_gpt2:
        return judge
    try:
        return load_judge(USUAL_FEATURES, device)
    except ValueError as error:
        if judge is None:
            raise ValueError(f"MAUVE needs a model for its features: give one as --judge ({error})") from None
        return judge


def compute_mauve(samples: NDArray[np.float32], real: NDArray[np.float32], features: str, seed: int = 0) -> Mauve:
    """Computes MAUVE with its authors' package, from the features of texts."""
    package = require_mauve()
    with _without_bars():
        found = package.compute_mauve(p_features=real, q_features=samples, seed=seed, verbose=False)
    return Mauve(float(found.mauve), float(found.mauve_star), features, int(found.num_buckets), len(samples), len(real))


def require_mauve() -> Any:
    """Imports the package; raises ValueError with installation instructions if it is missing."""
    try:
        return importlib.import_module("mauve")
    except ImportError:
        raise ValueError("MAUVE needs the package mauve-text: pip install 'diffusionbert[eval]'") from None
