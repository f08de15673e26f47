"""The HTTP application: its routes, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from diffusionbert import __version__
from diffusionbert.serve import schema
from diffusionbert.serve.completions import add_completions
from diffusionbert.serve.description import description_page
from diffusionbert.serve.errors import ERRORS, RequestError, of_exception, of_validation
from diffusionbert.serve.gate import Gate
from diffusionbert.serve.info import card_of, info_of
from diffusionbert.serve.scheduler import CancelledWorkError, OvertimeError, QueueFullError
from diffusionbert.serve.server import ClientGoneError, Server
from diffusionbert.serve.texts import add_texts

PAGE = str(files("diffusionbert.serve") / "page")
FRESH = {"cache-control": "no-cache"}


def create_app(server: Server) -> FastAPI:
    """The application of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.scheduler.close)

    app = FastAPI(
        title="DiffusionBERT",
        version=__version__,
        summary="A masked diffusion language model.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = server
    _add_errors(app)
    _add_operation(app, server)
    add_texts(app, server)
    add_completions(app, server)
    app.add_middleware(Gate, settings=server.settings, metrics=server.metrics)
    if server.settings.cors_origins:  # outside the gate: preflight requests have no key, and browsers must see refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after"],
        )
    app.mount("/page", _Page(directory=PAGE), name="page")
    return app


class _Page(StaticFiles):
    """The files of the page; browsers check whether they have changed, so that two versions never mix."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """A file, or the response that it has not changed."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(FRESH)
        return response


def _add_errors(app: FastAPI) -> None:
    def refused(error: RequestError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return refused(of_validation(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def _(_: Request, error: HTTPException) -> JSONResponse:
        names = {404: "not_found", 405: "method_not_allowed"}
        refusal = RequestError(error.status_code, str(error.detail), code=names.get(error.status_code))
        return JSONResponse(refusal.body, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(CancelledWorkError)
    async def _(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def failed(_: Request, error: Exception) -> JSONResponse:
        return refused(of_exception(error))

    for kind in (RequestError, QueueFullError, OvertimeError, ValueError, TypeError, MemoryError):
        app.add_exception_handler(kind, failed)  # for other exceptions, `Gate` reports that the server failed


def _add_operation(app: FastAPI, server: Server) -> None:
    @app.get("/health", tags=["operation"])
    async def health() -> schema.Status:
        """Whether the process is alive."""
        return schema.Status(status="ok")

    @app.get("/ready", tags=["operation"], responses={503: {"model": schema.Status}})
    async def ready(response: Response) -> schema.Status:
        """Whether a load balancer may send requests."""
        response.status_code = 200 if server.status == "ready" else 503
        return schema.Status(status=server.status)

    @app.get("/metrics", tags=["operation"], responses={401: ERRORS[401]}, response_class=Response)
    async def metrics() -> Response:
        """The metrics for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(f"{PAGE}/index.html", headers=FRESH)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(description_page(app.openapi()))

    @app.get("/v1/models", tags=["model"], responses={401: ERRORS[401]})
    async def models() -> schema.ModelList:
        """The one model of this server."""
        return schema.ModelList(data=[card_of(server)])

    @app.get("/v1/models/{model:path}", tags=["model"], responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(model: str) -> schema.ModelCard:
        """The model of this name."""
        server.require(schema.Named(model=model), [])
        return card_of(server)

    @app.get("/v1/info", tags=["model"], responses={401: ERRORS[401]})
    async def info() -> schema.Info:
        """The capabilities of the server and its model."""
        return info_of(server)
