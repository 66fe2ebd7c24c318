"""The served OpenAPI document is true: schemathesis sends what it allows and what it does not, and believes no 5xx."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from orchestrator.daemon.api.openapi import _add_schema, operation
from tests.api.support import ScriptedControl, app_over
from tests.support.daemon import Daemon, configuration, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DOCUMENT = app_over(ScriptedControl()).openapi()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("openapi"))) as started:
        yield started
        assert '"request failed"' not in started.log.read_text()
        assert started.stop() == 0


@pytest.fixture(scope="module")
def served(daemon) -> Any:
    return schemathesis.openapi.from_url(f"{daemon.url}/openapi.json")


def test_the_served_document_is_the_app_s(daemon):
    assert httpx.get(f"{daemon.url}/openapi.json").json() == DOCUMENT


def test_two_schemas_of_one_name_are_refused():
    schemas = DOCUMENT["components"]["schemas"]
    parts = [schemas[name]["properties"] for name in ("Message", "SaidMessage")]
    assert ["tool_calls" in one for one in parts] == [True, False]
    other = type("ChatRequest", (BaseModel,), {})
    with pytest.raises(ValueError, match=r"two models are named ChatRequest: in orchestrator\.daemon\.api\.wire and "):
        operation(other, None)
    with pytest.raises(ValueError, match="two schemas of the OpenAPI document are named Message"):
        _add_schema(dict(schemas), "Message", schemas["SaidMessage"])


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_brings_it_down_and_every_answer_is_as_described(served, path, method, mode):
    operation = served[path][method.upper()]
    if mode is GenerationMode.NEGATIVE and "requestBody" not in DOCUMENT["paths"][path][method]:
        return  # there is nothing that could be wrong
    statuses = set()

    @seed(7)
    @settings(
        max_examples=25 if path in GENERATES else 8,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and path in BODIES:
            # What no schema can say is made right, so that the rest is looked at.
            known = {"model": "toy"} | (ENOUGH if path in GENERATES else {})
            case.body |= BODIES[path](case.body) if mode is GenerationMode.POSITIVE else known
        response = case.call(timeout=20)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    check()
    # Nobody guesses the name of a model, a file, a batch or a response.
    if mode is GenerationMode.POSITIVE and "{" not in path and (path, method) != ("/v1/batches", "post"):
        assert 200 in statuses


def plain_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages that say something, in parts that their role may have."""
    said = [message for message in body.get("messages") or [] if not message.get("tool_calls")]
    for message in said:
        parts = message.get("content")
        if not parts or (isinstance(parts, list) and {part.get("type") for part in parts} != {"text"}):
            message["content"] = "x"
    return said


ENOUGH = {"timeout_s": None}  # no time at all is a 504, and rightly so
BODIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/v1/completions": lambda body: {
        "model": "toy",
        "prompt": str(body.get("prompt")) or "x",
        "max_tokens": 9,
        **ENOUGH,
    },
    "/v1/chat/completions": lambda body: {
        "model": "toy",
        "messages": plain_messages(body) or [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "chat_template_kwargs": None,
        **ENOUGH,
    },
    "/v1/responses": lambda body: {
        "model": "toy",
        "input": str(body.get("input")) or "x",
        "max_output_tokens": 9,
        **dict.fromkeys(("previous_response_id", "tool_choice", "include", "text", "chat_template_kwargs"), None),
        **ENOUGH,
    },
    "/v1/responses/input_tokens": lambda body: {
        "model": "toy",
        "input": str(body.get("input")) or "x",
        **dict.fromkeys(("previous_response_id", "tool_choice", "include", "text", "chat_template_kwargs"), None),
    },
    "/v1/messages": lambda body: {
        "model": "toy",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        **dict.fromkeys(("tool_choice", "output_config", "output_format", "chat_template_kwargs"), None),
        **ENOUGH,
    },
    "/v1/messages/count_tokens": lambda body: {"model": "toy", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": lambda body: {"model": None, "messages": None, "prompt": body.get("prompt") or ""},
    "/detokenize": lambda body: {"model": None, "tokens": [abs(token) % 272 for token in body.get("tokens") or []]},
}
