"""Deltas to chunks: one synchronous object, whatever the split, whichever API, streamed and whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.daemon.api.answer_stream import AnswerAssembler
from orchestrator.daemon.api.doors.messages.writer import MessageWriter
from orchestrator.daemon.api.follow import RequestRecord
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.question import AnswerHead, AnswerSource, AnswerWriter
from orchestrator.daemon.api.responses import Envelope
from orchestrator.daemon.api.streaming import Answer, Choice, TextAssembler
from orchestrator.daemon.api.wire import ChatRequest, StreamOptions
from orchestrator.errors import RequestError
from orchestrator.protocol.rounds import Delta, RequestStats
from tests.api.support import TOKENIZER, ScriptedControl, app_over, client_of

HEAD = AnswerHead("r", 0, "toy", [[1]], lambda _engine, _group: AnswerSource(None, ""), "coupled", TOKENIZER)
CHAT = ChatRequest.model_validate({"model": "toy", "messages": [{"role": "user", "content": "x"}]})
STATS = RequestStats(1, 5, 4, 6, 3, 1.0, 2.0, 0, -1.0)


def build_chat_writer() -> Envelope:
    return Envelope("chat", HEAD, StreamOptions(), each=3)


def build_message_writer() -> MessageWriter:
    return MessageWriter(HEAD, CHAT)


def build_assembler(
    writer: AnswerWriter, choices: int, *, stream: bool, stops: tuple[str, ...] = ()
) -> AnswerAssembler:
    clock = SystemClock()
    parts = [Choice(index, TextAssembler(TOKENIZER.decoder(), stops), Answer(0.0)) for index in range(choices)]
    return AnswerAssembler(
        writer, parts, RequestRecord(Metrics(ScriptedControl(), clock), clock, 0.0), clock, stream=stream
    )


def split(text: str, sizes: list[int]) -> list[Delta]:
    """Return a text as deltas of so many tokens, a token each byte; the last has the rest, and the end."""
    tokens, deltas = list(text.encode()), list[Delta]()
    for size in sizes:
        deltas.append(Delta("r", tokens[:size]))
        tokens = tokens[size:]
    return [*deltas, Delta("r", tokens, "length", STATS)]


def read_chat(chunks: list[bytes]) -> dict[int, str]:
    """Return the text of each choice, as its client reads it."""
    texts: dict[int, str] = {}
    for line in b"".join(chunks).decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts


TEXTS = st.lists(st.text(alphabet="ab€😀\n", min_size=1, max_size=12), min_size=1, max_size=3)


@given(TEXTS, st.data())
def test_a_stream_says_what_the_whole_answer_says_however_deltas_come(texts, data):
    sizes = st.lists(st.integers(0, 5), max_size=6)
    left = [(index, split(text, data.draw(sizes))) for index, text in enumerate(texts)]
    streamed = build_assembler(build_chat_writer(), len(texts), stream=True, stops=("ab",))
    whole = build_assembler(build_chat_writer(), len(texts), stream=False, stops=("ab",))
    chunks: list[bytes] = []
    while left:
        number = data.draw(st.integers(0, len(left) - 1))
        index, deltas = left[number]
        delta = deltas.pop(0)
        chunks.append(streamed.push(index, delta))
        assert whole.push(index, delta) == b""
        assert streamed.is_over(index) == whole.is_over(index)
        if streamed.is_over(index):
            left.pop(number)
    chunks.append(streamed.finish())
    choices = json.loads(whole.finish())["choices"]
    said = {choice["index"]: choice["message"]["content"] for choice in choices}
    assert said == read_chat(chunks) == {index: text.partition("ab")[0] for index, text in enumerate(texts)}


@pytest.mark.parametrize("build", [build_chat_writer, build_message_writer])
@pytest.mark.parametrize("opened", [False, True])
def test_an_error_ends_a_stream_in_the_form_of_its_api(build: Callable[[], Any], opened: bool):
    assembler = build_assembler(build(), 1, stream=True)
    if opened:
        assert assembler.push(0, Delta("r", list(b"a"))) != b""
    assert assembler.opened == opened
    assert b"gone" in assembler.fail(RequestError("gone", status=503))


def test_what_is_not_certain_yet_opens_nothing():
    assembler = build_assembler(build_chat_writer(), 1, stream=True, stops=("ab",))
    assert assembler.push(0, Delta("r", list(b"a"))) == b""
    assert not assembler.opened
    assert read_chat([assembler.push(0, Delta("r", list(b"c"))), assembler.finish()]) == {0: "ac"}


async def test_a_plain_chat_passes_one_async_generator():
    begun: list[str] = []
    hooks = sys.get_asyncgen_hooks()

    def note(generator: Any) -> None:
        path = generator.ag_code.co_filename
        if "/orchestrator/" in path or path.endswith("tests/api/support.py"):
            begun.append(generator.ag_code.co_name)
        if hooks.firstiter is not None:
            hooks.firstiter(generator)

    async with client_of(app_over(ScriptedControl())) as client:
        begun.clear()
        sys.set_asyncgen_hooks(firstiter=note)
        try:
            messages: Any = [{"role": "user", "content": "x"}]
            chunks = await client.chat.completions.create(model="toy", messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        finally:
            sys.set_asyncgen_hooks(firstiter=hooks.firstiter)
    assert text == "hello"
    begun.remove("beside")  # what fills silences: no delta and no chunk passes it
    assert begun == ["generate"]
