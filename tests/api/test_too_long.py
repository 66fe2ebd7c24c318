"""What does not fit the context, in the words by which clients know it: they shorten the conversation and go on."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from orchestrator.daemon.api.doors.signatures import sign_thought
from orchestrator.errors import ContextExceeded
from tests.api.support import CONTEXT_TOKENS, ScriptedControl, app_over, serving

FITS_NOT = "x" * 80
FAR_TOO_LARGE = "x" * 20_000  # seen by its bytes, before the body is parsed
OPENAI = re.compile(r"This model's maximum context length is (\d+) tokens\. However, .*context_length_exceeded")
ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


def say(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def refuse(path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json={"model": "toy"} | body)
    assert answer.status_code == 400
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize("text", [FITS_NOT, FAR_TOO_LARGE], ids=["counted", "by-its-bytes"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
    ],
)
async def test_too_long_a_prompt_is_told_in_openais_words(path: str, param: str, text: str, *, stream: bool):
    body = say(text) if param == "messages" else {param: text}
    error = await refuse(path, body | {"stream": stream})
    found = OPENAI.match(error["message"])
    assert found is not None, error["message"]
    assert int(found[1]) == CONTEXT_TOKENS
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"'{param}'" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "bound"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 90}, "max_tokens"),
        ("/v1/chat/completions", say("x") | {"max_tokens": 90}, "max_tokens"),
        ("/v1/chat/completions", say("x") | {"max_completion_tokens": 90}, "max_completion_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 90}, "max_output_tokens"),
    ],
)
async def test_too_long_an_answer_is_told_in_the_same_words(path: str, body: dict[str, Any], bound: str):
    error = await refuse(path, body)
    assert OPENAI.match(error["message"]), error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", bound)
    found = re.search(r"(\d+) in '.*', and 90 by '(\w+)', which may be (\d+) at most", error["message"])
    assert found is not None
    assert found[2] == bound
    assert int(found[1]) + int(found[3]) == CONTEXT_TOKENS


async def test_too_long_a_prediction_is_told_in_the_same_words():
    error = await refuse("/v1/chat/completions", say("x") | {"prediction": {"type": "content", "content": FITS_NOT}})
    assert OPENAI.match(error["message"]), error["message"]
    assert error["param"] == "prediction"


@pytest.mark.parametrize("text", [FITS_NOT, FAR_TOO_LARGE], ids=["counted", "by-its-bytes"])
@pytest.mark.parametrize("where", ["messages", "system"])
@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_prompt_is_told_in_anthropics_words(text: str, where: str, *, stream: bool):
    body = say(text) if where == "messages" else say("x") | {"system": text}
    error = await refuse("/v1/messages", body | {"max_tokens": 8, "stream": stream})
    found = ANTHROPIC.fullmatch(error["message"])
    assert found is not None, error["message"]
    assert int(found[1]) > int(found[2]) == CONTEXT_TOKENS - 1
    assert error["type"] == "invalid_request_error"


async def test_counting_what_is_far_too_long_is_told_in_anthropics_words():
    error = await refuse("/v1/messages/count_tokens", say(FAR_TOO_LARGE))
    assert ANTHROPIC.fullmatch(error["message"]), error["message"]


async def test_too_long_a_thought_is_seen_in_its_signature():
    thought = {"type": "thinking", "thinking": "", "signature": sign_thought(FAR_TOO_LARGE)}
    messages = [*say("x")["messages"], {"role": "assistant", "content": [thought]}, *say("y")["messages"]]
    error = await refuse("/v1/messages/count_tokens", say("x") | {"messages": messages})
    assert ANTHROPIC.fullmatch(error["message"]), error["message"]


async def test_a_prompt_that_fills_the_context_leaves_no_answer():
    error = await refuse("/v1/completions", {"prompt": "x" * CONTEXT_TOKENS})
    assert "an answer needs one more" in error["message"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "words"), [("/v1/chat/completions", OPENAI), ("/v1/completions", OPENAI), ("/v1/messages", ANTHROPIC)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_worker_cannot_hold_is_told_in_those_words(path: str, words: re.Pattern[str], *, stream: bool):
    control = ScriptedControl(error=ContextExceeded(7, 6, param=None, wanted_tokens=9))
    body = {"prompt": "x"} if path == "/v1/completions" else say("x")
    body |= {"model": "toy", "max_tokens": 9, "stream": stream}
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert words.match(answer.json()["error"]["message"]), answer.text
