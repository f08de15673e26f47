"""Vocabularies: sentences become tokens, and tokens sentences again; strings stop here.

`Vocabulary` wraps any fast tokenizer of transformers that has a mask token, and gives one to those of decoders, such as
GPT-2's; `train_wordpiece` makes a new one from texts. A row is the tokenizer's own template around a text, `[CLS] text
[SEP]`, or around a pair, `[CLS] source [SEP] target [SEP]`: what may be edited is always what stands between the last
two special tokens. This module knows nothing of networks or noise.
"""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from diffusionbert.hub import TOKENIZER, absent, brought
from diffusionbert.shapes import TokenSet
from diffusionbert.text.cleaning import detokenise
from diffusionbert.text.reading import Pair

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""The special tokens of a trained WordPiece, in the order of their ids."""
MOST_SPELLINGS = 100
"""Of a word that are looked at; a long one has more, each less likely than the last."""
SMALLEST = 512
"""A WordPiece below this size has no room for words beside its alphabet."""


_INNER = [
    (re.compile(r"(?<=\w) (['’]) (?=(?:s|t|re|ve|ll|d|m)\b)"), r"\1"),
    (re.compile(r"(?<=\b[odl]) (['’]) (?=\w)"), r"\1"),  # o'neill
    (re.compile(r"(?<=\w) - (?=\w)"), "-"),
    (re.compile(r"\b(\d+) ?\. (?=\d)"), r"\1."),
    (re.compile(r"\b(\d{1,3}) ?, (?=\d{3}\b)"), r"\1,"),
]


@final
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer, and which of them may be written."""

    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {name!r} exists in slow Python only: use one with a tokenizer.json (a fast tokenizer)"
            )
        for token in ("mask_token", "pad_token"):
            if getattr(self.tokenizer, token) is None:
                raise ValueError(
                    f"tokenizer {name!r} has no {token}: use that of a masked language model, such as bert-base-uncased"
                )
        if int(self.writable.sum()) < 2:
            raise ValueError(f"tokenizer {name!r} has no tokens besides special ones: its vocabulary file is missing")
        if not self._frames_its_text():
            raise ValueError(
                f"tokenizer {name!r} does not put special tokens around a text, as in [CLS] … [SEP]: "
                "use that of a BERT-like model"
            )

    @classmethod
    def load(cls, name_or_folder: str | Path) -> Vocabulary:
        """Opens the tokenizer in a folder, or by its name on the Hub; a decoder's is given what it lacks.

        That is `[MASK]`, `[PAD]`, and a frame around a text made of the tokens with which the decoder's texts begin
        and end. Saved, it is an ordinary tokenizer that has them.
        """
        if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
            raise ValueError(f"no folder {str(name_or_folder)!r}: give a tokenizer's folder, or its Hub name")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(brought(name_or_folder, TOKENIZER)), trust_remote_code=False)
        except Exception as error:  # whatever the library stumbles over, the user gets one line
            raise absent("tokenizer", name_or_folder, "a folder with tokenizer.json", error) from error
        return cls(_completed(tokenizer) if tokenizer.mask_token is None and tokenizer.is_fast else tokenizer)

    def save(self, folder: Path) -> None:
        """Writes the files that `load` and transformers' `AutoTokenizer` open."""
        self.tokenizer.save_pretrained(folder)

    @property
    def lowers(self) -> bool:
        """Whether it puts text in lower case by itself."""
        return self._plain.normalizer is not None and "A" not in self._plain.normalizer.normalize_str("A")

    @property
    def mask_id(self) -> int:
        """The id that hides a token."""
        return int(self.tokenizer.mask_token_id)

    @property
    def pad_id(self) -> int:
        """The id that fills up short rows."""
        return int(self.tokenizer.pad_token_id)

    @property
    def unk_id(self) -> int | None:
        """The id of what the vocabulary has no token for, unless it has a token for everything.

        GPT-2 has one for every byte; that it calls the end of a text unknown, too, means nothing.
        """
        unknown = self.tokenizer.unk_token_id
        if unknown is None or unknown in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            return None
        return int(unknown)

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def special(self) -> TokenSet:
        """The ids that no text contains: `[MASK]`, `[PAD]`, `[CLS]`, … but not `[UNK]`."""
        added = self.tokenizer.added_tokens_decoder.items()
        ids = {*self.tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        return self._marked(ids - {self.unk_id})

    @cached_property
    def writable(self) -> TokenSet:
        """The ids over which a likelihood sums to one: all that a text can contain, so `[UNK]` too."""
        return self._marked(self.tokenizer.get_vocab().values()) & ~self.special

    @cached_property
    def forbidden(self) -> TokenSet:
        """The writable ids that a sampler must never write: `[UNK]` is no word."""
        return self._marked([] if self.unk_id is None else [self.unk_id])

    @cached_property
    def continuation(self) -> TokenSet:
        """The ids of pieces that make the word before them longer: `##ist`, or `ist` where a word begins with `Ġ`, `▁`.

        Half a character, as byte-level pieces may be, counts: it can become a letter.
        """
        backend = self._plain
        prefix = getattr(backend.model, "continuing_subword_prefix", None)

        def continues(piece: str) -> bool:
            if prefix:
                return piece.startswith(prefix) and piece != prefix
            character = backend.decoder.decode(["a", piece])[1:2]
            return character == "\ufffd" or unicodedata.category(character or " ")[0] in "LMN"

        ids = [index for piece, index in self.tokenizer.get_vocab().items() if continues(piece)]
        return self._marked(ids) & ~self.special & ~self.forbidden

    def num_special(self, *, paired: bool) -> int:
        """The number of special tokens in a row."""
        return int(self._plain.num_special_tokens_to_add(paired))

    def encode(self, sentences: Sequence[str], *, marked: bool = False) -> list[list[int]]:
        """Rows `[CLS] sentence [SEP]`. A `[MASK]` written in a text is made of characters, unless `marked`.

        All cores work: the tokenizer spreads the sentences of one call over threads of its own.
        """
        backend = self._marking if marked else self._plain
        return [row.ids for row in backend.encode_batch_fast([_require_utf8(sentence) for sentence in sentences])]

    def own(self, sentences: Sequence[str]) -> list[list[int]]:
        """The same without special tokens."""
        special = self.special.tolist()
        return [[token for token in row if not special[token]] for row in self.encode(sentences)]

    def encode_pairs(self, pairs: Sequence[Pair], *, marked: bool = False) -> list[list[int]]:
        """Rows `[CLS] source [SEP] target [SEP]`, or what the tokenizer's template for pairs is."""
        backend = self._marking if marked else self._plain
        texts = [(_require_utf8(source), _require_utf8(target)) for source, target in pairs]
        return [row.ids for row in backend.encode_batch_fast(texts)]

    def pieces(self, word: str) -> list[int]:
        """The ids of a word as it stands inside a sentence, after a space and without special tokens."""
        _require_utf8(word)
        before, both = (self._plain.encode(text, add_special_tokens=False).ids for text in ("a", f"a {word}"))
        pieces: list[int] = both[len(before) :]
        if not pieces or self.unk_id in pieces:
            raise ValueError(f"{word!r} cannot be written in this vocabulary: give a word made of characters it knows")
        return pieces

    def spellings(self, word: str) -> list[list[int]]:
        """All the ways in which a word can be put together from pieces, the usual one first.

        In a WordPiece `value` may be `val ##ue`, too, and reads the same. Where a space is part of a piece, the usual
        way and that at the beginning of a sentence are given.
        """
        usual = [self.pieces(word), self._plain.encode(word, add_special_tokens=False).ids]
        if not getattr(self._plain.model, "continuing_subword_prefix", None):
            return usual if usual[0] != usual[1] else usual[:1]
        known = self.tokenizer.get_vocab()
        text = self._plain.normalizer.normalize_str(word) if self._plain.normalizer else word
        found: list[list[int]] = [[]]
        for start, end in (match.span() for match in re.finditer(r"\w+|[^\w\s]", text)):
            ways = _ways(text[start:end], known)
            found = [begin + way for begin in found for way in ways][:MOST_SPELLINGS]
        return [usual[0], *(way for way in found if way != usual[0])]

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """The text of a row, without its special tokens."""
        ids = torch.as_tensor(tokens, dtype=torch.long).cpu()
        text = str(self.tokenizer.decode(ids[~self.special[ids]].tolist())).removeprefix("##")
        return _joined(text) if self._splits_punctuation else text

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """Each token by itself, `##` before those that continue a word, in every kind of vocabulary."""
        words = [str(self.tokenizer.decode([token])).strip().removeprefix("##") for token in tokens]
        return ["##" * bool(self.continuation[token]) + word for token, word in zip(tokens, words, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Names this vocabulary in cache keys: another token, id or rule gives another one."""
        description = f"{self._plain.to_str()} {self.special.nonzero().tolist()}"
        return hashlib.sha256(description.encode()).hexdigest()

    @cached_property
    def _splits_punctuation(self) -> bool:
        """Whether blanks around punctuation are lost, as in BERT's WordPiece: `it's` and `it ' s` are the same."""
        return len({tuple(row) for row in self.encode(["it's-a", "it ' s - a"])}) == 1

    @cached_property
    def _plain(self) -> Any:
        """To this copy, special tokens written in a text are characters, so that no corpus can forge them."""
        backend = self._backend_copy()
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _marking(self) -> Any:
        """To this copy, special tokens written in a text are those tokens."""
        return self._backend_copy()

    def _backend_copy(self) -> Any:
        """A tokenizer of its own, because transformers leaves its last padding and truncation in the shared one."""
        backend: Any = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        return backend

    def _marked(self, ids: Iterable[int]) -> Tensor:
        marked = torch.zeros(self.size, dtype=torch.bool)
        marked[list(ids)] = True
        return marked

    def _frames_its_text(self) -> bool:
        rows = self.encode(["a"]) + self.encode_pairs([Pair("a", "a")])
        flags = [self.special[row].tolist() for row in rows]
        return all(len(row) > 2 and row[0] and row[-1] and not row[-2] for row in flags)


def _completed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A decoder's tokenizer with a mask, padding and a frame; the ids that it had stay what they were."""
    begin = tokenizer.bos_token or tokenizer.cls_token or tokenizer.eos_token
    end = tokenizer.eos_token or tokenizer.sep_token or begin
    if begin is None or end is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has neither a mask token nor tokens with which texts begin and end: "
            "use that of a masked language model, or of a decoder that has bos_token or eos_token"
        )
    backend: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    mask = AddedToken("[MASK]", lstrip=True, special=True)  # as RoBERTa's: a blank before it belongs to what is hidden
    taken = (None, begin, end, tokenizer.unk_token)  # many pad with their end, which then frames no text any more
    padding = "[PAD]" if tokenizer.pad_token in taken else tokenizer.pad_token
    backend.add_special_tokens([mask, *(AddedToken(token, special=True) for token in (padding, begin, end))])
    backend.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", end, "$B", end],
        special_tokens=[(token, backend.token_to_id(token)) for token in {begin, end}],
    )
    # The general class: others have rules and special tokens of their own, which come back when they are opened.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        name_or_path=tokenizer.name_or_path,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        bos_token=begin,
        eos_token=end,
        unk_token=tokenizer.unk_token,
        pad_token=padding,
        mask_token=mask,
    )


def _ways(word: str, known: dict[str, int], begin: str = "") -> list[list[int]]:
    """The pieces of a WordPiece that make up a word, in every way."""
    if not word:
        return [[]]
    ends = [end for end in range(len(word), 0, -1) if begin + word[:end] in known]
    found = ([known[begin + word[:end]], *rest] for end in ends for rest in _ways(word[end:], known, "##"))
    return list(islice(found, MOST_SPELLINGS))


def _require_utf8(text: str) -> str:
    """Refuses half characters, as the command line makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not UTF-8; convert it") from None
    return text


def _joined(text: str) -> str:
    """Takes away blanks that a tokenizer put around punctuation: `it ' s` becomes `it's`, ` - ` a hyphen."""
    for pattern, replacement in _INNER:
        text = pattern.sub(replacement, text)
    return detokenise(text)


def train_wordpiece(
    sentences: Iterable[str], size: int, *, lower: bool = True, min_frequency: int = 2, max_alphabet: int = 1000
) -> Vocabulary:
    """Trains a WordPiece of at most `size` tokens; the same texts give the same vocabulary, in whatever order.

    The texts are read twice, first for the alphabet: an iterator that can be read only once is held in memory.
    Characters that are neither ASCII nor among the `max_alphabet` most frequent ones become `[UNK]`.
    """
    if size < SMALLEST:
        raise ValueError(f"a vocabulary of {size} tokens is too small: ask for at least {SMALLEST}, usually thousands")
    sentences = list(sentences) if isinstance(sentences, Iterator) else sentences
    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(sentences, tokenizer.normalizer, min(max_alphabet, size // 4))
    # The trainer numbers the pieces ##x as it meets words, in random order, and breaks ties between equally frequent
    # merges by these numbers. As "special" tokens they have theirs beforehand, and training becomes deterministic.
    inner = [f"##{character}" for character in alphabet if _joins_words(character, tokenizer)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=SPECIAL + inner,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return Vocabulary(BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=lower))


def _alphabet(sentences: Iterable[str], normalizer: Any, limit: int) -> list[str]:
    """The most frequent characters and those of every keyboard; among equally frequent ones, by their code."""
    counts = np.zeros(0x110000, dtype=np.int64)
    remaining = iter(sentences)
    while chunk := list(islice(remaining, 10_000)):
        codes = np.frombuffer(normalizer.normalize_str("\n".join(chunk)).encode("utf-32-le"), dtype=np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    if not counts.any():
        raise ValueError("there is no text to train a vocabulary on: give at least some sentences")
    by_frequency = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    keyboard = normalizer.normalize_str(string.ascii_letters + string.digits + string.punctuation)
    return sorted({*map(chr, by_frequency[:limit].tolist()), *keyboard} - set(string.whitespace))


def _joins_words(character: str, tokenizer: Any) -> bool:
    """Whether a character can stand inside a word, unlike punctuation and Chinese."""
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(f"a{character}"))) == 1
