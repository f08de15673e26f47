"""Vocabularies: encode texts as token ids, and decode them.

`Vocabulary` wraps any fast transformers tokenizer that has a mask token, and adds one to the tokenizers of decoders
such as GPT-2; `train_wordpiece` trains a new one. A sequence follows the tokenizer's template, `[CLS] text [SEP]` or
`[CLS] source [SEP] target [SEP]`: its editable positions are those between the last two special tokens. This module
does not depend on networks or noise.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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

from diffusionbert.data.corpus import Rule, detokenize, substituted
from diffusionbert.data.files import Pair
from diffusionbert.diffusion.shapes import TokenSet
from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import read_json
from diffusionbert.storage.hub import TOKENIZER, fetch, not_found, quiet
from diffusionbert.storage.limits import Limit, require_regular
from diffusionbert.storage.reader import foreign, without_panic_lines

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""The special tokens of a trained WordPiece, in the order of their ids."""
MOST_SPELLINGS = 100
"""The maximum number of spellings considered per word; later ones are less likely."""
ANCHORS = ("0", "a", "q", "x", "z")
"""Words put before a text to encode it as their continuation; at least one of them stays a token of its own."""
SMALLEST = 512
"""The minimum size of a trained WordPiece; a smaller one has no room for words besides its alphabet."""


_INNER_RULES: list[Rule] = [
    (r"(?<=\w) (['’]) (?=(?:s|t|re|ve|ll|d|m)\b)", r"\1", "'’"),
    (r"(?<=\b[odl]) (['’]) (?=\w)", r"\1", "'’"),  # o'neill
    (r"(?<=\w) ([-/]) (?=\w)", r"\1", "-/"),
    (r"(?<=\b\w) & (?=\w\b)", "&", "&"),  # r&b
    (r"(?<=#) (?=\d)", "", "#"),
    (r"\b(\d+) ?\. (?=\d)", r"\1.", "."),
    (r"\b(\d{1,3}) ?, (?=\d{3}\b)", r"\1,", ","),
    (r"\b(\d{1,2}) ?: (?=\d\d\b)", r"\1:", ":"),
    (r"(?<=\b[^\W\d_]) ?\. (?=[^\W\d_] ?\.)", ".", "."),  # u.s.
]
"""Remove the spaces that a tokenizer puts around punctuation: `it ' s` becomes `it's`, ` - ` a hyphen."""
_ENDS = frozenset(["", ",", ".", ";", ":", ")", "?", "!"])
_SAYING = frozenset([
    "said", "says", "say", "asked", "replied", "answered", "thought", "shouted", "cried", "called", "yelled",
    "whispered", "exclaimed", "added",
])  # fmt: skip


@final
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, with its special, allowed and continuation tokens."""

    tokenizer: PreTrainedTokenizerBase
    letter_case: Tensor | None = None
    """The usual letter case of words (`data.letter_case`), if the tokenizer lower-cases text and it was learned."""

    def __post_init__(self) -> None:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        if not self.tokenizer.is_fast:
            raise ValueError(f"tokenizer {name!r} is not a fast tokenizer; use one with a tokenizer.json")
        for token in ("mask_token", "pad_token"):
            if getattr(self.tokenizer, token) is None:
                raise ValueError(
                    f"tokenizer {name!r} has no {token}; use that of a masked language model, such as bert-base-uncased"
                )
        Limit.TOKENS.require(self.size, f"tokenizer {name!r} has too large ids", "use another tokenizer")
        self._require_own_special_ids(name)
        if int(self.allowed.sum()) < 2:
            raise ValueError(f"tokenizer {name!r} has special tokens only; restore its missing vocabulary file")
        encoded = self.encode(["a"]) + self.encode_pairs([Pair("a", "a")])
        if unknown := [token for tokens in encoded for token in tokens if token >= self.size]:
            raise ValueError(
                f"tokenizer {name!r} adds the id {unknown[0]} to a text, but its ids end at {self.size - 1}; restore it"
            )
        flags = [self.special[tokens].tolist() for tokens in encoded]
        if not all(len(special) > 2 and special[0] and special[-1] and not special[-2] for special in flags):
            raise ValueError(
                f"tokenizer {name!r} must add special tokens around a text, as in [CLS] … [SEP]; "
                "use that of a BERT-like model"
            )

    def _require_own_special_ids(self, name: str) -> None:
        """Refuses a mask or padding token that shares its id with another token: some word would count as masked."""
        own, pieces = self.tokenizer, self.tokenizer.get_vocab()
        others = own.cls_token_id, own.sep_token_id, own.bos_token_id, own.eos_token_id, own.unk_token_id
        for kind, token, index in (("mask", own.mask_token, self.mask_id), ("padding", own.pad_token, self.pad_id)):
            more = [piece for piece, number in pieces.items() if number == index and piece != str(token)]
            is_shared = self.mask_id == self.pad_id or (kind == "mask" and index in others)
            if pieces.get(str(token)) != index or more or is_shared:
                raise ValueError(
                    f"tokenizer {name!r} has no {kind} token of its own: {str(token)!r:.40} has the id {index} of "
                    f"{more[0] if more else 'another token'!r:.40}; restore the tokenizer of the model"
                )

    @classmethod
    def load(cls, name_or_folder: str | Path, *, with_mask: bool = False) -> Vocabulary:
        """Opens a tokenizer by its folder or its name on the Hub.

        A decoder's tokenizer gets the tokens it lacks, `[MASK]` and `[PAD]`, and a template that puts its own
        beginning-of-text and end-of-text tokens around each text. Once saved, it is an ordinary tokenizer.

        Args:
            name_or_folder: A folder, or a name on the Hub.
            with_mask: Whether it must have a mask token already, because a network was trained with it.

        Example:
            `Vocabulary.load("bert-base-uncased").encode(["a sentence ."])`
        """
        if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
            raise ValueError(f"no folder {str(name_or_folder)!r}; give a tokenizer's folder, or its Hub name")

        def refusal(error: BaseException) -> ValueError:
            return not_found("tokenizer", name_or_folder, "a folder with tokenizer.json", error)

        with foreign(refusal):
            folder = fetch(name_or_folder, TOKENIZER)
        _require_sound(folder)
        with foreign(refusal), without_panic_lines(), quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        with (
            foreign(lambda error: ValueError(str(error) if isinstance(error, ValueError) else str(refusal(error)))),
            without_panic_lines(),
        ):
            if tokenizer.mask_token is None and tokenizer.is_fast:
                if with_mask:
                    raise ValueError(
                        f"tokenizer {str(name_or_folder)!r} has no mask_token, which its masked language model needs; "
                        "restore the tokenizer that the model was trained with"
                    )
                tokenizer = _completed(tokenizer)
            return cls(tokenizer)

    def save(self, folder: Path) -> None:
        """Saves files for `load` and transformers' `AutoTokenizer`."""
        self.tokenizer.save_pretrained(folder)

    @property
    def lowers(self) -> bool:
        """Whether the tokenizer lower-cases text."""
        return self._plain.normalizer is not None and "A" not in self._plain.normalizer.normalize_str("A")

    @property
    def mask_id(self) -> int:
        return int(self.tokenizer.mask_token_id)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @property
    def unk_id(self) -> int | None:
        """The id of the unknown token; None if every text can be encoded.

        GPT-2 has a token for every byte, so its unknown token, which is its end-of-text token, is never needed.
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
        """The special ids, which no text contains: `[MASK]`, `[PAD]`, `[CLS]`, … but not `[UNK]`."""
        added = self.tokenizer.added_tokens_decoder.items()
        ids = {*self.tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        return self._token_set(ids - {self.unk_id})

    @cached_property
    def allowed(self) -> TokenSet:
        """The allowed ids: all that a text can contain, including `[UNK]`. A likelihood sums to one over them."""
        return self._token_set(self.tokenizer.get_vocab().values()) & ~self.special

    @cached_property
    def forbidden(self) -> TokenSet:
        """The allowed ids that a sampler must never generate: `[UNK]`."""
        return self._token_set([] if self.unk_id is None else [self.unk_id])

    @cached_property
    def continuation(self) -> TokenSet:
        """The ids of pieces that continue a word: `##ist`, or `ist` where words begin with `Ġ` or `▁`.

        Byte-level pieces that are part of a character are included, because they can become a letter.
        """
        backend = self._plain
        prefix = getattr(backend.model, "continuing_subword_prefix", None)

        def continues(piece: str) -> bool:
            if prefix:
                return piece.startswith(prefix) and piece != prefix
            pieces = ["a", piece]
            text = " ".join(pieces) if backend.decoder is None else backend.decoder.decode(pieces)
            character = text[1:2]
            return character == "\ufffd" or unicodedata.category(character or " ")[0] in "LMN"

        with foreign(_not_decoded), self._quietly:
            ids = [index for piece, index in self.tokenizer.get_vocab().items() if continues(piece)]
        return self._token_set(ids) & ~self.special & ~self.forbidden

    @property
    def has_continuation_prefix(self) -> bool:
        """Whether the vocabulary marks pieces that continue a word, as in `##ist`, rather than those that begin one."""
        return bool(getattr(self._plain.model, "continuing_subword_prefix", None))

    def joins_letters(self, character: str) -> bool:
        """Whether a letter right after this character belongs to the same word."""
        normalized = (
            f"{character}a" if self._plain.normalizer is None else self._plain.normalizer.normalize_str(f"{character}a")
        )
        splitter = self._plain.pre_tokenizer
        return splitter is None or len(splitter.pre_tokenize_str(normalized)) == 1

    def num_special(self, *, paired: bool) -> int:
        """The number of special tokens in a sequence."""
        return int(self._plain.num_special_tokens_to_add(paired))

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Encodes sentences as `[CLS] sentence [SEP]`, on all cores."""
        return self._batch(list(map(_require_utf8, sentences)))

    def encode_spans(self, text: str, source: str | None = None) -> tuple[list[int], list[tuple[int, int] | None]]:
        """Encodes a text, after a source if there is one, and finds the characters of each token.

        Returns:
            The whole sequence, and the start and end of each token in `text`; None for special tokens and the source.
        """
        given = (_require_utf8(text),) if source is None else (_require_utf8(source), _require_utf8(text))
        encoding = self._one(*given, special=True)
        number = len(given) - 1
        spans = [
            span if sequence == number else None
            for span, sequence in zip(encoding.offsets, encoding.sequence_ids, strict=True)
        ]
        return encoding.ids, spans

    def encode_after(self, text: str) -> list[int]:
        """Encodes a text that directly follows a word: `able` as `##able`, or without the marker for a space."""
        for anchor in ANCHORS:
            encoding = self._one(anchor + _require_utf8(text))
            pairs = list(zip(encoding.ids, encoding.offsets, strict=True))
            after = [(token, start) for token, (start, end) in pairs if end > len(anchor)]
            if len(after) < len(pairs) and all(start >= len(anchor) for _, start in after):
                return [token for token, _ in after]
        return self.own([text])[0]

    def own(self, sentences: Sequence[str]) -> list[list[int]]:
        """Encodes sentences without special tokens."""
        special = self.special.tolist()
        return [[token for token in tokens if not special[token]] for tokens in self.encode(sentences)]

    def encode_pairs(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """Encodes pairs as `[CLS] source [SEP] target [SEP]`, or by the tokenizer's own template for pairs."""
        texts = [(_require_utf8(source), _require_utf8(target)) for source, target in pairs]
        return self._batch(texts)

    def _batch(self, texts: list[Any]) -> list[list[int]]:
        with foreign(_not_encoded), self._quietly:
            return [encoding.ids for encoding in self._plain.encode_batch_fast(texts)]

    def _one(self, *given: str, special: bool = False) -> Any:
        """The encoding of a text, or of a source and a text."""
        with foreign(_not_encoded), self._quietly:
            return self._plain.encode(*given, add_special_tokens=special)

    def _decoded(self, tokens: list[int]) -> str:
        with foreign(_not_decoded), self._quietly:
            return str(self.tokenizer.decode(tokens))

    @property
    def _quietly(self) -> AbstractContextManager[None]:
        """Hides panic messages of the Rust library, for tokenizers whose rules may cause one."""
        return without_panic_lines() if self._may_panic else nullcontext()

    @cached_property
    def _may_panic(self) -> bool:
        """Regular expressions may backtrack endlessly; a `Strip` decoder may run past the start of a piece."""
        return any(rule in self._plain.to_str() for rule in ('"Regex":', '"type":"Strip"'))

    def pieces(self, word: str) -> list[int]:
        """The ids of a word inside a sentence: after a space, without special tokens."""
        _require_utf8(word)
        before, both = (self._one(text).ids for text in ("a", f"a {word}"))
        pieces: list[int] = both[len(before) :]
        if not pieces or self.unk_id in pieces:
            raise ValueError(f"this vocabulary cannot encode {word[:40]!r}; give a word made of characters it contains")
        return pieces

    def spellings(self, word: str) -> list[list[int]]:
        """All ways to spell a word in pieces, the usual one first.

        In a WordPiece, `value` may also be `val ##ue`. Where spaces are part of pieces, only the usual spelling and
        the one at the beginning of a sentence are returned.
        """
        usual = [self.pieces(word), self._one(word).ids]
        if not self.has_continuation_prefix:
            return usual if usual[0] != usual[1] else usual[:1]
        known = self.tokenizer.get_vocab()
        text = self._plain.normalizer.normalize_str(word) if self._plain.normalizer else word
        found: list[list[int]] = [[]]
        for start, end in (match.span() for match in re.finditer(r"\w+|[^\w\s]", text)):
            endings = _spellings(text[start:end], known)
            found = [begin + ending for begin in found for ending in endings][:MOST_SPELLINGS]
        return [usual[0], *(spelling for spelling in found if spelling != usual[0])]

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """The text of a sequence, without its special tokens."""
        ids: Iterable[int] = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        own = [token for token in ids if token not in self._special_ids]
        if not own:
            return ""
        if not self._splits_punctuation:
            return self._decoded(own).removeprefix("##")
        # The tokenizer's own decoder would join some punctuation, and turn "do not" into "don't".
        text = " ".join(map(self._plain.id_to_token, own)).replace(" ##", "").removeprefix("##")
        return detokenize(_with_quotes(_with_quotes(substituted(text, _INNER_RULES), '"'), "'"))

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, with `##` before those that continue a word, for every kind of vocabulary."""
        words = [self._decoded([token]).strip().removeprefix("##") for token in tokens]
        return ["##" * bool(self.continuation[token]) + word for token, word in zip(tokens, words, strict=True)]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.nonzero()[:, 0].tolist())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens, ids and rules, for cache keys."""
        description = f"{self._plain.to_str()} {self.special.nonzero().tolist()}"
        return hashlib.sha256(description.encode()).hexdigest()

    @cached_property
    def _splits_punctuation(self) -> bool:
        """Whether spaces around punctuation are lost, as in BERT's WordPiece: `it's` and `it ' s` are the same."""
        is_lost = len({tuple(tokens) for tokens in self.encode(["it's-a", "it ' s - a"])}) == 1
        return is_lost and getattr(self._plain.model, "continuing_subword_prefix", None) == "##"

    @cached_property
    def _plain(self) -> Any:
        """Encodes special tokens in a text as plain characters, so that no corpus can forge them.

        A copy, because transformers stores its last padding and truncation in the shared tokenizer.
        """
        backend: Any = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        if getattr(backend.model, "dropout", None):  # BPE dropout: random pieces, meant for training
            backend.model.dropout = None
        return backend

    def _token_set(self, ids: Iterable[int]) -> Tensor:
        chosen = torch.zeros(self.size, dtype=torch.bool)
        chosen[list(ids)] = True
        return chosen


def _not_encoded(error: BaseException) -> ValueError:
    return ValueError(f"the tokenizer cannot encode this text ({reason_of(error)}); use another tokenizer or text")


def _not_decoded(error: BaseException) -> ValueError:
    return ValueError(f"the tokenizer cannot decode its own tokens ({reason_of(error)}); restore its tokenizer.json")


def _require_sound(folder: Path) -> None:
    """Refuses tokenizer files that would exhaust memory as soon as they are opened or used."""
    for file in sorted([*folder.glob("*"), *folder.glob("*_templates/*")]):
        if file.suffix in (".json", ".txt", ".model", ".jinja"):
            require_regular(file)
    file = folder / "tokenizer.json"
    plain = read_json(file) if file.exists() else {}
    model = plain.get("model") if isinstance(plain, dict) else None
    if file.exists() and not isinstance(model, dict):
        raise ValueError(f"{str(file)!r} must be an object with a model; restore it, or copy the tokenizer again")
    pieces, added = (model or {}).get("vocab"), plain.get("added_tokens")
    ids = list(pieces.values()) if isinstance(pieces, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((index for index in ids if isinstance(index, int)), default=0)
    Limit.TOKENS.require(largest, f"{str(file)!r} has too large ids", "restore it")
    for rules in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(plain.get(rules))
        Limit.GROWTH.require(growth, f"{str(file)!r} makes too many characters of one ({rules})", "restore it")


_DEEPEST = 32
"""The maximum nesting of rules."""
_GROWING = {"ByteLevel": 4.0, "BertNormalizer": 3.0}
"""Rule types that turn one character into several: its bytes, or the character with spaces around it."""


def _growth(rule: Any, depth: int = 0) -> float:
    """The most characters into which a rule of tokenizer.json turns one character; 1 if it is malformed."""
    if not isinstance(rule, dict):
        return 1.0
    if depth > _DEEPEST:
        return math.inf
    lists = (rule.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    parts = [part for each in lists if isinstance(each, list) for part in each]
    growth = math.prod((_growth(part, depth + 1) for part in parts), start=_GROWING.get(str(rule.get("type")), 1.0))
    if rule.get("type") == "Precompiled":
        growth *= _longest_replacement(rule.get("precompiled_charsmap"))
    content, pattern = rule.get("content", rule.get("prepend")), rule.get("pattern")
    if isinstance(content, str):
        exact = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match the empty string before each character.
        growth *= max(1, len(content) / max(1, len(exact))) if isinstance(exact, str) else 1 + len(content)
    return growth


def _longest_replacement(encoded: Any) -> int:
    """The longest replacement in a SentencePiece table, in characters; raises ValueError if the table is damaged.

    The table is the size of a trie, the trie, and NUL-terminated replacements. Its reader allocates whatever size the
    table claims.
    """
    table = b""
    with suppress(ValueError, TypeError):
        table = base64.b64decode(encoded)
    size = int.from_bytes(table[:4], "little")
    if not 0 < size <= len(table) - 4:
        raise ValueError("the tokenizer has a damaged precompiled_charsmap; restore its tokenizer.json")
    return max(1, *map(len, table[4 + size :].decode(errors="replace").split("\0")))


def _completed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Adds a mask token, a padding token and a template to a decoder's tokenizer; existing ids do not change."""
    begin = tokenizer.bos_token or tokenizer.cls_token or tokenizer.eos_token
    end = tokenizer.eos_token or tokenizer.sep_token or begin
    if begin is None or end is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has neither mask_token nor bos_token, cls_token or eos_token; "
            "use that of a masked language model or of a decoder"
        )
    backend: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    mask = AddedToken("[MASK]", lstrip=True, special=True)  # like RoBERTa's, it includes the space before it
    taken = (None, begin, end, tokenizer.unk_token)  # many tokenizers pad with eos_token, which ends texts here
    padding = "[PAD]" if tokenizer.pad_token in taken else tokenizer.pad_token
    backend.add_special_tokens([mask, *(AddedToken(token, special=True) for token in (padding, begin, end))])
    backend.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", end, "$B", end],
        special_tokens=[(token, backend.token_to_id(token)) for token in {begin, end}],
    )
    # The generic class, because specific ones restore their own rules and special tokens when loaded.
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


def _with_quotes(text: str, mark: str) -> str:
    """Attaches free-standing quotation marks to the text they enclose; they open and close in turn.

    A mark before punctuation or at the end never opens, one after `said,` or a colon never closes, and `'` after an s
    is a possessive unless a quotation is open.
    """
    if mark not in text:
        return text
    words = [*text.split(" "), ""]
    shown, is_open = "", False
    space = ""
    for at, word in enumerate(words[:-1]):
        before, after = words[at - 1] if at else "", words[at + 1]
        if word != mark:
            shown, space = shown + space + word, " "
            continue
        begins = not before or before == ":" or (before == "," and at > 1 and words[at - 2] in _SAYING)
        is_stray = after in _ENDS or (mark == "'" and before.endswith("s"))
        is_open = begins or not (is_open or is_stray)
        shown, space = (shown + space + mark, "") if is_open else (shown + mark, " ")
    return shown


def _spellings(word: str, known: dict[str, int], begin: str = "") -> list[list[int]]:
    """All ways to spell a word in the pieces of a WordPiece."""
    if not word:
        return [[]]
    ends = [end for end in range(len(word), 0, -1) if begin + word[:end] in known]
    found = ([known[begin + word[:end]], *rest] for end in ends for rest in _spellings(word[end:], known, "##"))
    return list(islice(found, MOST_SPELLINGS))


def _require_utf8(text: str) -> str:
    """Raises ValueError for lone surrogates, which bytes that are not UTF-8 become on the command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text[:40]!r} is not UTF-8; convert it") from None
    return text


def train_wordpiece(sentences: Iterable[str], size: int, *, lower: bool = True) -> Vocabulary:
    """Trains a WordPiece vocabulary; the result does not depend on the order of the texts.

    Args:
        sentences: The texts, which are read twice.
        size: The maximum number of tokens.
        lower: Whether the tokenizer lower-cases text.
    """
    if size < SMALLEST:
        raise ValueError(f"`size` of the vocabulary must be >= {SMALLEST}, got {size}; thousands of tokens are usual")
    Limit.TOKENS.require(size, "`size` of the vocabulary is too large", "thousands of tokens are usual")
    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(sentences, tokenizer.normalizer, min(1000, size // 4))
    # The trainer numbers the pieces ##x in the order of words, which is random, and uses these numbers to break ties
    # between equally frequent merges. "Special" tokens are numbered first, which makes training deterministic.
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    inner = [  # except characters that are words of their own, such as punctuation and Chinese
        f"##{character}"
        for character in alphabet
        if len(split(tokenizer.normalizer.normalize_str(f"a{character}"))) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=SPECIAL + inner,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return Vocabulary(BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=lower))


def _alphabet(sentences: Iterable[str], normalizer: Any, limit: int) -> list[str]:
    """The most frequent characters (ties by code point) and the printable ASCII ones; others become `[UNK]`."""
    counts = np.zeros(0x110000, dtype=np.int64)
    remaining = iter(sentences)
    while chunk := list(islice(remaining, 10_000)):
        codes = np.frombuffer(normalizer.normalize_str("\n".join(chunk)).encode("utf-32-le"), dtype=np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    if not counts.any():
        raise ValueError("no text to train a vocabulary on; give some sentences")
    by_frequency = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    printable = normalizer.normalize_str(string.ascii_letters + string.digits + string.punctuation)
    return sorted({*map(chr, by_frequency[:limit].tolist()), *printable} - set(string.whitespace))
