"""The JSON requests and responses of the API.

Unknown fields are refused by name. Fields that other servers support and this one does not are listed with the one
value that changes nothing, so that clients that always send them still work.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from diffusionbert.samplers.base import SamplerConfig


def _several(value: Any) -> Any:
    """Turns a single text into a list of one."""
    return [value] if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1), BeforeValidator(_several, json_schema_input_type=Text | list[Text])]
Prompts = Annotated[list[str], Field(min_length=1), BeforeValidator(_several, json_schema_input_type=str | list[str])]
Stops = Annotated[list[Text], Field(max_length=4), BeforeValidator(_several, json_schema_input_type=Text | list[Text])]
Words = Annotated[list[Text], Field(default_factory=list)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Strict(BaseModel):
    """A model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# ---- parts of requests ----------------------------------------------------------------------------------------------


class Named(Strict):
    """A request that may name the model; there is only one."""

    model: str | None = Field(default=None, description="The id listed by /v1/models; optional.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """A null parameter gets its default, as in OpenAI's API; an unknown one stays, to be refused."""
        if not isinstance(given, dict):
            return given
        return {name: one for name, one in given.items() if one is not None or name not in cls.model_fields}


class Sampling(Named):
    """How tokens are sampled."""

    sampler: str | None = Field(
        default=None,
        description="A sampler by name, with settings such as `remasking:eta=0.1`; the model's own by default.",
    )
    steps: Count = Field(default=SamplerConfig.steps, description="The number of steps of the time grid.")
    temperature: float = Field(
        default=SamplerConfig.temperature,
        ge=0,
        le=100,
        description="0 takes the most probable token of each position.",
    )
    top_k: int | None = Field(default=None, ge=0, description="Sample from the k most probable tokens; 0 keeps all.")
    top_p: Probability | None = Field(
        default=None,
        description="Sample from the most probable tokens that together reach this; 1 keeps all, null is the default.",
    )
    seed: Seed | None = Field(default=None, description="The same seed gives the same text; null draws a seed.")
    forbid: Words = Field(description="Words that must not be generated.")
    capitalize: bool = Field(default=True, description="Whether to restore capitals if the model is uncased.")


class Streaming(Strict):
    """How the response is delivered."""

    stream: bool = Field(default=False, description="Respond with server-sent events.")
    diffusing: bool = Field(default=False, description="Return every denoising state, with its step map.")
    alternatives: int = Field(default=0, ge=0, le=20, description="Alternatives per generated token in step maps.")


class StreamOptions(Strict):
    """Stream options, as in OpenAI's API."""

    include_usage: bool = False


# ---- completions ----------------------------------------------------------------------------------------------------


class CompletionRequest(Sampling, Streaming):
    """Continues a prompt or, with a suffix, generates the text between the two."""

    prompt: Prompts = Field(default_factory=lambda: [""])
    suffix: str | None = Field(default=None, description="The text after the generated part, for infilling.")
    max_tokens: Count = Field(
        default=16, description="The size of the canvas: exactly this many new tokens, unless a `stop` ends the text."
    )
    n: Count = 1
    stop: Stops = Field(default_factory=list)
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="Return log f of each token at the step that unmasked it, with this many alternatives.",
    )
    echo: bool = Field(default=False, description="Return the prompt, too.")
    include: Words = Field(description="Words that must occur.")
    stream_options: StreamOptions | None = None
    best_of: Literal[1] | None = Field(default=None, description="Not supported.")
    frequency_penalty: Literal[0] | None = Field(default=None, description="Not supported.")
    presence_penalty: Literal[0] | None = Field(default=None, description="Not supported.")
    logit_bias: None = Field(default=None, description="Not supported.")
    user: None = Field(default=None, description="Not supported.")


class FimRequest(Named):
    """Fill-in-the-middle, as in Mistral's API."""

    prompt: str
    suffix: str = ""
    max_tokens: Count = 16
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: Probability | None = None
    random_seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    stream: bool = False
    min_tokens: None = Field(default=None, description="Not supported.")


class Usage(BaseModel):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    """The log-probabilities of tokens; null for given tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    """One text, or its new part in a stream."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: Logprobs | None = None
    state: State | None = Field(default=None, description="In a stream with `diffusing`.")
    states: list[State] | None = Field(default=None, description="Without a stream, with `diffusing`.")


class Completion(BaseModel):
    """A whole response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    seed: int | None = Field(default=None, description="The seed that reproduces the text.")


class FimMessage(BaseModel):
    """The generated text."""

    role: Literal["assistant"] = "assistant"
    content: str


class FimChoice(BaseModel):
    """One text: as a whole (`message`), or its new part in a stream (`delta`)."""

    index: int = 0
    message: FimMessage | None = None
    delta: FimMessage | None = None
    finish_reason: Literal["stop", "length"] | None = None


class FimCompletion(BaseModel):
    """A whole response, or one chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int
    model: str
    choices: list[FimChoice]
    usage: Usage | None = None


# ---- step maps ------------------------------------------------------------------------------------------------------


class Alternative(BaseModel):
    """A token that could have been sampled."""

    id: int
    text: str
    probability: float


class StepToken(BaseModel):
    """A position of a state: its token, and how the token was generated."""

    id: int | None = Field(description="The token id; null while the position is masked.")
    text: str | None = Field(description="The token, with ## if it continues a word.")
    start: int = Field(description="The start of its characters in the text of the state.")
    end: int
    given: bool = Field(description="Whether it was given rather than generated.")
    step: int | None = Field(default=None, description="The step that unmasked it.")
    probability: float | None = Field(default=None, description="f(token | the state before that step).")
    alternatives: list[Alternative] = Field(default_factory=list, description="The most probable tokens at that step.")


class State(BaseModel):
    """A denoising state; `tokens` is its step map."""

    step: int = Field(description="The number of steps so far; 0 before the first.")
    time: float = Field(description="The time, from 1 (all masked) to 0.")
    calls: int = Field(description="The number of network calls so far.")
    text: str = Field(description="The text, with [MASK] for masked tokens.")
    tokens: list[StepToken]


# ---- canvas, tokens -------------------------------------------------------------------------------------------------


class CanvasToken(Strict):
    """A position of a canvas."""

    id: int | None = Field(default=None, ge=0, description="The token id; null for a masked position.")
    state: Literal["locked", "free", "masked"] = Field(
        default="free", description="masked: generated; free: kept, unless `strength` masks it; locked: always kept."
    )


class CanvasRequest(Sampling, Streaming):
    """Generates the masked positions of a canvas, given all others: to continue, remask or lock tokens."""

    tokens: Annotated[list[CanvasToken], Field(min_length=1)]
    text: str | None = Field(
        default=None, description="The text that these tokens encode, so that kept tokens keep their characters, too."
    )
    strength: float = Field(
        default=0.0, ge=0, le=1, description="The fraction of free tokens to mask, chosen by the seed."
    )


class CanvasResponse(BaseModel):
    """The last state; in a stream, every event has one."""

    object: Literal["canvas"] = "canvas"
    model: str
    seed: int
    done: bool = True
    state: State
    states: list[State] | None = Field(default=None, description="Without a stream, with `diffusing`.")


class TokenizeRequest(Named):
    """A text, where [MASK] is one masked token."""

    text: str


class Token(BaseModel):
    """A token of a text."""

    id: int | None = Field(description="The token id; null for [MASK].")
    text: str | None
    start: int
    end: int


class TokenizeResponse(BaseModel):
    """The tokens of a text, without special ones."""

    object: Literal["tokens"] = "tokens"
    model: str
    tokens: list[Token]
    max_length: int = Field(description="The maximum number of tokens of a text.")


# ---- fill, rewrite, score, choose, embed ----------------------------------------------------------------------------


class FillRequest(Named):
    """Fills all blanks of a text jointly: [MASK] is one token, [BLANK] any number of them."""

    text: Texts
    num_alternatives: Count = Field(default=1, description="The number of ranked fillings per text.")
    max_blank_tokens: Count = Field(default=4, description="The maximum number of tokens per [BLANK].")
    forbid: Words
    temperature: float = Field(
        default=1.0, gt=0, le=100, description="The temperature of the random part of the search."
    )
    top_k: int | None = Field(default=None, ge=0)
    top_p: Probability | None = None
    seed: Seed = 0
    capitalize: bool = True
    probabilities: int = Field(default=0, ge=0, le=100, description="Return this many probable tokens for each blank.")


class Filling(BaseModel):
    """A text with its blanks filled."""

    text: str
    fillings: list[str] = Field(description="The text of each blank, from left to right.")
    nats: float
    conditional_on: str


class Filled(BaseModel):
    """The fillings of a text, best first."""

    index: int
    fillings: list[Filling]
    probabilities: list[list[Alternative]] | None = None


class FillResponse(BaseModel):
    """One result per text."""

    object: Literal["list"] = "list"
    model: str
    data: list[Filled]


class RewriteRequest(Sampling, Streaming):
    """Masks a random fraction of a text's words and generates them again."""

    text: Text
    strength: float = Field(default=0.4, gt=0, le=1, description="The fraction of tokens to mask.")
    n: Count = 1
    spans: list[tuple[Index, Index]] | None = Field(
        default=None, description="Rewrite all of these characters instead of a fraction of the text."
    )


class Rewriting(BaseModel):
    """A rewritten text."""

    index: int
    text: str
    kept: list[str] = Field(default_factory=list, description="Parts unknown to the vocabulary, left unchanged.")
    state: State | None = Field(default=None, description="In a stream with `diffusing`.")
    states: list[State] | None = Field(default=None, description="Without a stream, with `diffusing`.")
    done: bool = True


class RewriteResponse(BaseModel):
    """One result per rewritten text; in a stream, every event has one."""

    object: Literal["list"] = "list"
    model: str
    seed: int
    data: list[Rewriting]


class ScoreRequest(Named):
    """Scores texts."""

    text: Texts
    order: Literal["left-to-right", "confidence", "entropy"] | None = Field(
        default=None, description="Compute the exact likelihood in this order of generation instead of a bound."
    )
    steps: Count | Literal["continuous"] | None = Field(default=None, description="T for the T-step bound.")
    precision: float = Field(
        default=0.25, gt=0, le=10, description="The precision of the perplexity per token, relative to it."
    )
    max_draws: Count = Field(
        default=4096, description="The most sequences to evaluate for a text; one round is always done."
    )
    paired: bool = Field(default=False, description="Compare each text with the first, using shared noise.")
    tokens: bool = Field(default=False, description="Return the nats of each token.")
    seed: Seed = 0


class TokenNats(BaseModel):
    """A token of a scored text."""

    text: str
    nats: float | None
    start: int
    end: int


class Difference(BaseModel):
    """The difference to the first text."""

    nats: float | None
    ci95: tuple[float | None, float | None]


class TextScore(BaseModel):
    """The score of a text; infinite numbers are null."""

    index: int
    nats: float | None
    ci95: tuple[float | None, float | None]
    nats_per_token: float | None
    perplexity_per_token: float | None
    perplexity_per_word: float | None
    bits_per_byte: float | None
    kind: Literal["exact", "bound", "pseudo", "none"]
    quantity: str
    conditional_on: str
    num_tokens: int
    num_words: int
    num_bytes: int
    num_unknown: int
    num_draws: int
    precision_reached: bool
    tokens: list[TokenNats] | None = None
    difference: Difference | None = None


class ScoreResponse(BaseModel):
    """One score per text."""

    object: Literal["list"] = "list"
    model: str
    data: list[TextScore]


class ChooseRequest(Named):
    """Computes the probabilities of options for a [BLANK] or a continuation."""

    text: Text
    options: Annotated[list[Text], Field(min_length=2)]
    order: Literal["left-to-right", "confidence", "entropy"] = "left-to-right"
    prior: Literal["uniform", "context"] = "uniform"


class Option(BaseModel):
    """One option; `probability` is normalized over all options."""

    option: str
    probability: float
    nats: float | None
    length_nats: float | None
    num_tokens: int
    num_unknown: int


class ChooseResponse(BaseModel):
    """The options in the given order."""

    object: Literal["choice"] = "choice"
    model: str
    best: str
    options: list[Option]
    order: str
    prior: str
    kind: str
    conditional_on: str


class EmbeddingRequest(Named):
    """Texts to embed, as in OpenAI's API."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = Field(default=None, description="Not supported.")
    user: None = Field(default=None, description="Not supported.")


class Embedding(BaseModel):
    """The embedding of one text: numbers, or the bytes of float32 numbers in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """One embedding per text."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


# ---- what the server is ---------------------------------------------------------------------------------------------


class ModelCard(BaseModel):
    """The model, as in OpenAI's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    """The one model of this server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class SamplerSetting(BaseModel):
    """A setting of a sampler, for use as `name:setting=value`."""

    name: str
    default: Any


class SamplerCard(BaseModel):
    """A sampler that suits the model."""

    name: str
    description: str
    settings: list[SamplerSetting]


class LimitCard(BaseModel):
    """The limits on a request."""

    body_bytes: int
    characters: int = Field(description="Characters per request, over all its texts.")
    tokens: int = Field(description="Tokens of a generated text, including prompt and suffix.")
    texts: int = Field(description="Texts per request: prompts times n, or texts to fill, score or embed.")
    steps: int
    alternatives: int = Field(description="Ranked fillings per text.")
    draws: int = Field(description="Draws for the score of a text.")


class SamplingDefaults(BaseModel):
    """How tokens are sampled unless a request says otherwise."""

    sampler: str
    sampler_after_prompt: str
    steps: int
    temperature: float
    top_k: int | None
    top_p: float | None


class Info(BaseModel):
    """What a page needs to know about the server and its model."""

    version: str
    model: str
    objective: str
    num_parameters: int
    uncased: bool
    mask: str = Field(description="The mark for one masked token in a text.")
    blank: str = Field(description="The mark for a blank of unknown length.")
    tasks: list[Literal["generate", "infill", "fill", "rewrite", "canvas", "score", "choose", "embed"]]
    orders: list[str] = Field(description="The orders in which text can be scored exactly.")
    quantity: str | None = Field(description="The quantity by which text is scored without an order.")
    samplers: list[SamplerCard]
    defaults: SamplingDefaults
    limits: LimitCard
    authorization: bool = Field(description="Whether requests need an API key.")


class Status(BaseModel):
    """The status reported by /health and /ready."""

    status: Literal["ok", "starting", "ready", "draining"]


class ErrorObject(BaseModel):
    """An error, as in OpenAI's API."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every error, and the last event of a stream that fails."""

    error: ErrorObject


Choice.model_rebuild()
