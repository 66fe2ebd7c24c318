"""`/docs`: the OpenAPI document as one page, which asks nobody else for scripts, styles or fonts."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import HTMLResponse

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font-family:ui-monospace,monospace}pre{overflow:auto;padding:.5rem;border:1px solid #8886}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8886;padding:.3rem;text-align:left;"
    "vertical-align:top}:root{color-scheme:light dark}"
)
_MOST_DEPTH: Final = 4  # deeper ones are shown as JSON. Not tuned.


def install_docs_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(render_docs(app.openapi()), headers=headers)


def render_docs(document: dict[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><main><h1>{title}</h1>",
        "<p>The whole document: <a href=openapi.json>openapi.json</a></p>",
    ]
    schemas = document.get("components", {}).get("schemas", {})
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>")
            parts.append(_render_operation(about))
    parts.append("<h1>Schemas</h1>")
    parts += [_render_schema(name, schema) for name, schema in sorted(schemas.items())]
    return "".join([*parts, "</main></html>"])


def _render_operation(about: dict[str, Any]) -> str:
    parts = []
    if words := about.get("description"):
        parts.append(f"<p>{escape(words)}</p>")
    for kind, content in about.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body: <code>{escape(kind)}</code> {_name_type(content.get('schema', {}))}</p>")
    rows = []
    for status, answer in about.get("responses", {}).items():
        kinds = ", ".join(
            f"<code>{escape(kind)}</code> {_name_type(content.get('schema', {}))}"
            for kind, content in answer.get("content", {}).items()
        )
        rows.append(f"<tr><td>{escape(str(status))}<td>{escape(answer.get('description', ''))}<td>{kinds}")
    return "".join(parts) + f"<table><tr><th>status<th>meaning<th>body{''.join(rows)}</table>"


def _render_schema(name: str, schema: dict[str, Any]) -> str:
    needed = set(schema.get("required", ()))
    rows = []
    for key, about in schema.get("properties", {}).items():
        default = f"<code>{escape(json.dumps(about['default']))}</code>" if "default" in about else ""
        default_text = "required" if key in needed else default
        words = escape(about.get("description", ""))
        rows.append(f"<tr><td><code>{escape(key)}</code><td>{_name_type(about)}<td>{default_text}<td>{words}")
    words = escape(schema.get("description", ""))
    table = f"<table><tr><th>field<th>type<th>default<th>meaning{''.join(rows)}</table>" if rows else ""
    return f"<h2 id='{escape(name)}'>{escape(name)}</h2><p>{words}</p>{table}"


def _name_type(schema: dict[str, Any], depth: int = 0) -> str:
    """Return a schema's type in a few words, with links to those that have a name."""
    if depth > _MOST_DEPTH:
        return "..."
    if reference := schema.get("$ref"):
        name = escape(str(reference).rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for key in ("anyOf", "oneOf", "allOf"):
        if choices := schema.get(key):
            return " or ".join(_name_type(choice, depth + 1) for choice in choices)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_name_type(schema.get('items', {}), depth + 1)}"
    return escape(str(schema.get("type", "any")))
