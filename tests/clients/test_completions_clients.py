"""What `openai` 1 and 3, LangChain's `OpenAI` and lm-evaluation-harness sent, as it was recorded: each is answered,
whole and streamed, in the form that its client reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.support.daemon import Daemon, configuration, running

RECORDED = Path(__file__).parent / "recorded" / "exchanges"


def list_requests() -> list[Any]:
    """Every recorded request, named by its client."""
    return [
        pytest.param(request, id=f"{path.stem}-{request['name']}")
        for path in sorted(RECORDED.glob("*.json"))
        for request in json.loads(path.read_text(encoding="utf-8"))["requests"]
    ]


REQUESTS = list_requests()
GENERATED = [one for one in REQUESTS if one.values[0]["path"].startswith("/v1/") and one.values[0]["body"]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running(configuration(tmp_path_factory.mktemp("clients"))) as found:
        yield found


def send(daemon: Daemon, request: dict[str, Any], **fields: Any) -> httpx.Response:
    """Send a recorded request, with other fields in its body."""
    body = request["body"]
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        return client.request(
            request["method"],
            request["path"],
            headers=request["headers"],
            content=None if body is None else json.dumps(body | fields),
        )


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events, [DONE] left out."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_was_recorded_is_taken(daemon: Daemon, request_: dict[str, Any]):
    answer = send(daemon, request_)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("request_", GENERATED)
def test_whole_and_streamed_are_one_answer(daemon: Daemon, request_: dict[str, Any]):
    whole = send(daemon, request_, stream=False, seed=7)  # some send none
    events = read_events(send(daemon, request_, stream=True, seed=7))
    assert whole.status_code == 200, whole.text
    match request_["path"]:
        case "/v1/completions":
            check_completion(request_["body"], whole.json(), events)
        case "/v1/chat/completions":
            check_chat(request_["body"], whole.json(), events)
        case "/v1/responses":
            check_response(request_["body"], whole.json(), events)


def check_completion(body: dict[str, Any], whole: dict[str, Any], events: list[dict[str, Any]]) -> None:
    found = Completion.construct(**whole)  # as the client does: its types know no first token without a score
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    count = len(prompts) * body.get("n", 1)
    assert [choice.index for choice in found.choices] == list(range(count))
    texts = dict.fromkeys(range(count), "")
    for event in events:
        for choice in Completion.construct(**event).choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in found.choices]
    assert isinstance(found.usage, CompletionUsage)


def check_chat(body: dict[str, Any], whole: dict[str, Any], events: list[dict[str, Any]]) -> None:
    found = ChatCompletion.model_validate(whole, strict=True).choices[0]
    text, arguments = "", ""
    for event in events:
        for choice in ChatCompletionChunk.model_validate(event).choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                arguments += (call.function.arguments if call.function is not None else None) or ""
    assert text == (found.message.content or "")
    calls: list[Any] = found.message.tool_calls or []
    assert arguments == "".join(call.function.arguments for call in calls)
    if body.get("tool_choice", "auto") != "auto":
        (tool,) = body["tools"]
        assert found.finish_reason in ("tool_calls", "length")
        for call in calls if found.finish_reason == "tool_calls" else calls[:-1]:
            assert call.function.name == tool["function"]["name"]
            jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
    elif "response_format" in body:
        jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])


def check_response(body: dict[str, Any], whole: dict[str, Any], events: list[dict[str, Any]]) -> None:
    found = Response.model_validate(whole)
    last = Response.model_validate(events[-1]["response"])
    assert last.output_text == found.output_text
    assert [one.type for one in last.output] == [one.type for one in found.output]
    if body.get("tool_choice", "auto") == "required":
        for call in found.output:
            assert call.type == "function_call"
            jsonschema.validate(json.loads(call.arguments), body["tools"][0]["parameters"])
    elif "schema" in body.get("text", {}).get("format", {}):
        jsonschema.validate(json.loads(found.output_text), body["text"]["format"]["schema"])


def list_scored() -> list[Any]:
    """What the harness sent to have texts scored."""
    return [one for one in GENERATED if one.values[0]["body"].get("echo") and "lm-eval" in (one.id or "")]


@pytest.mark.parametrize("request_", list_scored())
def test_the_harness_can_count_tokens_from_both_ends(daemon: Daemon, request_: dict[str, Any]):
    """`parse_logprobs` of lm_eval takes the scores from the context's length up to the last but one."""
    prompts = request_["body"]["prompt"]
    choices = sorted(send(daemon, request_).json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for ids, choice in zip(prompts, choices, strict=True):
        scores, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(scores) == len(top) == len(ids) + 1
        assert all(math.isfinite(score) and score <= 0 for score in scores[1:])
        assert all(max(each.values()) >= score for score, each in zip(scores[1:], top[1:], strict=True))


def test_the_harness_finds_its_tokenizer(daemon: Daemon):
    """As `RemoteTokenizer` of lm_eval: it asks for /tokenizer_info first, and encodes the special tokens it finds."""
    with httpx.Client(base_url=daemon.url) as client:
        told = client.get("/tokenizer_info").json()
        assert told["chat_template"]
        assert told["bos_token"] is None
        encoded = client.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()
        assert len(encoded["tokens"]) == 1
        decoded = client.post("/detokenize", json={"tokens": encoded["tokens"]}).json()
        assert decoded["prompt"] == told["eos_token"]
        assert told["model_max_length"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert client.get("/tokenizer_info", params={"model": "nobody"}).status_code == 404
        assert client.get("/tokenizer_info", params={"model": "toy"}).json() == told
