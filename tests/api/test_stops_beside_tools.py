"""Stop strings and stop tokens beside tools, at every door, streamed and whole: calls are never cut by a stop string,
and a call that something else cut is never told as one that may be run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.api.support import EOS, ScriptedControl, app_over, serving
from tests.api.test_tools import CITY, WEATHER, answering, check_text

PARIS = WEATHER.replace("Oslo", "Paris")
SAID = f"It rains.\n{PARIS}\n{PARIS}\nThat is Paris, STOP, all"
DOORS = ("chat", "responses", "messages")
WHOLE = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}
CUT = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}


class Told(NamedTuple):
    """What a client is told."""

    content: str
    calls: list[str]
    ended: str
    stopped_by: Any


def build_body(door: str, choice: str, stop: list[str] | None, stream: bool, more: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"name": "get_weather", "description": "Weather"}
    body: dict[str, Any] = {"model": "toy", "stream": stream, **more}
    messages = [{"role": "user", "content": "x"}]
    if door == "messages":
        choices = {
            "required": {"type": "any"},
            "auto": {"type": "auto"},
            "named": {"type": "tool", "name": about["name"]},
        }
        tool = about | {"input_schema": CITY}
        asked = {"max_tokens": 400, "messages": messages, "tools": [tool], "tool_choice": choices[choice]}
        return body | asked | ({"stop_sequences": stop} if stop else {})
    function: dict[str, Any] = about | {"parameters": CITY}
    if door == "responses":
        named: Any = {"type": "function", "name": about["name"]}
        tools, asked = [{"type": "function", **function}], {"input": "x"}
    else:
        named = {"type": "function", "function": {"name": about["name"]}}
        tools, asked = [{"type": "function", "function": function}], {"messages": messages}
    asked |= {"tools": tools, "tool_choice": named if choice == "named" else choice}
    return asked | body | ({"stop": stop} if stop else {})


async def ask(
    control: ScriptedControl, choice: str, stop: list[str] | None = None, doors: tuple[str, ...] = DOORS, **more: Any
) -> Iterator[tuple[str, Told]]:
    """Ask at every door, whole and streamed. Gives the door and what was told."""
    found = []
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        for door, stream in itertools.product(doors, (False, True)):
            route = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}[door]
            answer = await client.post(route, json=build_body(door, choice, stop, stream, more))
            assert answer.status_code == 200, answer.text
            if stream:
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
                found.append((door, read_events(door, [json.loads(line) for line in lines if line != "[DONE]"])))
            else:
                found.append((door, read_whole(door, answer.json())))
    return iter(found)


def read_whole(door: str, body: dict[str, Any]) -> Told:
    if door == "chat":
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        return Told(message["content"] or "", calls, choice["finish_reason"], choice["stop_reason"])
    if door == "responses":
        content = "".join(
            part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
        )
        items = [item for item in body["output"] if item["type"] == "function_call"]
        assert body["status"] == "completed" or all(item["status"] != "in_progress" for item in items)
        return Told(content, [item["arguments"] for item in items], body["status"], None)
    content = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    calls = [json.dumps(block["input"]) for block in body["content"] if block["type"] == "tool_use"]
    return Told(content, calls, body["stop_reason"], body["stop_sequence"])


def read_events(door: str, events: list[dict[str, Any]]) -> Told:
    if door == "responses":
        told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        whole = read_whole(door, events[-1]["response"])
        assert told == whole.content
        assert events[-1]["type"] == f"response.{whole.ended}"
        return whole
    content, calls, ended, stopped_by = "", list[str](), "", None
    for event in events:
        if door == "messages":
            delta = event.get("delta", {})
            content += delta.get("text", "")
            calls += [""] if event.get("content_block", {}).get("type") == "tool_use" else []
            if "partial_json" in delta:
                calls[-1] += delta["partial_json"]
            ended, stopped_by = delta.get("stop_reason", ended), delta.get("stop_sequence", stopped_by)
            continue
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                calls += [""] * (call["index"] + 1 - len(calls))
                calls[call["index"]] += call["function"]["arguments"]
            ended, stopped_by = choice["finish_reason"] or ended, choice.get("stop_reason", stopped_by)
    return Told(content, calls, ended, stopped_by)


@pytest.mark.parametrize("choice", ["named", "auto"])
@pytest.mark.parametrize("stop", [["Paris"], ["\n"], ["<tool_call>"], ['"', "}", "</tool"], ["city"]])
async def test_a_stop_string_within_a_call_ends_nothing(choice, stop):
    for door, told in await ask(answering(PARIS, each=7), choice, stop):
        assert told == Told("", ['{"city": "Paris"}'], WHOLE[door], None)


@pytest.mark.parametrize(
    ("stop", "content", "calls"),
    [
        (["rains"], "It ", 0),  # before the calls
        (["STOP"], "It rains.That is Paris, ", 2),  # behind them
        (["Paris", "STOP"], "It rains.That is ", 2),  # in calls and behind them
        (["\n"], "It rains.That is Paris, STOP, all", 2),  # white space around calls is no content
        ([".T"], "It rains.That is Paris, STOP, all", 2),  # no stop string reaches over a call
    ],
)
async def test_text_outside_of_calls_is_cut(stop, content, calls):
    for door, told in await ask(answering(SAID, each=5), "auto", stop):
        assert (told.content, len(told.calls)) == (content, calls)
        assert all(json.loads(call) == {"city": "Paris"} for call in told.calls)
        if calls:
            assert told.ended == WHOLE[door]
        else:
            assert told.ended == {"chat": "stop", "responses": "completed", "messages": "stop_sequence"}[door]
            assert told.stopped_by == (None if door == "responses" else stop[0])


async def test_a_stop_string_that_begins_within_min_tokens_ends_the_text_at_every_door():
    for door, told in await ask(answering("say END now", each=4), "auto", ["END"], min_tokens=5):
        assert told.content == "say "
        assert told.ended == {"chat": "stop", "responses": "completed", "messages": "stop_sequence"}[door]
    for _, told in await ask(answering("say END now", each=4), "auto", ["END"], min_tokens=7):
        assert told.content == "say END now"


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("end", [5, 20, PARIS.index("Paris") + 2, PARIS.index("}}") + 1])
@pytest.mark.parametrize("finish", ["stop", "length", "deadline"])
async def test_a_call_that_is_cut_is_never_told_as_one(choice, end, finish):
    """By a token of `stop_token_ids`, by `max_tokens`, or by the deadline."""
    control = answering(f"{PARIS[:end]}Z" if finish == "stop" else PARIS[:end], finish=finish)
    more: Any = {"stop_token_ids": [ord("Z")]} if finish == "stop" else {}
    begun, whole = end > PARIS.index('{"city"'), end > PARIS.index("}}")
    for door, told in await ask(control, choice, None, **more):
        assert told.content == ""
        assert len(told.calls) == begun
        if whole and finish == "stop":
            assert (told.ended, told.calls) == (WHOLE[door], ['{"city": "Paris"}'])
        elif finish == "length" and door == "messages":
            assert told.ended == "model_context_window_exceeded"
        else:
            assert told.ended == CUT[door]


async def test_a_call_that_the_model_itself_leaves_open_is_not_told_as_one():
    for door, told in await ask(answering(PARIS[: PARIS.index("Paris")]), "auto"):
        assert told.ended == CUT[door]
        assert told.stopped_by == ("unfinished_call" if door == "chat" else None)


async def test_a_stop_string_that_is_a_control_token_is_that_token():
    control = answering("")
    control.steps = [[*b"It rains.", 257]]
    for door, told in await ask(control, "auto", ["nothing", "<|start|>"]):
        assert 257 in control.submits[-1].stop_tokens
        assert told.content == "It rains."
        assert told.stopped_by == (None if door == "responses" else "<|start|>")


async def test_what_merely_has_a_control_token_in_it_is_text():
    control = answering("x")
    await ask(control, "auto", ["a<|start|>", "<|start", "<|end|> "], ("chat",))
    assert control.submits[0].stop_tokens == [EOS]


@pytest.mark.parametrize("strict", [False, True])
async def test_ignore_eos_beside_a_strict_tool_goes_on(strict):
    control = answering("x")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": strict}}
    await ask(control, "auto", None, ("chat",), tools=[tool], ignore_eos=True, logit_bias={"65": 5})
    submit = control.submits[0]
    assert submit.stop_tokens == []
    bias = dict(submit.sampling.logit_bias)
    assert bias[65] == 5
    assert (bias.get(EOS, 0.0) < -1e6) == strict
    if submit.grammar is not None:
        assert check_text(submit.grammar, "any text ") == (True, True)  # which is why the bias is needed
