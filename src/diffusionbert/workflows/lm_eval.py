"""Evaluates models with EleutherAI's evaluation harness (`pip install 'diffusionbert[lm-eval]'`).

    diffusionbert-lm-eval run --model diffusionbert --model_args pretrained=runs/db,order=left-to-right --tasks …

The harness (0.4.13) reads no entry points, so `diffusionbert-lm-eval` registers the model and then behaves like
`lm_eval`. In Python, `lm_eval.simple_evaluate(model=DiffusionBERT("runs/db"), tasks=[…])` is enough.

A log-likelihood is that of the continuation, given the context and the continuation's number of tokens. It is exact in
an order of generation (by default left to right), or minus a bound. The `config` of the results says which:
`likelihood_kind`, `likelihood_quantity` and `likelihood_given`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry

from diffusionbert.data.canvas import batch_of
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.score import ScoreSettings, conditional_windows, score
from diffusionbert.inference.tasks import TextScore
from diffusionbert.likelihood.orders import Order, is_greedy, order_named
from diffusionbert.likelihood.sentence import SentenceBudget
from diffusionbert.model import Model, load
from diffusionbert.reporting import progress_line

NAME = "diffusionbert"
"""The value of `--model`."""
BOUND = "bound"
"""The value of `order` for the model's bound, instead of an order."""
MOST_GENERATED = 64
"""The number of tokens to generate, unless a task sets another."""
AT_ONCE = 64
"""The number of requests scored together."""


@final
class DiffusionBERT(LM):  # type: ignore[misc]  # the harness has no types
    """A masked language model with the interface of the harness.

    Args:
        pretrained: Anything that `diffusionbert.load` opens, or a model; None is the bundled model.
        order: "left-to-right", "confidence", "entropy" or "random-K" for exact likelihoods; "bound" for the model's
            bound.
        precision: The precision of bounds, as in `Model.score`.
        device: The device to run on. The harness passes cuda:0 by default, so a missing GPU falls back to the CPU.
        seed: The seed of draws and samples.
        batch_size: Ignored; results do not depend on it.
        max_batch_size: Ignored.
    """

    def __init__(
        self,
        pretrained: str | Model | None = None,
        order: str = Order.LEFT_TO_RIGHT.value,
        precision: float = SentenceBudget.precision,
        device: str | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        self.model = pretrained if isinstance(pretrained, Model) else load(pretrained, device=device)
        engine = self.model.engine
        if engine.masked_network is None or engine.paired or not engine.config.objective.generates_on_masks:
            raise ValueError(
                f"{engine.name!r} is not a masked language model of single texts; the harness itself opens decoders"
            )
        self.settings = ScoreSettings(
            SentenceBudget(float(precision), seed=int(seed)), order=None if order == BOUND else order_named(order)
        )
        self.seed, self._device = int(seed), engine.device
        self._scored: TextScore | None = None

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness's cache."""
        return self.model.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness stores as the `config` of the results, including the kind of likelihood."""
        [known] = score(self.model.engine, ["."], self.settings) if self._scored is None else [self._scored]
        assert known is not None
        return {
            "model_num_parameters": self.model.num_parameters,
            "likelihood_kind": known.kind.value,
            "likelihood_quantity": known.quantity,
            "likelihood_given": known.conditional_on,
        }

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation given its context, and whether it is the most probable one."""
        found: list[tuple[float, bool]] = []
        with progress_line(len(requests), visible=not disable_tqdm) as show:
            for start in range(0, len(requests), AT_ONCE):
                contexts, texts = zip(*(one.args for one in requests[start : start + AT_ONCE]), strict=True)
                scores = score(self.model.engine, texts, self.settings, given=contexts)
                for args, one, greedy in zip(
                    zip(contexts, texts, strict=True), scores, self._greedy(contexts, texts), strict=True
                ):
                    assert one is not None
                    self._scored = one
                    found.append((-one.nats, greedy))
                    self.cache_hook.add_partial("loglikelihood", args, found[-1])
                show(len(found), "log-likelihoods")
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows if it is longer than the model can read; 0 for an empty one."""
        texts = [one.args[0] for one in requests]
        full = [text for text in texts if text.strip()]
        scores = iter(score(self.model.engine, full, self.settings) if full else [])
        found = []
        for text in texts:
            one = next(scores) if text.strip() else None
            self._scored = one or self._scored
            found.append(-one.nats if one is not None else 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, as long as the task allows, cut before its first stop string."""
        found = []
        with progress_line(len(requests), visible=not disable_tqdm) as show:
            for number, request in enumerate(requests):
                context, settings = request.args
                found.append(self._generated(context, dict(settings)))
                self.cache_hook.add_partial("generate_until", (context, settings), found[-1])
                show(number + 1, "texts")
        return found

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        most = self.model.max_length
        number = min(int(settings.pop("max_gen_toks", MOST_GENERATED)), most // 2)
        is_drawn = bool(settings.pop("do_sample", False)) and float(settings.get("temperature", 1.0)) > 0
        prompt = self._last_tokens(context, most - number)
        [text] = self.model.generate(
            prompt,
            max_new_tokens=number,
            temperature=float(settings.get("temperature", 1.0)) if is_drawn else 1.0,
            top_k=int(settings["top_k"]) if is_drawn and "top_k" in settings else None if is_drawn else 1,
            top_p=float(settings["top_p"]) if is_drawn and "top_p" in settings else None,
            capitalize=False,
            seed=self.seed,
        )
        text = text[len(prompt) :]
        ends = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    def _last_tokens(self, context: str, number: int) -> str:
        """The end of a context, with at most `number` tokens."""
        _, spans = self.model.engine.vocabulary.encode_spans(context)
        own = [span for span in spans if span is not None]
        return context if len(own) <= number else context[own[-number][0] :]

    def _greedy(self, contexts: Sequence[str], texts: Sequence[str]) -> list[bool]:
        engine = self.model.engine
        windows = [window for [window] in conditional_windows(engine, texts, self.settings, contexts)]
        batch = batch_of(engine.vocabulary, [window.tokens for window in windows])
        own = batch.attention_mask & ~engine.vocabulary.special[batch.tokens]
        given = torch.tensor([window.num_given for window in windows])
        x0: Batch = replace(batch, editable=own & (own.cumsum(dim=1) > given[:, None])).to(engine.device)
        network = engine.masked_network
        assert network is not None
        flags: list[bool] = is_greedy(network, x0, engine.vocabulary.mask_id).tolist()
        return flags


def register() -> None:
    """Registers the name "diffusionbert" with the harness."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=DiffusionBERT)


def main() -> None:
    """Runs the harness's command with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    register()
    try:
        cli_evaluate()
    except ValueError as error:  # as in the package's own commands: one line
        print(f"diffusionbert-lm-eval: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
