"""Request errors, as OpenAI's error object."""

from __future__ import annotations

import math
import re
from typing import Any

from diffusionbert.serve.scheduler import OvertimeError, QueueFullError
from diffusionbert.serve.schema import ErrorObject, ErrorResponse

_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 415, 422, 429, 500, 503)
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": _EVENT}},
        "description": "With `stream`: events, the last [DONE].",
    }
}
"""For the OpenAPI description: the errors of all endpoints, and the responses of those that stream."""
UNSUPPORTED = {"extra_forbidden", "none_required"}
"""The pydantic errors for parameters that are unknown or have no supported value."""


class RequestError(Exception):
    """A request was refused."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The response body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=error).model_dump()

    @property
    def headers(self) -> dict[str, str]:
        """The response headers."""
        return {} if self.retry is None else {"retry-after": str(self.retry)}


def of_exception(error: BaseException) -> RequestError:
    """The error that the client gets when its work fails."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, QueueFullError):
        return RequestError(429, str(error), code="queue_full", retry=error.seconds)
    if isinstance(error, OvertimeError):
        return RequestError(503, "the request takes too long; ask for less", code="overtime", retry=60)
    if isinstance(error, ValueError | TypeError):
        message = re.sub(r", or use `block=\d+`", "", " ".join(str(error).split()))  # an option of the command line
        return RequestError(422, message, code="invalid_value")
    if isinstance(error, MemoryError):
        return RequestError(503, "not enough memory; ask for less, or try again later", code="memory", retry=60)
    return RequestError(500, "the server failed; its log says more", code="internal_error")


def of_validation(errors: list[dict[str, Any]]) -> RequestError:
    """The error for pydantic's findings: an unsupported parameter, otherwise the first wrong value."""
    unsupported = [one for one in errors if _is_unsupported(one)]
    first = (unsupported or errors)[0]
    names = (str(part) for part in first["loc"][1:] if unsupported or _is_name(part))
    param = ".".join(names) or None
    if first["type"] == "json_invalid":
        return RequestError(400, "the body is not JSON", code="invalid_json")
    if unsupported:
        name = param or "this"
        remedy = f" with the value {_shown(first['input'])}" if first["type"] == "literal_error" else ""
        return RequestError(
            400, f"`{name}` is not supported{remedy}; leave it out", param=param, code="unsupported_parameter"
        )
    message = f"`{param}`: {first['msg'][:1].lower()}{first['msg'][1:]}" if param else str(first["msg"])
    return RequestError(422, f"{message}, got {_shown(first.get('input'))}", param=param, code="invalid_value")


def _is_name(part: int | str) -> bool:
    """Whether a part of a location is one of our names or an index, not the member of a union that was tried."""
    return isinstance(part, int) or part.isidentifier()


def _is_unsupported(error: dict[str, Any]) -> bool:
    neutral = error["type"] == "literal_error" and error.get("ctx", {}).get("expected") in ("0", "1")
    return error["type"] in UNSUPPORTED or neutral


def _shown(value: Any) -> str:
    return repr(value)[:40] if not isinstance(value, float) or math.isfinite(value) else str(value)
