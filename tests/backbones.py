"""Tiny real masked language models of every architecture we promise, and sentences for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AutoModelForMaskedLM,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.loading import NewModernBert
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, SinusoidalTime

VOCAB_SIZE, NUM_TOKENIZER_IDS, NUM_SPECIAL = 50, 47, 5
CLS, SEP, MASK = 2, 3, 4

# Weights far larger than a real initialization: what should change the answer changes it visibly.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _new_modernbert() -> PreTrainedConfig:
    """That of the backbone `modernbert`: all layers are global, and no special id but padding is known."""
    config = NewModernBert(2, 32, 2, 0.0).build(VOCAB_SIZE, 24, 0, causal=False).config
    config.initializer_range = COMMON["initializer_range"]
    return config


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(**COMMON, **NO_DROPOUT),
    "roberta": lambda: RobertaConfig(**COMMON, **NO_DROPOUT),
    "xlm-roberta": lambda: XLMRobertaConfig(**COMMON, **NO_DROPOUT),
    "electra": lambda: ElectraConfig(**COMMON, **NO_DROPOUT, embedding_size=16),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=24,
        initializer_range=0.3, dropout=0.0, attention_dropout=0.0,
    ),
    "modernbert": lambda: ModernBertConfig(
        **COMMON, pad_token_id=0, bos_token_id=CLS, eos_token_id=SEP, cls_token_id=CLS, sep_token_id=SEP
    ),
    "new-modernbert": _new_modernbert,
    "deberta-v2": lambda: DebertaV2Config(
        **COMMON, **NO_DROPOUT, relative_attention=True, position_biased_input=False, position_buckets=8,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True, conv_kernel_size=3,
    ),
    "mpnet": lambda: MPNetConfig(**COMMON, **NO_DROPOUT),
    "albert": lambda: AlbertConfig(**COMMON, **NO_DROPOUT, embedding_size=16),
}  # fmt: skip
ARCHITECTURES = list(CONFIGS)
UNSHARED = [name for name in ARCHITECTURES if name != "albert"]


def backbone_of(architecture: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForMaskedLM.from_config(CONFIGS[architecture]()).eval()


def tokenizer_allowed() -> Tensor:
    """Marks the ids of the tokenizer that are not special; the model's vocabulary is larger still."""
    return torch.arange(NUM_TOKENIZER_IDS) >= NUM_SPECIAL


def sentences(backbone: PreTrainedModel, lengths: tuple[int, ...] = (9, 6, 4), seed: int = 0) -> Batch:
    """Sequences `[CLS] … [SEP]` of these lengths, padded at the end, with every second token masked."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths))
    tokens = torch.randint(NUM_SPECIAL, NUM_TOKENIZER_IDS, size, generator=generator)
    position, length = torch.arange(size[1]), torch.tensor(lengths)[:, None]
    editable = (position > 0) & (position < length - 1)
    tokens[editable & (position % 2 == 1)] = MASK
    tokens[:, 0] = CLS
    tokens[position == length - 1] = SEP
    tokens[position >= length] = backbone.config.pad_token_id
    return Batch.of(tokens, editable, attention_mask=position < length)


def bare_log_probs(backbone: PreTrainedModel, batch: Batch) -> Tensor:
    """The model's own distribution over allowed tokens at all positions."""
    logits = backbone(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
    return logits[..., :NUM_TOKENIZER_IDS].masked_fill(~tokenizer_allowed(), -torch.inf).log_softmax(-1)


def overlapping(inside: nn.Module, calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Makes calls in threads that wait for each other inside a module, so that all of them are under way at once."""
    barrier = threading.Barrier(len(calls), timeout=60)

    def wait(*_: object) -> None:
        barrier.wait()

    handle = inside.register_forward_hook(wait)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            # Gradient mode belongs to a thread.
            return list(pool.map(lambda call: torch.no_grad()(call)(), calls))
    finally:
        handle.remove()


def timed_bert() -> Denoiser:
    """A network on which the time has an effect."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = backbone_of("bert")
        conditioning = LayerwiseTime(backbone, SinusoidalTime(16))
        for parameter in conditioning.projections.parameters():
            nn.init.normal_(parameter, std=0.3)
        return Denoiser(backbone, conditioning, tokenizer_allowed()).eval()


def mixed_canvas(backbone: PreTrainedModel) -> Batch:
    """A frozen sequence, and others of 5, 9, 2 and 6 editable positions with a frozen token and a frozen mask."""
    batch = sentences(backbone, (6, 7, 12, 4, 9))
    editable = batch.editable.clone()
    editable[2, 4] = editable[4, 3] = False
    editable[0] = False
    return replace(batch, editable=editable, example=torch.tensor([17, 5, 2**40 + 1, 3, 8]))


def repeated_words(rows: int = 12) -> Batch:
    """Sentences that repeat one word, some of them shorter."""
    tokens = torch.randint(NUM_SPECIAL, 9, (rows, 1), generator=torch.Generator().manual_seed(1)).repeat(1, 10)
    attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    attention_mask[::3, 7:] = False
    tokens[:, 0], tokens[~attention_mask] = CLS, 0
    editable = attention_mask.clone()
    editable[:, 0] = False
    return Noise(8).stratify(Batch.of(tokens, editable, attention_mask))


class Spy(nn.Module):
    """Passes a sampler's queries on and keeps them."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.questions: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.questions.append((tokens, attention_mask, t, targets))
        return self.network(tokens, attention_mask, t, targets)

    @property
    def num_sequences(self) -> int:
        return sum(len(tokens) for tokens, *_ in self.questions)
