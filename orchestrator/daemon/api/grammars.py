"""The grammar of a request's answer, from its tools and its response format. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.daemon.api.schemas.prepare import PreparedSchema, prepare_schema
from orchestrator.daemon.api.schemas.walk import Node, SchemaRefused
from orchestrator.daemon.api.tools.grammar import build_calls_or_json_grammar, build_forced_calls_grammar, free_calls
from orchestrator.daemon.api.tools.wire import Tool
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Grammar


@dataclass(frozen=True, slots=True)
class WrittenGrammar:
    """The grammar of an answer; None of one that may be anything. `warnings`: what of the schemas it does not keep."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


def write_grammar(
    request: CompletionRequest | ChatRequest, most_bytes: int, answer_param: str = "response_format"
) -> WrittenGrammar:
    """Return the grammar that a request asks for. `answer_param`: what its route calls 'response_format'. Raises
    RequestError for schemas of more than `most_bytes`, and for one that cannot be kept to."""
    _refuse_large(request, most_bytes, answer_param)
    answer = _prepare_answer(request, answer_param)
    if not isinstance(request, ChatRequest) or not request.offered:
        return WrittenGrammar() if answer is None else _write("json_schema", json.dumps(answer.schema), [answer])
    many = request.parallel_tool_calls
    if request.forced:
        bound = _prepare_tools(_list_bound(request))
        many = many and request.tool_choice == "required"
        text = build_forced_calls_grammar(request.forced, _schemas(bound), many=many)
        return _write("lark", text, list(bound.values()))
    bound = _prepare_tools(_list_bound(request))
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


def describe_size(what: str, size: int, most_bytes: int, param: str) -> RequestError:
    """Return what refuses a schema or a grammar that is larger than the operator takes."""
    return RequestError(
        f"the {what} has {size} bytes; {most_bytes} are taken: send a smaller one, or ask the operator "
        "for a larger limits.max_grammar",
        code="schema_too_large",
        param=param,
    )


def _refuse_large(request: CompletionRequest | ChatRequest, most_bytes: int, answer_param: str) -> None:
    """Bound what is prepared as what comes of it is bounded."""
    answer = _find_answer(request)
    tools = _list_bound(request) if isinstance(request, ChatRequest) else []
    for what, param, schemas in (
        ("schema", answer_param, [] if answer is None else [answer]),
        ("grammar", "tools", [tool.function.schema_of_arguments for tool in tools]),
    ):
        try:
            size = sum(len(json.dumps(schema)) for schema in schemas)
        except ValueError:  # a number of thousands of digits, which is refused in its own words
            continue
        if size > most_bytes:
            raise describe_size(what, size, most_bytes, param)


def _list_bound(request: ChatRequest) -> Sequence[Tool]:
    """Return the tools whose arguments have to keep to their schemas."""
    return request.forced or [tool for tool in request.offered if tool.function.strict]


def _find_answer(request: CompletionRequest | ChatRequest) -> Node | None:
    return request.response_format.wanted_schema if request.response_format is not None else None


def _prepare_answer(request: CompletionRequest | ChatRequest, param: str) -> PreparedSchema | None:
    schema = _find_answer(request)
    if schema is None:
        return None
    return _prepare(schema, f"'{param}'", f"the schema of '{param}'", param)


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
        prepared = prepare_schema(schema, objects=objects)
    except SchemaRefused as error:
        raise RequestError(f"{long} cannot be used: {error}", param=param, code="unsupported_schema") from None
    return PreparedSchema(prepared.schema, tuple(f"{short}: {warning}" for warning in prepared.warnings))
