"""`Model`, the object that `load` returns: a thin facade over `inference`."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Literal, TypedDict, final, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Unpack

from diffusionbert.data.sources import Split
from diffusionbert.evaluation import evaluate as evaluation
from diffusionbert.evaluation.dataset import open_evaluation_set
from diffusionbert.evaluation.evaluate import PAPER_LENGTH, Plan
from diffusionbert.evaluation.judges import featurizer, load_judge, require_mauve
from diffusionbert.evaluation.metrics import most_agreed
from diffusionbert.evaluation.result import EvaluationResult, require_free
from diffusionbert.inference import choose, generate, infill, score
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.tasks import (
    Choice,
    Filling,
    GeneratedText,
    StreamState,
    Task,
    TextScore,
    TokenProbability,
    words_of,
)
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.likelihood.orders import order_named
from diffusionbert.likelihood.sentence import SentenceBudget
from diffusionbert.parallel import current
from diffusionbert.reporting import Progress, no_progress, require_type
from diffusionbert.samplers.base import Sampler, SamplerConfig
from diffusionbert.samplers.config import SamplingRequest, parse_sampler
from diffusionbert.storage.files import require_output, require_writable
from diffusionbert.storage.hub import HubOptions
from diffusionbert.storage.limits import Limit
from diffusionbert.storage.weights import WeightFormat
from diffusionbert.training.model_folder import push_model

Length = int | tuple[int, int]
"""The number of tokens of a text, or a range to draw it from."""
TOP_P = 0.5
"""The default for generating and rewriting, chosen by a judge's perplexity and entropy (docs/bundled_model.md). Filling
searches for the best text and uses none; evaluation uses the paper's top-k of 30."""


class FillOptions(TypedDict, total=False):
    """The optional arguments of `Model.fill`."""

    max_blank_tokens: int
    forbid: Sequence[str]
    temperature: float
    top_k: int | None
    top_p: float | None
    capitalize: bool
    seed: int


class ScoreOptions(TypedDict, total=False):
    """The optional arguments of `Model.score`."""

    precision: float
    steps: int | str | None
    order: str | None
    paired: bool
    tokens: bool
    source: str | Sequence[str] | None
    max_draws: int
    seed: int


@final
class Model:
    """A language model that generates, fills blanks, rewrites and scores text.

    Load one with `diffusionbert.load`. Several threads may use one model at the same time.

    Examples:
        >>> import diffusionbert
        >>> model = diffusionbert.load()
        >>> model.fill("paris is the capital of [MASK] .", seed=0)
        'paris is the capital of france .'
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        compile: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Model:
        """Opens a model.

        Args:
            name_or_folder: A run directory, a model folder, or the folder or Hub name of any masked or causal language
                model; None is the bundled model.
            device: The device to run on; None is a GPU if there is one.
            dtype: The dtype of its parameters, or its name. None is float32, but text is generated in bfloat16 on a
                GPU, and in int8 on a CPU where that is faster. torch.int8 also scores and fills in int8, which costs a
                few thousandths of a nat per token.
            compile: Whether to compile the network for generation on a GPU. The first call takes some seconds longer,
                all others are faster; this pays off for hundreds of texts.
            revision: A branch, tag or commit of a Hub repository.
            token: A Hub token; None uses the stored login.
            local_files_only: Whether to stay offline and use only local files.
        """
        options = HubOptions(revision=revision, token=token, local_files_only=local_files_only)
        return cls(load_engine(name_or_folder, device, _dtype(dtype), compile=compile, **options))

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The folder or name it was loaded from; "bundled" for the bundled model."""
        return self.engine.name

    @property
    def backbone(self) -> PreTrainedModel:
        """The Hugging Face model inside."""
        return self.engine.network.backbone

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer."""
        return self.engine.vocabulary.tokenizer

    @property
    def device(self) -> torch.device:
        """The device it runs on."""
        return self.engine.network_device

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return self.engine.num_parameters

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a text."""
        return self.engine.max_length

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None) -> Model:
        """Moves the model to a device, casts it to a dtype, or both, and returns it."""
        self.engine.to(device, _dtype(dtype))
        return self

    def __repr__(self) -> str:
        objective = self.engine.config.objective
        name, size = objective.registry.name_of(objective), f"{self.num_parameters / 1e6:.1f}M parameters"
        return f"Model({self.name!r}, {name}, {size}, {self.device})"

    # ---- generate ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        num_return_sequences: int = 1,
        length: Length | None = None,
        max_new_tokens: int | None = None,
        steps: int = 128,
        sampler: str | Sampler | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = TOP_P,
        block: int | None = None,
        include: Sequence[str] = (),
        forbid: Sequence[str] = (),
        source: str | None = None,
        num_candidates: int = 1,
        capitalize: bool = True,
        seed: int | None = None,
    ) -> list[str]:
        """Generates texts.

        Args:
            prompt: The beginning of the text; for a list of prompts, the result is one flat list with
                `num_return_sequences` texts per prompt.
            num_return_sequences: The number of texts per prompt.
            length: The number of tokens of the whole text, including the prompt, or a range such as (10, 30); None
                draws lengths from the training corpus. Give at most one of `length` and `max_new_tokens`.
            max_new_tokens: The number of tokens after the prompt.
            steps: The number of steps of the time grid; more steps cost more only if they need more network calls.
            sampler: A sampler, or its name with settings such as "remasking:eta=0.1"; None is the model's default:
                "exact" for diffusion on masks, "entropy" after a prompt.
            temperature: The sampling temperature, by which the log-probabilities of tokens are divided.
            top_k: Sample from the k most probable tokens; 0 or None keeps all.
            top_p: Sample from the most probable tokens that together reach this probability; 1 or None keeps all.
            block: Generate blocks of this many tokens from left to right, for texts longer than the model can read.
            include: Words that must occur.
            forbid: Words that must not be generated.
            source: The source text, for models trained on pairs.
            num_candidates: With a source, the number of candidates to generate per returned text; the one that agrees
                most with the others is returned (minimum Bayes risk).
            capitalize: Whether generated text of an uncased model gets capitals at the start of sentences, in "I" and,
                if its training text had them, in names; given text stays as it is.
            seed: The random seed; the same seed gives the same texts, None draws a new one.

        Returns:
            The texts.

        Examples:
            >>> import diffusionbert
            >>> len(diffusionbert.load().generate("the king", num_return_sequences=2, length=12, seed=0))
            2
        """
        require_type("num_return_sequences", num_return_sequences, Integral, "a whole number")
        require_type("max_new_tokens", max_new_tokens, (Integral, type(None)), "a whole number or None")
        request = sampling_request(sampler, steps, temperature, top_k, top_p, block)
        tasks = [
            Task(
                num_return_sequences,
                length,
                one,
                source,
                words_of(include),
                words_of(forbid),
                seed=_chosen(seed),
                max_new_tokens=max_new_tokens,
                capitalize=capitalize,
            )
            for one in ([""] if prompt is None else _texts("prompt", prompt))
        ]
        if num_candidates == 1:
            return [
                generated.text
                for texts in generate.generate_together(self.engine, tasks, request)
                for generated in texts
            ]
        return [
            generated.text
            for task in tasks
            for generated in generate_agreed(self.engine, task, request, num_candidates)
        ]

    def stream(
        self,
        prompt: str | None = None,
        *,
        length: Length | None = None,
        max_new_tokens: int | None = None,
        steps: int = 128,
        sampler: str | Sampler | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = TOP_P,
        block: int | None = None,
        include: Sequence[str] = (),
        forbid: Sequence[str] = (),
        source: str | None = None,
        capitalize: bool = True,
        seed: int | None = None,
    ) -> Iterator[StreamState]:
        """Yields every state of one text, from noise to text; the arguments are those of `generate`.

        The text of a state has `[MASK]` for each token that is still masked, so `fill` can complete it.

        Examples:
            >>> import diffusionbert
            >>> *_, last = diffusionbert.load().stream(length=8, steps=8, seed=0)
            >>> last.time
            0.0
        """
        require_type("max_new_tokens", max_new_tokens, (Integral, type(None)), "a whole number or None")
        task = Task(
            1,
            length,
            "" if prompt is None else prompt,
            source,
            include=words_of(include),
            forbid=words_of(forbid),
            seed=_chosen(seed),
            max_new_tokens=max_new_tokens,
            capitalize=capitalize,
        )
        return generate.stream(self.engine, task, sampling_request(sampler, steps, temperature, top_k, top_p, block))

    def rewrite(
        self,
        text: str | Sequence[str],
        strength: float = 0.4,
        *,
        num_return_sequences: int | None = None,
        steps: int = 128,
        sampler: str | Sampler | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = TOP_P,
        forbid: Sequence[str] = (),
        capitalize: bool = True,
        seed: int | None = None,
    ) -> str | list[str]:
        """Masks a fraction of a text's tokens, in randomly chosen whole words, and generates them again.

        All other characters stay as they are, including white space. Characters that the vocabulary does not know, such
        as emoji, are never masked. A text longer than the model can read is rewritten in windows, from left to right,
        half a window at a time, with equal context on both sides.

        Args:
            text: A text or a list of texts.
            strength: The largest fraction of tokens to mask, in (0, 1]; at least one word is masked.
            num_return_sequences: The number of rewritten texts per text; None means one.
            steps: As in `generate`.
            sampler: As in `generate`.
            temperature: As in `generate`.
            top_k: As in `generate`.
            top_p: As in `generate`.
            forbid: Words to replace wherever they occur; they are not generated, either.
            capitalize: As in `generate`.
            seed: As in `generate`.

        Returns:
            A string for a single text; a list for a list of texts, or if `num_return_sequences` is given.
        """
        require_type("num_return_sequences", num_return_sequences, (Integral, type(None)), "a whole number or None")
        request = sampling_request(sampler, steps, temperature, top_k, top_p, None)
        number = 1 if num_return_sequences is None else num_return_sequences
        tasks = [
            Task(
                number,
                rewrite=one,
                strength=strength,
                forbid=words_of(forbid),
                seed=_chosen(seed),
                capitalize=capitalize,
            )
            for one in _texts("text", text)
        ]
        together = generate.generate_together(self.engine, tasks, request)
        found = [generated.text for texts in together for generated in texts]
        return found[0] if isinstance(text, str) and num_return_sequences is None else found

    # ---- fill -------------------------------------------------------------------------------------------------------

    @overload
    def fill(self, text: str, *, num_alternatives: None = ..., **options: Unpack[FillOptions]) -> str: ...

    @overload
    def fill(self, text: str, *, num_alternatives: int, **options: Unpack[FillOptions]) -> list[Filling]: ...

    @overload
    def fill(self, text: list[str], *, num_alternatives: None = ..., **options: Unpack[FillOptions]) -> list[str]: ...

    @overload
    def fill(
        self, text: list[str], *, num_alternatives: int, **options: Unpack[FillOptions]
    ) -> list[list[Filling]]: ...

    def fill(
        self,
        text: str | list[str],
        *,
        num_alternatives: int | None = None,
        max_blank_tokens: int = 4,
        forbid: Sequence[str] = (),
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        capitalize: bool = True,
        seed: int = 0,
    ) -> str | list[str] | list[Filling] | list[list[Filling]]:
        """Fills all blanks of a text jointly: `[MASK]` is one token, `[BLANK]` any number of them.

        A blank after white space begins a word; a blank right after a letter continues the word: `un[MASK]able`. Texts
        longer than the model can read are filled in windows around the blanks, from left to right.

        Args:
            text: A text or a list of texts.
            num_alternatives: The number of ranked fillings to return per text, instead of the best text.
            max_blank_tokens: The maximum number of tokens per `[BLANK]`.
            forbid: Words that must not be generated.
            temperature: The temperature of the random part of the search.
            top_k: Search only the k most probable tokens of each position; 0 or None keeps all.
            top_p: Search only the most probable tokens that together reach this probability.
            capitalize: As in `generate`.
            seed: The seed of the random part of the search.

        Returns:
            The best text (a list for a list); with `num_alternatives`, a list of `Filling` (a list of them per text).
        """
        number = 1 if num_alternatives is None else num_alternatives
        found = infill.fill_together(
            self.engine,
            _texts("text", text),
            number,
            max_blank_tokens=max_blank_tokens,
            forbid=forbid,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=_chosen(seed),
            capitalize=capitalize,
        )
        if num_alternatives is None:
            best = [fillings[0].text for fillings in found]
            return best[0] if isinstance(text, str) else best
        return found[0] if isinstance(text, str) else found

    def probabilities(self, text: str, top_k: int = 5) -> list[list[TokenProbability]]:
        """The most probable tokens for each blank, given the text with all blanks masked."""
        return infill.token_probabilities(self.engine, text, top_k)

    # ---- score ------------------------------------------------------------------------------------------------------

    @overload
    def score(  # type: ignore[overload-overlap]  # a text is not taken for its letters
        self, texts: str, *, overlong: Literal["window", "error"] = ..., **options: Unpack[ScoreOptions]
    ) -> TextScore: ...

    @overload
    def score(  # type: ignore[overload-overlap]  # a text is not taken for its letters
        self, texts: str, *, overlong: Literal["skip"], **options: Unpack[ScoreOptions]
    ) -> TextScore | None: ...

    @overload
    def score(
        self, texts: Iterable[str], *, overlong: Literal["window", "error"] = ..., **options: Unpack[ScoreOptions]
    ) -> list[TextScore]: ...

    @overload
    def score(
        self, texts: Iterable[str], *, overlong: Literal["skip"], **options: Unpack[ScoreOptions]
    ) -> list[TextScore | None]: ...

    def score(
        self,
        texts: str | Iterable[str],
        *,
        precision: float = SentenceBudget.precision,
        steps: int | str | None = None,
        order: str | None = None,
        paired: bool = False,
        overlong: str = "window",
        tokens: bool = False,
        source: str | Sequence[str] | None = None,
        max_draws: int = SentenceBudget.max_draws,
        seed: int = 0,
    ) -> TextScore | list[TextScore] | list[TextScore | None] | None:
        """Scores texts: nats, perplexities and bits per byte, with their kind, quantity and interval.

        A text's score depends on the model, the text, these settings and the seed, not on the other texts.

        Args:
            texts: A text or a list of texts.
            precision: The width of the 95 % interval of each text's *own* perplexity per token, relative to the
                perplexity, at which to stop drawing, unless `max_draws` is reached first; `precision_reached` of a
                score tells which.
            steps: T for the T-step bound, "continuous" for the continuous-time bound; None is the latter if the model
                has it.
            order: "left-to-right", "confidence" or "entropy" computes the exact likelihood of generating the text in
                this order, without draws, instead of a bound; "random-16" in one of 16 random orders.
            paired: Whether to compare the texts: they share their noise, and each gets a `difference` to the first
                text, with an interval as narrow as `precision` requires.
            overlong: What to do with texts longer than the model can read: "window" scores them in overlapping windows,
                "skip" returns None for them, "error" raises ValueError.
            tokens: Whether to return the nats of each token, too; they add up to the score.
            source: The source, for models trained on pairs: one for all texts, or one for each.
            max_draws: The most sequences to evaluate for a text, or for a window of a long one; one round is always
                evaluated.
            seed: The seed of the draws.

        Returns:
            A score for a single text, a list for a list.

        Examples:
            >>> import diffusionbert
            >>> score = diffusionbert.load().score("the capital of france is paris .", order="left-to-right")
            >>> score.kind.value, score.num_tokens, score.ci95 == (score.nats, score.nats)
            ('exact', 7, True)
        """
        settings = score.ScoreSettings(
            SentenceBudget(precision, max_draws, _chosen(seed)),
            steps,
            None if order is None else order_named(order),
            paired,
            overlong,
            tokens,
        )
        scored = _texts("texts", texts)
        given = [source] * len(scored) if isinstance(source, str) else None if source is None else list(source)
        if given is not None and not self.engine.paired:
            raise ValueError("this model was not trained on pairs and takes no `source`; leave it out")
        found = score.score(self.engine, scored, settings, given=given)
        return found[0] if isinstance(texts, str) else found

    @overload
    def choose(self, text: str, options: Sequence[str], *, order: str = ..., prior: str = ...) -> Choice: ...

    @overload
    def choose(
        self, text: list[str], options: Sequence[Sequence[str]], *, order: str = ..., prior: str = ...
    ) -> list[Choice]: ...

    def choose(
        self,
        text: str | list[str],
        options: Sequence[str] | Sequence[Sequence[str]],
        *,
        order: str = "left-to-right",
        prior: str = "uniform",
    ) -> Choice | list[Choice]:
        """Computes the probabilities of options for a blank or a continuation, normalized over the options.

        Args:
            text: A text with one `[BLANK]`, or a list of texts; a text without a blank is continued.
            options: Two or more options of any length; for a list of texts, one list of options per text.
            order: The order in which an option's tokens are generated: "left-to-right", "confidence", "entropy" or
                "random-16".
            prior: The prior over the options' lengths in tokens: "uniform", or "context", p(length) · p(context |
                length).

        Returns:
            A choice for a single text, a list for a list.

        Examples:
            >>> import diffusionbert
            >>> diffusionbert.load().choose("the capital of france is [BLANK] .", ["paris", "new york"]).best
            'paris'
        """
        is_one = isinstance(text, str)
        if isinstance(options, str):
            raise ValueError(f"options must be a list of two or more texts, got the text {options!r:.40}")
        each = [options] if is_one else options
        found = choose.choose(
            self.engine,
            _texts("text", text),
            each,  # type: ignore[arg-type]
            order=order_named(order),
            prior=prior,
        )
        return found[0] if is_one else found

    def embed(self, texts: str | Iterable[str]) -> Tensor:
        """Sentence embeddings, [N, D]: the mean of the last layer over each text's own tokens, for texts of any length.

        Args:
            texts: A text, or several as a list, an array or a column of a table.
        """
        return score.embed(self.engine, _texts("texts", texts))

    # ---- files ------------------------------------------------------------------------------------------------------

    def save_pretrained(self, path: str | Path, *, precision: str | None = None, shard_size: str | None = None) -> Path:
        """Writes the model folder, which `diffusionbert.load` opens, to a new or empty directory.

        Args:
            path: The directory.
            precision: The precision of the stored weights: fp32, fp16, bf16, or int8 for matrices; None keeps it.
            shard_size: The maximum size of a weight file, such as "15MB"; None stores all weights in one file.
        """
        return self.engine.save(Path(path), WeightFormat(precision, shard_size))

    def push_to_hub(self, name: str) -> str:
        """Uploads the model folder to the Hub and returns its address; a new repository is private."""
        with tempfile.TemporaryDirectory() as folder:
            return push_model(self.save_pretrained(Path(folder) / "model"), name)


def load(
    name_or_folder: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    compile: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Model:
    """Opens a model: the bundled one, a run directory, a model folder, or any masked or causal LM by folder or Hub id.

    Args:
        name_or_folder: The model to open; None is the bundled model.
        device: The device to run on; None is a GPU if there is one.
        dtype: The dtype of its parameters, or its name. None is float32, but text is generated in bfloat16 on a GPU,
            and in int8 on a CPU where that is faster. torch.int8 also scores and fills in int8, which costs a few
            thousandths of a nat per token.
        compile: Whether to compile the network for generation on a GPU. The first call takes some seconds longer, all
            others are faster; this pays off for hundreds of texts.
        revision: A branch, tag or commit of a Hub repository.
        token: A Hub token; None uses the stored login.
        local_files_only: Whether to stay offline and use only local files.

    Returns:
        The model.

    Examples:
        >>> import diffusionbert
        >>> diffusionbert.load().name
        'bundled'
    """
    return Model.from_pretrained(
        name_or_folder,
        device=device,
        dtype=dtype,
        compile=compile,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
    )


def evaluate(
    model: Model | str | Path | None = None,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    field: str | None = None,
    target_field: str | None = None,
    cased: bool = False,
    detokenize: bool = False,
    sentences: int | None = None,
    samples: int = 1000,
    length: Length | str | None = None,
    steps: int = 128,
    sampler: str | Sampler | None = None,
    temperature: float = 1.0,
    top_k: int | None = 30,
    top_p: float | None = None,
    block: int | None = None,
    num_candidates: int = 1,
    precision: float = 0.005,
    max_draws: int = 256,
    quantity: str | None = None,
    shared_noise: bool = False,
    judge: str | None = None,
    mauve: bool = False,
    conventions: bool = False,
    modeled_length: bool = False,
    seed: int = 0,
    output: str | Path | None = None,
    overwrite: bool = False,
    device: str | torch.device | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Evaluates a model on a corpus: likelihoods, BLEU, diversity, judges and speed, each with protocol and interval.

    Args:
        model: A model, or anything that `load` opens.
        data: A corpus, as for training: a text file, `lm1b:FOLDER`, `hf:NAME` or `pydoc`.
        split: The split: validation, test or all; None is the test split, otherwise the text held out from training,
            otherwise all.
        field: The field of JSON lines that holds the text, or the source of a pair.
        target_field: The field of JSON lines that holds the target of a pair.
        cased: Whether to keep upper case even if the model was trained on lower-cased text.
        detokenize: Whether to undo the tokenization of text such as LM1B's even if training did not.
        sentences: The number of sentences to score, always the same ones; None scores all.
        samples: The number of samples for BLEU and everything else; as many again are generated for self-BLEU. 0
            computes only likelihoods.
        length: The number of tokens per sample, a range, or "corpus"; None is 64, as in the paper, or the model's
            maximum. For pairs, None draws lengths seen with similar sources, and "target" uses those of the targets.
        steps: As in `Model.generate`.
        sampler: As in `Model.generate`.
        temperature: As in `Model.generate`.
        top_k: As in `Model.generate`; the default is the paper's.
        top_p: As in `Model.generate`.
        block: As in `Model.generate`.
        num_candidates: For pairs, as in `Model.generate`.
        precision: The half-width of the perplexity's 95 % interval, as a fraction of the perplexity, at which to stop
            drawing.
        max_draws: The maximum number of draws per sentence.
        quantity: The only likelihood to compute: grid, continuous, exact, pseudo, …, or an order of unmasking
            (left-to-right, confidence, entropy, random-K), in which it is exact; None computes all that the model has.
        shared_noise: Whether to use the same noise for every model, with `max_draws` draws per sentence, so that most
            of it cancels in paired differences between models.
        judge: A causal language model for generative perplexity.
        mauve: Whether to compare samples with real sentences by MAUVE.
        conventions: Whether to report the likelihood in every convention of the LM1B literature.
        modeled_length: Whether to add -log p(length) to the nats of each sentence.
        seed: The seed of draws and samples.
        output: The directory to write the result to.
        overwrite: Whether to replace an existing result.
        device: The device for a model that is opened here.
        progress: Called with a description of the work, the amount done, and the total.

    Returns:
        The result; `result.table()` shows it, `result.to_json()` is plain data.
    """
    if data is None:
        raise ValueError("`data` is missing; give a test corpus: a text file, lm1b:FOLDER, hf:NAME, or pydoc")
    if max_draws < 2:
        raise ValueError(f"`max_draws` must be >= 2, got {max_draws}: one draw gives no variance")
    budget = EstimationBudget(precision, max_draws, strata=min(16, max_draws // 2), seed=seed)
    request = sampling_request(sampler, steps, temperature, top_k, top_p, block)
    is_target = length == "target"
    chosen = None if length == "corpus" or is_target else PAPER_LENGTH if length is None else length
    if isinstance(chosen, str):
        raise ValueError(f'`length` must be a number, a range such as (10, 30), "corpus" or None, got {length!r}')
    plan = Plan(
        request,
        samples,
        chosen,
        budget,
        modeled_length,
        conventions,
        seed,
        quantity=quantity,
        shared_noise=shared_noise,
        num_candidates=num_candidates,
        target_length=is_target,
    )
    if not samples and (judge or mauve):
        raise ValueError("a judge and MAUVE need samples, got `samples` 0; give 1000, or leave them out")
    if output is not None:
        require_output(output)
        require_writable(Path(output))
        if not overwrite:
            require_free(Path(output))
    if mauve:
        require_mauve()
    engine = (model if isinstance(model, Model) else load(model, device=device)).engine
    if length is None:
        plan = replace(plan, length=None if engine.paired else min(PAPER_LENGTH, engine.max_length))
    plan.require(engine)
    evaluation_set = open_evaluation_set(
        engine,
        str(data),
        split=None if split is None else Split(split),
        field=field,
        target_field=target_field,
        cased=cased,
        detokenize=detokenize,
        sentences=sentences,
    )
    reader = load_judge(judge, engine.device) if judge else None
    features = featurizer(reader, engine.device) if mauve else None
    result = evaluation.evaluate(engine, evaluation_set, plan, reader, features, progress)
    if output is not None:
        folder = Path(output)
        current().on_main(lambda: result.save(folder))
    return result


def _chosen(seed: int | None) -> int:
    """The given seed, or a random one."""
    if seed is None:
        return fresh_seed()
    require_type("seed", seed, Integral, "a whole number")
    return int(seed)


def fresh_seed() -> int:
    """A random seed, the same in all processes of a launch; it is below the seeds that samplers derive from it."""
    return current().on_main(lambda: secrets.randbits(32))


def sampling_request(
    sampler: str | Sampler | None,
    steps: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    block: int | None,
) -> SamplingRequest:
    """Turns the arguments of `generate` into typed settings."""
    require_type("top_k", top_k, (Integral, type(None)), "a whole number or None")
    if top_k is not None and top_k < 0:
        raise ValueError(f"`top_k` must be >= 1, or 0 for all tokens, got {top_k}")
    if isinstance(steps, int):
        Limit.STEPS.require(steps, "`steps` is too large", "ask for fewer")
    named = parse_sampler(sampler) if isinstance(sampler, str) else sampler
    cut = None if top_p == 1 else top_p
    return SamplingRequest(named, SamplerConfig(steps, temperature, top_k or None, cut), block)


def generate_agreed(
    engine: Engine, task: Task, request: SamplingRequest, num_candidates: int
) -> Iterator[GeneratedText]:
    """Yields, for each text of a task, the one of `num_candidates` candidates that agrees most with the others."""
    require_type("num_candidates", num_candidates, Integral, "a whole number")
    if num_candidates < 1 or (num_candidates > 1 and task.source is None):
        raise ValueError(f"`num_candidates` must be >= 1, and 1 without a `source`, got {num_candidates}")
    if num_candidates == 1:
        yield from generate.generate(engine, task, request)
        return
    candidates = list(generate.generate(engine, replace(task, number=task.number * num_candidates), request))
    for start in range(0, len(candidates), num_candidates):
        group = candidates[start : start + num_candidates]
        yield group[most_agreed([candidate.text for candidate in group])]


DTYPES = "float32", "bfloat16", "float16", "float64", "int8"


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, given as such or by its name."""
    if not isinstance(dtype, str):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def _texts(name: str, value: str | Iterable[str]) -> list[str]:
    """One or more texts as a list."""
    if isinstance(value, str):
        return [value]
    require_type(name, value, Iterable, "a text or a list of texts")
    return list(value)
