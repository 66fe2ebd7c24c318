"""The grammar of a request's answer, from its tools and its response format. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.api.schemas.prepare import PreparedSchema, prepare_schema
from orchestrator.api.schemas.walk import Node, SchemaRefused
from orchestrator.api.tools.grammar import build_calls_or_json_grammar, build_forced_calls_grammar, free_calls
from orchestrator.api.tools.wire import Tool
from orchestrator.api.wire import ChatRequest, CompletionRequest
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Grammar


@dataclass(frozen=True, slots=True)
class WrittenGrammar:
    """The grammar of an answer; None of one that may be anything. `warnings`: what of the schemas it does not keep."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


def write_grammar(request: CompletionRequest | ChatRequest) -> WrittenGrammar:
    """Return the grammar that a request asks for. Raises RequestError for a schema that cannot be kept to."""
    answer = _prepare_answer(request)
    if not isinstance(request, ChatRequest) or not request.offered:
        return WrittenGrammar() if answer is None else _write("json_schema", json.dumps(answer.schema), [answer])
    many = request.parallel_tool_calls
    if request.forced:
        bound = _prepare_tools(request.forced)
        many = many and request.tool_choice == "required"
        text = build_forced_calls_grammar(request.forced, _schemas(bound), many=many)
        return _write("lark", text, list(bound.values()))
    bound = _prepare_tools([tool for tool in request.offered if tool.function.strict])
    if answer is not None:
        text = build_calls_or_json_grammar(request.offered, _schemas(bound), answer.schema, many=many)
        return _write("lark", text, [answer, *bound.values()])
    if bound:
        return _write("lark", free_calls(request.offered, _schemas(bound), many=many), list(bound.values()))
    return WrittenGrammar()


def _write(kind: Literal["json_schema", "lark"], text: str, schemas: Sequence[PreparedSchema]) -> WrittenGrammar:
    return WrittenGrammar(Grammar(kind, text), tuple(warning for schema in schemas for warning in schema.warnings))


def _schemas(bound: dict[str, PreparedSchema]) -> dict[str, Node]:
    return {name: prepared.schema for name, prepared in bound.items()}


def _prepare_answer(request: CompletionRequest | ChatRequest) -> PreparedSchema | None:
    schema = request.response_format.wanted_schema if request.response_format is not None else None
    if schema is None:
        return None
    return _prepare(schema, "'response_format'", "the schema of 'response_format'", "response_format")


def _prepare_tools(tools: Sequence[Tool]) -> dict[str, PreparedSchema]:
    """Return what the arguments of tools must be, by their names: an object, whatever else a schema allows."""
    return {
        name: _prepare(
            function.schema_of_arguments, f"tool '{name}'", f"the schema of the tool '{name}'", "tools", True
        )
        for name, function in ((tool.function.name, tool.function) for tool in tools)
    }


def _prepare(schema: Node, short: str, long: str, param: str, objects: bool = False) -> PreparedSchema:
    try:
        found = prepare_schema(schema, objects=objects)
    except SchemaRefused as error:
        raise RequestError(f"{long} cannot be used: {error}", param=param, code="unsupported_schema") from None
    return PreparedSchema(found.schema, tuple(f"{short}: {warning}" for warning in found.warnings))
