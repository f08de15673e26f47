"""The examples of docs/serving.md are requests that the server takes, and answers as it gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from diffusionbert.model import Model
from diffusionbert.serve import schema
from diffusionbert.serve.info import info_of
from diffusionbert.serve.server import Server
from diffusionbert.serve.shapes import FixedShapes

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
SHOWN: dict[str, list[type[BaseModel]]] = {
    "GET /v1/info": [schema.Info],
    "POST /v1/completions": [schema.CompletionRequest, schema.Completion],
    "POST /v1/canvas": [schema.CanvasRequest],
    "POST /v1/tokenize": [schema.TokenizeRequest, schema.TokenizeResponse],
    "POST /v1/rewrite": [schema.RewriteRequest, schema.RewriteResponse],
    "POST /v1/fill": [schema.FillRequest, schema.FillResponse],
    "POST /v1/score": [schema.ScoreRequest, schema.ScoreResponse],
    "POST /v1/choose": [schema.ChooseRequest, schema.ChooseResponse],
    "POST /v1/fim/completions": [
        schema.FimRequest,
        schema.FimCompletion,
        schema.EmbeddingResponse,
        schema.ModelList,
    ],
    "Errors": [schema.ErrorResponse],
}


def examples(section: str) -> list[Any]:
    """The JSON of a section."""
    [text] = re.findall(rf"^### `?{re.escape(section)}(?![\w/]).*?(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return [json.loads(found) for found in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def require_part(example: Any, whole: Any, place: str) -> None:
    """Fails if an example has a name that the whole does not."""
    if isinstance(example, dict):
        for name, one in example.items():
            assert name in whole, f"{place}.{name}"
            require_part(one, whole[name], f"{place}.{name}")
    elif isinstance(example, list) and isinstance(whole, list):
        for index, (one, other) in enumerate(zip(example, whole, strict=True)):
            require_part(one, other, f"{place}.{index}")


def test_every_section_is_known():
    headings = re.findall(r"^### `?(.*?)(?:`.*)?$", TEXT, re.MULTILINE)
    assert headings == [*SHOWN]


@pytest.mark.parametrize("section", SHOWN)
def test_examples_have_the_names_and_types_of_the_api(section):
    for example, kind in zip(examples(section), SHOWN[section], strict=True):
        require_part(example, kind.model_validate(example).model_dump(mode="json"), section)


def test_the_example_of_info_is_true(monkeypatch):
    monkeypatch.setattr(FixedShapes, "warm_up", lambda *_: None)
    server = Server(Model.from_pretrained())
    try:
        found = info_of(server).model_dump(mode="json")
    finally:
        server.scheduler.close()
    [shown] = examples("GET /v1/info")
    known = {one["name"]: one for one in found.pop("samplers")}
    for sampler in shown.pop("samplers"):
        assert sampler["settings"][0] in known[sampler["name"]]["settings"]
    del found["version"], shown["version"]
    assert shown == found
