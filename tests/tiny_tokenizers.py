"""Tiny tokenizers of the kinds that decoders have."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from diffusionbert.data.corpus import parse_corpus

SENTENCES = list(parse_corpus("pydoc"))[:300]


def byte_level(special: list[str], sentences: list[str] = SENTENCES) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def gpt2_tokenizer() -> PreTrainedTokenizerBase:
    """No template, mask or padding; one token is the beginning, the end and the unknown token."""
    model = json.loads(byte_level(["<|endoftext|>"]).to_str())["model"]
    return GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def llama_tokenizer() -> PreTrainedTokenizerBase:
    """A template with a beginning but no end, and a padding token."""
    tokenizer = byte_level(["<s>", "</s>", "<unk>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
