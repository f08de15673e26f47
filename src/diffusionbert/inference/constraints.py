"""Hard constraints: words that never appear, and words that must (Hokamp & Liu 2017, "Lexically constrained decoding",
is the same task for left-to-right models).

`Constrained` wraps any network and never believes in what is forbidden, so that every sampler obeys without knowing:

    f'(v | x_t) ∝ f(v | x_t) · [v is not forbidden at this place of x_t]

A sampler may write many places in one step, each without regard to the others. So in every window of a row that one
step could turn into a forbidden sequence w_1 … w_m, where each place shows its piece or is asked about, one asked
place that does not yet show its piece w_j loses it: the one where the network believes in w_j least, because that
costs least. The window then cannot be completed before the network is asked again. A word that is in no rule is
never lost, so that only a vocabulary full of rules can leave a place without any.

This is enough for every sampler that, between two calls about a row, writes only at places which the first of them
asked about: one step after another; caching an answer until a word of the row changes; hiding words again (the rule
looks at the tokens as they are). Uniform noise brings words of its own, but its last step writes all places as the
network says. The rule sees what the network is shown: where a sampler shows a window of a long row, sequences that
reach beyond the window are not seen.

What is given is not written: a row's frozen text may contain what is forbidden. A sequence of which only a part is
frozen is never completed.

`place_words` writes the words that must appear where the network believes in them most, before sampling, and freezes
them. Words are sequences of ids here: this module knows no strings.
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
    TargetLogProbs,
    Times,
    Tokens,
    TokenSet,
    per_position,
)
from diffusionbert.networks.base import Network

Word = tuple[int, ...]
"""The ids of a word's pieces."""
Row = tuple[int | None, ...]
"""The tokens of a row that words are put into; `None` is a free place."""


@final
class Constrained(nn.Module):
    """A network that never believes in what would break a rule.

    No forbidden sequence of ids is ever written, nor completed where a part of it is given. A word is the beginning of
    longer ones: forbidding the pieces of "art" forbids "art ##ist", too.

    Right after an included word no `continuation` piece is written, so that "art" does not become "artist". That
    holds wherever the word stands in the row: it is a rule about tokens and not about rows.
    """

    continuation: Tensor

    def __init__(
        self,
        network: Network,
        *,
        forbidden: Sequence[Sequence[int]] = (),
        included: Sequence[Sequence[int]] = (),
        continuation: TokenSet | None = None,
        spelled: Callable[[Word], str] = lambda word: str(list(word)),
    ):
        """`spelled` gives words to the messages of errors, where ids say little."""
        super().__init__()
        self.network = network
        self.forbidden, self.included = _words(forbidden), _words(included)
        # Ids and not marks, because the network's vocabulary may be larger than the tokenizer's. No weights.
        ids = torch.zeros(0, dtype=torch.long) if continuation is None else continuation.nonzero()[:, 0]
        self.register_buffer("continuation", ids, persistent=False)
        self._pieces = {piece for word in self.forbidden + self.included for piece in word}
        for word in self.included:
            if broken := next((rule for rule in self.forbidden if _contains(word, rule)), None):
                raise ValueError(
                    f"word {spelled(word)} must be included, but {spelled(broken)} in it is forbidden: drop one"
                )

    def forward(self, tokens: Tokens, attend: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        """Gives log f(v | x_t) among the words that break no rule."""
        return self.constrain(tokens, targets, self.innermost(tokens, attend, t, targets))

    @property
    def innermost(self) -> Network:
        """The network that all constraints are around."""
        return self.network.innermost if isinstance(self.network, Constrained) else self.network

    def constrain(self, tokens: Tokens, targets: PositionMask, log_probs: TargetLogProbs) -> TargetLogProbs:
        """Constrains a network's answer to a query, so that several requests can share one forward pass.

        Args:
            tokens: The tokens of the query.
            targets: Its N target positions.
            log_probs: The answer of the innermost network.

        Returns:
            The log-probabilities among the tokens that break no rule.
        """
        if isinstance(self.network, Constrained):
            log_probs = self.network.constrain(tokens, targets, log_probs)
        log_f = self.forbid(tokens, targets, log_probs)
        log_total = log_f.logsumexp(dim=-1, keepdim=True)
        if bool((log_total == -torch.inf).any()):
            row, position = targets.nonzero()[(log_total == -torch.inf).nonzero()[0, 0]].tolist()
            raise ValueError(f"every word is forbidden at place {position} of row {row}: forbid fewer words")
        return log_f - log_total

    def forbid(self, tokens: Tokens, targets: PositionMask, log_f: TargetLogProbs) -> TargetLogProbs:
        """Puts −∞ where a word would break a rule, if all asked places may be written at once; not normalised."""
        if self._pieces and max(self._pieces) >= log_f.shape[-1]:
            raise ValueError(
                f"a rule names id {max(self._pieces)}, but the network knows {log_f.shape[-1]}: use its own vocabulary"
            )
        log_f = log_f.clone()
        log_f[:, [word[0] for word in self.forbidden if len(word) == 1]] = -torch.inf
        for word in self.forbidden:
            if 1 < len(word) <= tokens.shape[1]:
                for piece, positions in zip(word, _losing(word, tokens, targets, log_f), strict=True):
                    log_f[positions[targets], piece] = -torch.inf
        after = torch.zeros_like(targets)
        for word in self.included:
            stands = _aligned([(tokens == piece) & ~targets for piece in word]).all(dim=-1)
            after[:, len(word) :] |= stands[:, :-1]
        glued = after[targets].nonzero()
        log_f[glued, self.continuation] = -torch.inf
        return log_f


@torch.no_grad()
def place_words(network: Constrained, canvas: Batch, mask_id: int, seed: int) -> Batch:
    """Writes every included word of the network into every row and freezes it; other editable places get hidden.

    The longest word goes first. Its place is drawn from the network's own belief: with everything editable hidden
    (so that a network that wants a time is told 1), start i has probability ∝ Π_j f(w_j at place i + j) among those
    that break no rule, do not glue the word onto a visible continuation piece behind it, and leave the words to come
    room to do the same. The network is then asked again for the next one. Every given word is placed, also one that
    already stands in the row's frozen text, and one given twice is placed twice.
    """
    words = sorted(network.included, key=len, reverse=True)
    if glued := [word for word in words if bool((network.continuation == word[0]).any())]:
        raise ValueError(f"word {list(glued[0])} begins with a piece that continues another word: give whole words")
    canvas = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, mask_id))
    room = _Room(network)
    for number, row in enumerate(_rows(canvas)):
        if not room.has(row, words):
            raise ValueError(
                f"{len(words)} words of together {sum(map(len, words))} pieces do not fit the {row.count(None)} free "
                f"places of row {number}: give fewer words or a longer text"
            )
    for step, word in enumerate(words):
        scores = _scores(network.network, canvas, word)
        uniform = Noise(seed, step).uniform(canvas.example, Purpose.PLACEMENT, scores.shape[1])
        # The largest score with Gumbel noise is a draw from their softmax; without it, the next one is, and so on.
        # Where the network believes in no start that is left, the first of them will do.
        order = (scores - uniform.log().neg().log()).argsort(dim=1, descending=True, stable=True).tolist()
        rest = words[step + 1 :]
        starts = [room.first(row, word, ranked, rest) for row, ranked in zip(_rows(canvas), order, strict=True)]
        canvas = _written(canvas, torch.tensor(starts, device=canvas.tokens.device), word)
    return canvas


@final
class _Room:
    """Whether words find room in a row without breaking a rule: exact, by a search from left to right."""

    def __init__(self, network: Constrained):
        self.forbidden = network.forbidden
        self.continuation = set(network.continuation.tolist())
        self.reach = max(map(len, network.forbidden), default=1) - 1  # how far beyond a word it may break a rule
        self.ruled = {piece for rule in network.forbidden for piece in rule}

    def has(self, row: Row, words: Sequence[Word]) -> bool:
        """Whether all words can stand in the row, in whatever order."""
        # Words that no rule names differ in their lengths alone: there are then few states, and not one a subset.
        alike = tuple(word if self.ruled.intersection(word) else (-1,) * len(word) for word in words)
        num_free = [row[position:].count(None) for position in range(len(row) + 1)]
        # A state: where the search is, which words are left, what stands before, as far back as it matters.
        state: tuple[int, tuple[Word, ...], Row] = (0, alike, ())
        to_try, seen = [state], {state}
        while to_try:
            position, left, before = to_try.pop()
            if not left:
                return True
            if sum(map(len, left)) > num_free[position]:
                continue
            nexts = [(position + 1, left, before + row[position : position + 1])]
            nexts += [
                (position + len(word), _without(left, word), before + word)
                for word in dict.fromkeys(left)
                if self.may_stand(word, row, position, before)
            ]
            for position, left, before in nexts:
                state = (position, left, before[max(0, len(before) - self.reach) :])
                if state not in seen:
                    seen.add(state)
                    to_try.append(state)
        return False

    def first(self, row: Row, word: Word, starts: Sequence[int], rest: Sequence[Word]) -> int:
        """The first of these starts at which a word may stand so that the rest still find room."""
        return next(
            start
            for start in starts
            if self.may_stand(word, row, start, row[max(0, start - self.reach) : start])
            and self.has(row[:start] + word + row[start + len(word) :], rest)
        )

    def may_stand(self, word: Word, row: Row, start: int, before: Row) -> bool:
        """Whether a word fits in at a place, is not glued to what follows and breaks no rule with what is around."""
        end = start + len(word)
        if row[start:end] != (None,) * len(word) or (end < len(row) and row[end] in self.continuation):
            return False
        # Only what has a part in this word: what stands around it may be given, and is not ours to forbid.
        return not any(
            _contains(before[max(0, len(before) - len(rule) + 1) :] + word + row[end : end + len(rule) - 1], rule)
            for rule in self.forbidden
        )


def _losing(word: Word, tokens: Tokens, targets: PositionMask, log_f: TargetLogProbs) -> list[PositionMask]:
    """For each piece of a forbidden word the places that lose it: one in every window that could become the word."""
    shows = _aligned([tokens == piece for piece in word])
    free = _aligned([targets] * len(word))
    at_risk = (shows | free).all(dim=-1)
    belief = _aligned([per_position(log_f[:, piece], targets) for piece in word])
    # Asked places that show their piece come last (a sampler may keep what stands there), others never.
    least = torch.where(free, torch.where(shows, 1.0, belief), torch.inf).argmin(dim=-1)
    chosen = at_risk[..., None] & (least[..., None] == torch.arange(len(word), device=tokens.device))
    return [nn.functional.pad(chosen[..., offset], (offset, len(word) - 1 - offset)) for offset in range(len(word))]


def _aligned(grids: Sequence[Tensor]) -> Tensor:
    """All windows of a word's length, [B, windows, pieces]: offset j of a window reads the j-th of [B, L] grids."""
    num_windows = max(grids[0].shape[1] - len(grids) + 1, 0)
    return torch.stack([grid[:, offset : offset + num_windows] for offset, grid in enumerate(grids)], dim=-1)


def _scores(network: Network, canvas: Batch, word: Word) -> PerPosition:
    """Σ_j log f(w_j at place i + j) of each start i, a free place each; of other starts, anything."""
    t = torch.ones(len(canvas.tokens), dtype=torch.float64, device=canvas.tokens.device)
    log_f = network(canvas.tokens, canvas.attend, t, canvas.editable)
    belief = _aligned([per_position(log_f[:, piece].double(), canvas.editable) for piece in word])
    return belief.sum(dim=-1)


def _written(canvas: Batch, starts: Tensor, word: Word) -> Batch:
    """The canvas with a word frozen at each row's start."""
    positions = starts[:, None] + torch.arange(len(word), device=starts.device)
    pieces = torch.tensor(word, device=starts.device).expand_as(positions)
    return replace(
        canvas,
        tokens=canvas.tokens.scatter(1, positions, pieces),
        editable=canvas.editable.scatter(1, positions, False),
    )


def _rows(canvas: Batch) -> Iterator[Row]:
    """Each row's tokens, `None` where it is free."""
    for tokens, editable in zip(canvas.tokens.tolist(), canvas.editable.tolist(), strict=True):
        yield tuple(None if free else token for token, free in zip(tokens, editable, strict=True))


def _words(given: Iterable[Sequence[int]]) -> list[Word]:
    words = [tuple(map(int, word)) for word in given]
    if wrong := [word for word in words if not word or min(word) < 0]:
        raise ValueError(f"{list(wrong[0])} is no word: give the ids of its pieces, at least one, none negative")
    return words


def _contains(row: Row, word: Word) -> bool:
    return any(row[start : start + len(word)] == word for start in range(len(row) - len(word) + 1))


def _without(words: tuple[Word, ...], word: Word) -> tuple[Word, ...]:
    """All words but one of those that are this one."""
    position = words.index(word)
    return words[:position] + words[position + 1 :]
