"""Tiny vocabularies of the three kinds that masked models have."""

from __future__ import annotations

from functools import cache

from tiny_models import plain_roberta, toy_sentences
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece

SENTENCE = "the old king saw the city of paris today ."
"""Each of its words is a token of `wordpiece`."""


@cache
def wordpiece() -> Vocabulary:
    """A lower-casing WordPiece, like the bundled model's."""
    return train_wordpiece(toy_sentences(200), 512)


@cache
def byte_pairs() -> Vocabulary:
    """Byte-level pairs, as RoBERTa has them: a space belongs to the token after it."""
    return Vocabulary.load(plain_roberta())


@cache
def unigram() -> Vocabulary:
    """SentencePiece pieces, as XLM-R has them: words begin with `▁`, characters that it has not seen are unknown."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    # Frequent words become pieces; the alphabet makes every lower-case word possible.
    texts = [*toy_sentences(400), "able table unable tab tabs", *["the king saw"] * 200, "a b c d e f g h i j k l m"]
    texts.append("n o p q r s t u v w x y z")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names))


VOCABULARIES = {"wordpiece": wordpiece, "byte-level": byte_pairs, "sentencepiece": unigram}
"""The three kinds of tokenizers of masked models."""
