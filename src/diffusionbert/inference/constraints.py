"""Lexical constraints: words that must not be generated, and words that must (Hokamp & Liu 2017, "Lexically constrained
decoding", solve the same task for left-to-right models). A word is a sequence of token ids.

`Constrained` wraps any network and sets the probability of forbidden tokens to 0, so it works with every sampler:

    f'(v | x_t) ∝ f(v | x_t) · [v is not forbidden at this position of x_t]

A sampler may generate many positions independently in one step. A window of a sequence can become the forbidden word
w_1 … w_m in one step if each of its positions already holds its token w_j or is a target. In each such window, the
token w_j is forbidden at one target position that does not hold it yet: the one where the network assigns w_j the
lowest probability, because that changes the distribution least. The window cannot become the word before the next
call of the network. A token that occurs in no rule is never forbidden, so a position runs out of tokens only if rules
cover the whole vocabulary.

Two rules apply to positions, the same ones in all sequences: where a word begins (`word_starts`), no continuation token
is generated; where a word continues (`word_continuations`), only continuation tokens are.

These rules hold for every sampler that, between two calls for a sequence, changes only positions that were targets of
the first call. Ancestral sampling does, as do caching an answer until the sequence changes, and remasking (the rules
read the current tokens). Uniform noise also inserts tokens of its own, but its last step generates all positions from
the network. The rules see only what the network sees: if a sampler passes a window of a long sequence, words that cross
its border are not detected.

Given text is not generated, so the frozen part of a sequence may contain forbidden words. A forbidden word of which
only a part is frozen is never completed.

`place_words` puts the words that must appear at likely positions before sampling and freezes them. This module does not
depend on strings, tokenizers or samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import (
    Batch,
    PerPosition,
    PositionMask,
    TargetFlags,
    TargetLogProbs,
    Times,
    Tokens,
    TokenSet,
    per_position,
)
from diffusionbert.networks.base import Network

Word = tuple[int, ...]
"""The token ids of a word."""
Row = tuple[int | None, ...]
"""The tokens of a sequence in which words are placed; `None` is a free position."""


@final
class Constrained(nn.Module):
    """A network that assigns probability 0 to tokens that would break a rule.

    No forbidden word is generated, nor completed where a part of it is given. Longer words that start with the same
    tokens are forbidden, too: forbidding "art" forbids "art ##ist".

    No `continuation` token is generated right after an included word, so that "art" does not become "artist". This
    holds wherever the word occurs in the sequence, not only where `place_words` put it.

    Args:
        network: The network to constrain.
        forbidden: Words that must not be generated.
        included: The words for `place_words`.
        continuation: The tokens that continue a word, such as "##ist".
        word_starts: Positions that must not get a continuation token in any sequence, [L] or [1, L].
        word_continuations: Positions that must get one, [L] or [1, L].
        spelled: Formats a word for error messages.
    """

    continuation: Tensor
    word_starts: Tensor
    word_continuations: Tensor

    def __init__(
        self,
        network: Network,
        *,
        forbidden: Sequence[Sequence[int]] = (),
        included: Sequence[Sequence[int]] = (),
        continuation: TokenSet | None = None,
        word_starts: Tensor | None = None,
        word_continuations: Tensor | None = None,
        spelled: Callable[[Word], str] = lambda word: str(list(word)),
    ):
        super().__init__()
        self.network = network
        self.forbidden, self.included = _words(forbidden), _words(included)
        # Ids, not a mask: the network's vocabulary may be larger than the tokenizer's. Not part of the state dict.
        ids = torch.zeros(0, dtype=torch.long) if continuation is None else continuation.nonzero()[:, 0]
        self.register_buffer("continuation", ids, persistent=False)
        self.register_buffer("word_starts", _flat(word_starts, ids), persistent=False)
        self.register_buffer("word_continuations", _flat(word_continuations, ids), persistent=False)
        self._tokens = {token for word in self.forbidden + self.included for token in word}
        for word in self.included:
            if broken := next((rule for rule in self.forbidden if _contains(word, rule)), None):
                raise ValueError(
                    f"the word {spelled(word)} must be included, but it contains the forbidden {spelled(broken)}; "
                    "drop one of the two"
                )

    def forward(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        """log f'(v | x_t) at the target positions, over the tokens that break no rule."""
        return self.constrain(tokens, targets, unwrapped(self)[0](tokens, attention_mask, t, targets))

    def constrain(self, tokens: Tokens, targets: PositionMask, log_probs: TargetLogProbs) -> TargetLogProbs:
        """Constrains a network's output for a query, so that several requests can share one forward pass.

        Args:
            tokens: The tokens of the query.
            targets: Its N target positions.
            log_probs: The output of the innermost network.

        Returns:
            The log-probabilities, normalized over the tokens that break no rule.
        """
        if isinstance(self.network, Constrained):
            log_probs = self.network.constrain(tokens, targets, log_probs)
        begins, continues = self._boundaries(tokens, targets)
        # Only a few positions have rules, but forbidden words may affect all.
        affected = begins | continues if not self.forbidden else torch.ones_like(begins)
        if not bool(affected.any()):
            return log_probs
        log_f = self.forbid(tokens, targets, log_probs)
        log_total = log_f[affected].logsumexp(dim=-1, keepdim=True)
        if bool((log_total == -torch.inf).any()):
            row, position = targets.nonzero()[affected][(log_total == -torch.inf).nonzero()[0, 0]].tolist()
            raise ValueError(f"all tokens are forbidden at position {position} of sequence {row}; forbid fewer words")
        log_f[affected] -= log_total
        return log_f

    def forbid(self, tokens: Tokens, targets: PositionMask, log_f: TargetLogProbs) -> TargetLogProbs:
        """Sets log f to −∞ for tokens that could break a rule if all targets were generated at once; not normalized."""
        if self._tokens and max(self._tokens) >= log_f.shape[-1]:
            raise ValueError(
                f"token ids in rules must be < {log_f.shape[-1]}, the network's vocabulary size, got "
                f"{max(self._tokens)}; use the network's own tokenizer"
            )
        log_f = log_f.clone()
        log_f[:, [word[0] for word in self.forbidden if len(word) == 1]] = -torch.inf
        for word in self.forbidden:
            if 1 < len(word) <= tokens.shape[1]:
                for token, positions in zip(word, _least_likely(word, tokens, targets, log_f), strict=True):
                    log_f[positions[targets], token] = -torch.inf
        begins, continues = self._boundaries(tokens, targets)
        log_f[begins.nonzero(), self.continuation] = -torch.inf
        inside = continues.nonzero()
        if len(inside):
            kept = log_f[inside, self.continuation]
            log_f[inside[:, 0]] = -torch.inf
            log_f[inside, self.continuation] = kept
        return log_f

    def _boundaries(self, tokens: Tokens, targets: PositionMask) -> tuple[TargetFlags, TargetFlags]:
        """The target positions where a word begins, and those where one continues."""
        after_word = _at(self.word_starts, targets)
        for word in self.included:
            found = _windows([(tokens == token) & ~targets for token in word]).all(dim=-1)
            after_word[:, len(word) :] |= found[:, :-1]
        return after_word[targets], _at(self.word_continuations, targets)[targets]


def unwrapped(network: Network) -> tuple[Network, list[Constrained]]:
    """The innermost network and the constraints around it."""
    constraints = []
    while isinstance(network, Constrained):
        constraints.append(network)
        network = network.network
    return network, constraints


@torch.no_grad()
def place_words(network: Constrained, canvas: Batch, mask_id: int, seed: int) -> Batch:
    """Places every included word in every sequence and freezes it; other editable positions are masked.

    The longest word is placed first. Its start i is drawn from the network at t = 1, with all editable positions
    masked: p(i) ∝ Π_j f(w_j at position i + j), among the starts that break no rule, are not followed by a given
    continuation token, and leave room for the remaining words. The network is called again for the next word. Every
    word is placed, even if the frozen text already contains it; a word given twice is placed twice.

    Args:
        network: The network, with the `included` words to place.
        canvas: The sequences.
        mask_id: The id of `[MASK]`.
        seed: The same seed gives the same placement.

    Returns:
        The canvas with the words in its tokens, no longer editable.
    """
    words = sorted(network.included, key=len, reverse=True)
    if partial := [word for word in words if bool((network.continuation == word[0]).any())]:
        raise ValueError(f"the word {list(partial[0])} begins with a continuation token; give whole words")
    canvas = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, mask_id))
    room = _Room(network)
    for number, row in enumerate(_rows(canvas)):
        if not room.has(row, words):
            raise ValueError(
                f"{len(words)} words of {sum(map(len, words))} tokens in total do not fit the {row.count(None)} free "
                f"positions of sequence {number}; give fewer words or a longer text"
            )
    for step, word in enumerate(words):
        scores = _scores(network.network, canvas, word)
        uniform = Noise(seed, step).uniform(canvas.example, Purpose.PLACEMENT, scores.shape[1])
        # Sorting by score + Gumbel noise draws starts without replacement, so the first start that fits is a draw from
        # the softmax over those that fit. If all of them have probability 0, it is the leftmost.
        order = (scores - uniform.log().neg().log()).argsort(dim=1, descending=True, stable=True).tolist()
        rest = words[step + 1 :]
        starts = [room.first(row, word, ranked, rest) for row, ranked in zip(_rows(canvas), order, strict=True)]
        canvas = _freeze(canvas, torch.tensor(starts, device=canvas.tokens.device), word)
    return canvas


@final
class _Room:
    """Decides whether words fit in a sequence without breaking a rule: an exact search from left to right."""

    def __init__(self, network: Constrained):
        self.forbidden = network.forbidden
        self.continuation = set(network.continuation.tolist())
        self.reach = max(map(len, network.forbidden), default=1) - 1  # how many tokens before a word matter for a rule
        self.rule_tokens = {token for rule in network.forbidden for token in rule}

    def has(self, row: Row, words: Sequence[Word]) -> bool:
        """Whether the sequence has room for all words, in any order."""
        # Words without tokens of a rule differ only in length. Treating them as equal avoids a state per subset.
        interned = tuple(word if self.rule_tokens.intersection(word) else (-1,) * len(word) for word in words)
        num_free = [row[position:].count(None) for position in range(len(row) + 1)]
        # A state: the current position, the remaining words, and the preceding tokens as far back as rules reach.
        state: tuple[int, tuple[Word, ...], Row] = (0, interned, ())
        stack, seen = [state], {state}
        while stack:
            position, remaining, before = stack.pop()
            if not remaining:
                return True
            if sum(map(len, remaining)) > num_free[position]:
                continue
            successors = [(position + 1, remaining, before + row[position : position + 1])]
            successors += [
                (position + len(word), _without(remaining, word), before + word)
                for word in dict.fromkeys(remaining)
                if self.fits(word, row, position, before)
            ]
            for position, remaining, before in successors:
                state = (position, remaining, before[max(0, len(before) - self.reach) :])
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return False

    def first(self, row: Row, word: Word, starts: Sequence[int], rest: Sequence[Word]) -> int:
        """The first of `starts` at which the word fits and leaves room for the rest."""
        return next(
            start
            for start in starts
            if self.fits(word, row, start, row[max(0, start - self.reach) : start])
            and self.has(row[:start] + word + row[start + len(word) :], rest)
        )

    def fits(self, word: Word, row: Row, start: int, before: Row) -> bool:
        """Whether the positions are free, no continuation token follows, and no forbidden word results."""
        end = start + len(word)
        if row[start:end] != (None,) * len(word) or (end < len(row) and row[end] in self.continuation):
            return False
        # Only matches that overlap this word count: the text around it may be given, and given text may break rules.
        return not any(
            _contains(before[max(0, len(before) - len(rule) + 1) :] + word + row[end : end + len(rule) - 1], rule)
            for rule in self.forbidden
        )


def _least_likely(word: Word, tokens: Tokens, targets: PositionMask, log_f: TargetLogProbs) -> list[PositionMask]:
    """Where to forbid each token of a forbidden word: one position per window that could become the word."""
    matches = _windows([tokens == token for token in word])
    free = _windows([targets] * len(word))
    at_risk = (matches | free).all(dim=-1)
    log_probs = _windows([per_position(log_f[:, token], targets) for token in word])
    # A target that already holds its token is the last resort (a sampler may keep it); non-targets are never chosen.
    least = torch.where(free, torch.where(matches, 1.0, log_probs), torch.inf).argmin(dim=-1)
    chosen = at_risk[..., None] & (least[..., None] == torch.arange(len(word), device=tokens.device))
    return [nn.functional.pad(chosen[..., offset], (offset, len(word) - 1 - offset)) for offset in range(len(word))]


def _windows(columns: Sequence[Tensor]) -> Tensor:
    """All windows as long as a word, [B, windows, tokens]; offset j of a window comes from the j-th tensor, [B, L]."""
    num_windows = max(columns[0].shape[1] - len(columns) + 1, 0)
    return torch.stack([column[:, offset : offset + num_windows] for offset, column in enumerate(columns)], dim=-1)


def _scores(network: Network, canvas: Batch, word: Word) -> PerPosition:
    """Σ_j log f(w_j at position i + j) for each start i; meaningless where a position is not editable."""
    t = torch.ones(len(canvas.tokens), dtype=torch.float64, device=canvas.tokens.device)
    log_f = network(canvas.tokens, canvas.attention_mask, t, canvas.editable)
    return _windows([per_position(log_f[:, token].double(), canvas.editable) for token in word]).sum(dim=-1)


def _freeze(canvas: Batch, starts: Tensor, word: Word) -> Batch:
    """Puts a word at each sequence's start position and makes it non-editable."""
    positions = starts[:, None] + torch.arange(len(word), device=starts.device)
    return replace(
        canvas,
        tokens=canvas.tokens.scatter(1, positions, torch.tensor(word, device=starts.device).expand_as(positions)),
        editable=canvas.editable.scatter(1, positions, False),
    )


def _rows(canvas: Batch) -> Iterator[Row]:
    """Each sequence's tokens, `None` where a position is editable."""
    for tokens, editable in zip(canvas.tokens.tolist(), canvas.editable.tolist(), strict=True):
        yield tuple(None if free else token for token, free in zip(tokens, editable, strict=True))


def _flat(positions: Tensor | None, like: Tensor) -> Tensor:
    """Positions as [L] on the device of `like`; no positions if None."""
    return like.new_zeros(0, dtype=torch.bool) if positions is None else positions.flatten().to(like.device)


def _at(positions: Tensor, targets: PositionMask) -> PositionMask:
    """The positions of a rule in every sequence of a query, which may be shorter or padded."""
    length = targets.shape[1]
    return nn.functional.pad(positions[:length], (0, max(0, length - len(positions)))).expand_as(targets).clone()


def _words(given: Iterable[Sequence[int]]) -> list[Word]:
    words = [tuple(map(int, word)) for word in given]
    if wrong := [word for word in words if not word or min(word) < 0]:
        raise ValueError(f"a word must be one or more token ids >= 0, got {list(wrong[0])}; use the tokenizer's ids")
    return words


def _contains(row: Row, word: Word) -> bool:
    return any(row[start : start + len(word)] == word for start in range(len(row) - len(word) + 1))


def _without(words: tuple[Word, ...], word: Word) -> tuple[Word, ...]:
    """The words without one occurrence of `word`."""
    index = words.index(word)
    return words[:index] + words[index + 1 :]
