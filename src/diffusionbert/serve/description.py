"""The page at `/docs`: the OpenAPI description as plain HTML, which works offline."""

from __future__ import annotations

from html import escape
from typing import Any


def description_page(openapi: dict[str, Any]) -> str:
    """One section per endpoint, one table per object."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>DiffusionBERT API</title>',
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="page/icon.svg" type="image/svg+xml"></head><body>',
        f"<h1>{escape(openapi['info']['title'])} {escape(openapi['info']['version'])}</h1>",
        '<p>The machine-readable form is <a href="/openapi.json">/openapi.json</a>.</p>',
    ]
    for path, methods in openapi["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(about.get('description', ''))}</p>")
            content = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if content is not None:
                parts.append(f"<p>Takes {_type(content)}.</p>")
            answer = about["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
            if answer:
                parts.append(f"<p>Returns {_type(answer)}.</p>")
    parts.append("<h1>Objects</h1>")
    for name, about in openapi.get("components", {}).get("schemas", {}).items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(about.get("description", ""))}</p>')
        required = about.get("required", [])
        parts.append("<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
        for field, value in about.get("properties", {}).items():
            default = "required" if field in required else escape(str(value.get("default", "")))
            parts.append(
                f"<tr><td><code>{escape(field)}</code></td><td>{_type(value)}</td><td>{default}</td>"
                f"<td>{escape(value.get('description', ''))}</td></tr>"
            )
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>"])


def _type(schema: dict[str, Any]) -> str:
    """The type of a value as HTML, with links to objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_type(one) for one in schema[union])
    if "enum" in schema:
        return " or ".join(escape(repr(one)) for one in schema["enum"])
    if "const" in schema:
        return escape(repr(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
