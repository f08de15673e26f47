"""The endpoints for the package's own tasks: fill, rewrite, canvas, tokens, score, choose; and embeddings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from diffusionbert.inference.trace import TracedState
from diffusionbert.model import fresh_seed
from diffusionbert.serve import answers, schema
from diffusionbert.serve.errors import ERRORS, EVENTS
from diffusionbert.serve.events import event, stream
from diffusionbert.serve.server import Server


def add_texts(app: FastAPI, server: Server) -> None:
    """Adds the endpoints: fill, rewrite, canvas, tokens, score, choose, embeddings."""
    engine = server.engine

    @app.post("/v1/fill", tags=["texts"], responses=ERRORS)
    async def fill(body: schema.FillRequest, request: Request) -> schema.FillResponse:
        """Fills all blanks of each text jointly."""
        server.require(body, [*body.text, *body.forbid], len(body.text), alternatives=body.num_alternatives)
        works = [answers.fill_work(engine, body, index, text) for index, text in enumerate(body.text)]
        return schema.FillResponse(model=server.name, data=await server.results(request, works))

    @app.post("/v1/rewrite", tags=["texts"], responses=ERRORS | EVENTS, response_model=schema.RewriteResponse)
    async def rewrite(body: schema.RewriteRequest, request: Request) -> Any:
        """Masks a fraction of a text, or the given characters, and generates them again."""
        server.require(body, [body.text, *body.forbid], body.n)
        seed = fresh_seed() if body.seed is None else body.seed

        def response(*data: schema.Rewriting) -> schema.RewriteResponse:
            return schema.RewriteResponse(model=server.name, seed=seed, data=list(data))

        if body.stream:
            return await stream(request, _rewriting_events(server, body, seed, response))
        states: list[list[schema.State]] = [[] for _ in range(body.n)]
        found = await server.results(
            request,
            [
                answers.rewrite_work(engine, body, seed, index, kept_states(states[index], body.diffusing))
                for index in range(body.n)
            ],
        )
        server.metrics.generated.inc(sum(_num_generated(state) for _, _, state in found))
        return response(
            *(
                schema.Rewriting(index=index, text=text, kept=kept, states=states[index] if body.diffusing else None)
                for index, (text, kept, _) in enumerate(found)
            )
        )

    @app.post("/v1/canvas", tags=["texts"], responses=ERRORS | EVENTS, response_model=schema.CanvasResponse)
    async def canvas(body: schema.CanvasRequest, request: Request) -> Any:
        """Generates the masked positions of a canvas, given all others."""
        server.require(body, [body.text or "", *body.forbid], 1)
        seed = fresh_seed() if body.seed is None else body.seed

        def response(state: TracedState, *, done: bool, states: Any = None) -> schema.CanvasResponse:
            shown = answers.state_of(state)
            return schema.CanvasResponse(model=server.name, seed=seed, done=done, state=shown, states=states)

        async def events() -> AsyncGenerator[str, None]:
            async for _, state, result in server.states(
                lambda _, emit: answers.canvas_work(engine, body, seed, emit), 1
            ):
                if state is None:
                    server.metrics.generated.inc(_num_generated(result))
                    yield event(response(result, done=True), exclude={"states"})
                elif body.diffusing and not state.done:
                    yield event(response(state, done=False), exclude={"states"})

        if body.stream:
            return await stream(request, events())
        states: list[schema.State] = []
        [last] = await server.results(
            request, [answers.canvas_work(engine, body, seed, kept_states(states, body.diffusing))]
        )
        server.metrics.generated.inc(_num_generated(last))
        return response(last, done=True, states=states if body.diffusing else None)

    @app.post("/v1/tokenize", tags=["texts"], responses=ERRORS)
    async def tokenize(body: schema.TokenizeRequest) -> schema.TokenizeResponse:
        """The tokens of a text, with their characters."""
        server.require(body, [body.text])
        tokens = answers.tokenized(engine, body.text)
        return schema.TokenizeResponse(model=server.name, tokens=tokens, max_length=engine.max_length)

    @app.post("/v1/score", tags=["texts"], responses=ERRORS)
    async def score(body: schema.ScoreRequest, request: Request) -> schema.ScoreResponse:
        """Scores texts: nats per token, with kind and interval."""
        steps = body.steps if isinstance(body.steps, int) else 1
        server.require(body, body.text, draws=body.max_draws, steps=steps)
        parts = [body.text] if body.paired else [[text] for text in body.text]
        found = await server.results(request, [answers.score_work(engine, body, part) for part in parts])
        scores = [one for part in found for one in part]
        for index, one in enumerate(scores):
            one.index = index
        return schema.ScoreResponse(model=server.name, data=scores)

    @app.post("/v1/choose", tags=["texts"], responses=ERRORS)
    async def choose(body: schema.ChooseRequest, request: Request) -> schema.ChooseResponse:
        """Computes the probabilities of options for a blank or a continuation."""
        server.require(body, [body.text, *body.options], len(body.options))
        [found] = await server.results(request, [answers.choose_work(engine, body, server.name)])
        chosen: schema.ChooseResponse = found
        return chosen

    @app.post("/v1/embeddings", tags=["OpenAI"], responses=ERRORS)
    async def embeddings(body: schema.EmbeddingRequest, request: Request) -> schema.EmbeddingResponse:
        """Embeds texts: the mean of the last layer over each text's own tokens."""
        server.require(body, body.input)
        found = await server.results(request, [answers.embedding_work(engine, body, text) for text in body.input])
        number = sum(map(len, engine.vocabulary.own(body.input)))
        return schema.EmbeddingResponse(
            model=server.name,
            data=[schema.Embedding(index=index, embedding=vector) for index, vector in enumerate(found)],
            usage=schema.EmbeddingUsage(prompt_tokens=number, total_tokens=number),
        )


def kept_states(states: list[schema.State], wanted: bool) -> Callable[[TracedState], None] | None:
    """A callback that keeps all states of a text, if they are wanted."""
    return (lambda state: states.append(answers.state_of(state))) if wanted else None


def _num_generated(state: TracedState | None) -> int:
    return 0 if state is None else sum(not one.is_given for one in state.traced)


async def _rewriting_events(
    server: Server, body: schema.RewriteRequest, seed: int, response: Callable[..., BaseModel]
) -> AsyncGenerator[str, None]:
    found = server.states(lambda index, emit: answers.rewrite_work(server.engine, body, seed, index, emit), body.n)
    async for index, state, result in found:
        if state is not None:
            if body.diffusing and not state.done:
                shown = answers.state_of(state)
                one = schema.Rewriting(index=index, text=state.text, state=shown, done=False)
                yield event(response(one))
            continue
        text, kept, last = result
        server.metrics.generated.inc(_num_generated(last))
        final = answers.state_of(last) if last is not None and body.diffusing else None
        yield event(response(schema.Rewriting(index=index, text=text, kept=kept, state=final)))
