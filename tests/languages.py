"""What tests need beside `diffusionbert.likelihood.languages`: a free network, and the distribution of the chain."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.process import Process
from diffusionbert.likelihood.languages import (
    PAPER,
    SKEWED,
    TWINS,
    Bayes,
    Language,
    all_states,
    exact_nats,
    log_forward,
    quadrature,
)

__all__ = [
    "PAPER",
    "SKEWED",
    "TWINS",
    "Bayes",
    "Language",
    "Table",
    "all_states",
    "exact_log_likelihood",
    "exact_nats",
    "log_forward",
    "quadrature",
]


class Table(nn.Module):
    """The most general network on a language: free logits per state (and per timestep, if `num_steps` > 0)."""

    def __init__(self, language: Language, num_steps: int = 0, scale: float = 1.0, seed: int = 0):
        super().__init__()
        self.num_steps, self.base = num_steps, language.vocabulary
        generator = torch.Generator().manual_seed(seed)
        shape = (num_steps + 1, len(language.states), language.length, language.num_words)
        self.logits = nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        powers = self.base ** torch.arange(tokens.shape[1] - 1, -1, -1)
        log_f = self.logits[(t * self.num_steps).round().long(), (tokens * powers).sum(dim=1)].log_softmax(-1)
        log_f = nn.functional.pad(log_f, (0, 1), value=-torch.inf)
        return log_f[targets]


def exact_log_likelihood(process: Process, network: nn.Module, language: Language, grid: Tensor) -> Tensor:
    """log p(x0) of every sentence: the reverse chain on the distribution over all states."""
    states = language.states
    batch = language.batch(states)
    index = {tuple(state.tolist()): i for i, state in enumerate(states)}
    if isinstance(process, Absorbing):
        mass = (states == process.mask_id).all(dim=1).double()
    else:
        mass = (states < language.num_words).all(dim=1).double() / language.num_words**language.length
    for s, t in reversed(list(itertools.pairwise(grid))):
        rows = len(states)
        targets = process.targets(batch)
        log_f = network(states, batch.attention_mask, t.expand(rows), targets)
        log_p = process.reverse(batch, log_f, s.expand(rows), t.expand(rows))
        # Positions that are not targets keep their tokens.
        steps = nn.functional.one_hot(states, language.vocabulary).double()
        steps[targets] = log_p.exp()
        factors = [steps[:, position, states[:, position]] for position in range(language.length)]  # from × to state
        mass = mass @ torch.stack(factors).prod(dim=0)
    return mass[[index[tuple(sentence.tolist())] for sentence in language.sentences]].log()
