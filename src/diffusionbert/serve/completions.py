"""The endpoints that OpenAI's and Mistral's clients call."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request

from diffusionbert.inference.trace import TracedState
from diffusionbert.model import fresh_seed
from diffusionbert.serve import answers, schema
from diffusionbert.serve.answers import Deltas, Prompt
from diffusionbert.serve.errors import ERRORS, EVENTS
from diffusionbert.serve.events import event, stream
from diffusionbert.serve.server import Server
from diffusionbert.serve.texts import kept_states


def add_completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", tags=["OpenAI"], responses=ERRORS | EVENTS, response_model=schema.Completion)
    async def completions(body: schema.CompletionRequest, request: Request) -> Any:
        """Continues a prompt or, with a suffix, generates the text between the two."""
        others = [body.suffix or "", *body.include, *body.forbid]
        server.require(body, [*body.prompt, *others], len(body.prompt) * body.n)
        seed = fresh_seed() if body.seed is None else body.seed
        return await _complete(server, body, request, seed)

    @app.post("/v1/fim/completions", tags=["Mistral"], responses=ERRORS | EVENTS, response_model=schema.FimCompletion)
    async def fim(body: schema.FimRequest, request: Request) -> Any:
        """Generates the text between a prompt and a suffix, as Mistral's endpoint does."""
        names = ("model", "prompt", "suffix", "max_tokens", "temperature", "top_p", "stop", "stream")
        plain = schema.CompletionRequest(**{name: getattr(body, name) for name in names})
        server.require(plain, [body.prompt, body.suffix], 1)
        seed = fresh_seed() if body.random_seed is None else body.random_seed
        return await _complete(server, plain, request, seed, as_fim=True)


async def _complete(
    server: Server, body: schema.CompletionRequest, request: Request, seed: int, *, as_fim: bool = False
) -> Any:
    """A completion, as a whole or as events."""
    completion = _Completion(server, body, seed, as_fim)
    if body.stream:
        return await stream(request, completion.events())
    states: list[list[schema.State]] = [[] for _ in completion.prompts]
    works = [completion.work(index, kept_states(some, body.diffusing)) for index, some in enumerate(states)]
    found = await server.results(request, works)
    choices = [
        answers.choice_of(server.engine, index, prompt, state)
        for index, (prompt, state) in enumerate(zip(completion.prompts, found, strict=True))
    ]
    if body.diffusing:
        for choice, some in zip(choices, states, strict=True):
            choice.states = some
    usage = answers.usage_of(server.engine, completion.prompts)
    server.metrics.generated.inc(usage.completion_tokens)
    return completion.response(choices, usage, is_whole=True)


@dataclass(eq=False)
class _Completion:
    """A completion being generated."""

    server: Server
    body: schema.CompletionRequest
    seed: int
    as_fim: bool

    def __post_init__(self) -> None:
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self.prompts: list[Prompt] = answers.prompts_of(self.body, self.seed)
        self.sampling = answers.sampling_of(self.body)

    def work(self, index: int, emit: Callable[[TracedState], None] | None) -> Callable[[], TracedState]:
        prompt = self.prompts[index]
        return answers.completion_work(self.server.engine, prompt, self.sampling, self.body.alternatives, emit)

    def response(
        self, choices: list[schema.Choice], usage: schema.Usage | None = None, *, is_whole: bool = False
    ) -> schema.Completion | schema.FimCompletion:
        """The whole response, or one chunk of a stream."""
        both: dict[str, Any] = {"id": self.id, "created": self.created, "model": self.server.name, "usage": usage}
        if not self.as_fim:
            return schema.Completion(choices=choices, seed=self.seed, **both)
        name = "message" if is_whole else "delta"
        converted = [
            schema.FimChoice(
                index=choice.index,
                finish_reason=choice.finish_reason,
                **{name: schema.FimMessage(content=choice.text)},
            )
            for choice in choices
        ]
        return schema.FimCompletion(
            object="chat.completion" if is_whole else "chat.completion.chunk", choices=converted, **both
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields chunks with the newly final characters of a text, and its states if requested."""
        deltas = [Deltas(self.server.engine.vocabulary, prompt) for prompt in self.prompts]
        num_sent = [0] * len(deltas)
        echoes = [prompt.task.prompt if prompt.echo else "" for prompt in self.prompts]
        async for index, state, result in self.server.states(self.work, len(self.prompts)):
            if state is None:
                choice = answers.choice_of(self.server.engine, index, self.prompts[index], result)
                text = choice.text.removeprefix(self.prompts[index].task.prompt if self.prompts[index].echo else "")
            else:  # the end of a text comes with its finish reason
                choice = schema.Choice(index=index, text="")
                text = deltas[index].text if state.done else deltas[index].update(state).text
                if self.body.diffusing:
                    choice.state = answers.state_of(state)
            choice.text, echoes[index] = echoes[index] + text[num_sent[index] :], ""
            num_sent[index] = max(num_sent[index], len(text))
            if state is None or choice.text or choice.state is not None:
                yield event(self.response([choice]))
        usage = answers.usage_of(self.server.engine, self.prompts)
        self.server.metrics.generated.inc(usage.completion_tokens)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield event(self.response([], usage))
