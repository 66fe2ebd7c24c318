"""One request against servers that are not ours: what each does with the stream is seen, counted and never guessed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from outrider_lab.bench.traffic.client import Endpoint, open_client, send_request
from outrider_lab.bench.traffic.outcome import Outcome

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
HANG = b"hang"


def event(json: str) -> bytes:
    return f"data: {json}\n\n".encode()


def chat(text: str, finish: str = "null") -> bytes:
    return event(f'{{"choices":[{{"delta":{{"content":"{text}"}},"finish_reason":{finish}}}]}}')


@asynccontextmanager
async def foreign(parts: Sequence[bytes]) -> AsyncIterator[str]:
    """A server that writes these bytes, 20 ms apart, to whoever asks, and hangs up. It never says `length`."""

    answering: set[asyncio.Task[object]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())  # type: ignore[arg-type]  # there is one here
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                if part == HANG:
                    await asyncio.sleep(30.0)
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()
            with suppress(ConnectionError):  # the client may have gone first
                await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


async def measure_parts(parts: Sequence[bytes], kind: str = "chat", timeout_s: float = 5.0) -> Outcome:
    outcome = Outcome("k", "c")
    began_s = time.perf_counter()
    async with foreign(parts) as url, open_client() as client:
        endpoint = Endpoint(url, "m", kind)  # type: ignore[arg-type]
        payload = endpoint.payload("hello", {"max_tokens": 3})
        await send_request(client, endpoint, payload, outcome, timeout_s, lambda: time.perf_counter() - began_s)
    return outcome


async def test_tokens_are_those_of_the_usage_not_those_of_the_events():
    outcome = await measure_parts(
        [
            OK,
            b": a comment\n\n",
            event('{"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}]}'),
            chat("a b c ") + chat("d"),
            chat("", '"stop"'),
            event('{"choices":null,"usage":{"prompt_tokens":7,"completion_tokens":9}}'),
            DONE,
        ]
    )
    assert (outcome.error, outcome.text, outcome.finish) == ("", "a b c d", "stop")
    assert (outcome.prompt_tokens, outcome.generated) == (7, 9)
    assert len(outcome.chunks_s) == 2
    assert outcome.ttft_s is not None
    assert outcome.ttft_s > 0.03  # the comment and the role are no content
    assert outcome.chunks_s[-1] < outcome.last_s < outcome.end_s  # the finish_reason, and then the rest
    assert outcome.tpot_s == pytest.approx((outcome.latency_s - outcome.ttft_s) / 8)


async def test_without_usage_there_is_no_count():
    outcome = await measure_parts([OK, chat("a"), chat("b", '"stop"'), DONE])
    assert outcome.error == ""
    assert outcome.generated is None
    assert outcome.tpot_s is None
    assert len(outcome.gaps_s) == 1


async def test_completions_reasoning_and_speculation_are_read():
    outcome = await measure_parts(
        [
            OK,
            event('{"choices":[{"text":"x","finish_reason":null}]}'),
            event(
                '{"choices":[],"usage":{"completion_tokens":4},"metrics":{"speculative_decoding":{"num_spec_steps":2,'
                '"num_draft_tokens":6,"num_accepted_draft_tokens":3,"draft_acceptance_rate":0.5}}}'
            ),
            DONE,
        ],
        kind="completions",
    )
    assert (outcome.text, outcome.drafted, outcome.accepted, outcome.steps) == ("x", 6, 3, 2)
    thought = await measure_parts([OK, event('{"choices":[{"delta":{"reasoning_content":"hm"}}]}'), DONE])
    assert thought.text == "hm"


async def test_text_with_odd_line_separators_is_one_event():
    outcome = await measure_parts([OK, chat("a\u2028b\x85c"), DONE])
    assert (outcome.error, outcome.text) == ("", "a\u2028b\x85c")


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([OK, chat("a"), chat("b", '"stop"')], "missing_done", "[DONE]"),
        ([OK.replace(b"Connection", b"Content-Length: 9999\r\nConnection"), chat("a")], "broken_stream", "closed"),
        ([OK, chat("a"), event("{"), DONE], "broken_stream", "truncated"),
        ([OK, event('{"choices":[{"delta":{"content":5}}]}'), DONE], "broken_stream", "content"),
        ([OK, event('{"error":{"message":"out of memory"}}'), DONE], "error_event", "out of memory"),
        ([OK.replace(b"text/event-stream", b"text/html"), b"<p>hello"], "not_a_stream", "text/html"),
        ([b""], "connection", "disconnected"),
        (
            [b'HTTP/1.1 429 No\r\nConnection: close\r\n\r\n{"error":{"message":"queue\\nfull"}}'],
            "status_429",
            "queue full",
        ),
        ([b"HTTP/1.1 502 Bad\r\nConnection: close\r\n\r\n<html>proxy"], "status_502", "<html>proxy"),
    ],
)
async def test_every_failure_has_its_kind(parts, kind, message):
    outcome = await measure_parts(parts)
    assert outcome.error == kind
    assert message in outcome.message
    assert "\n" not in outcome.message
    assert outcome.end_s >= outcome.last_s > 0.0


@pytest.mark.parametrize("parts", [[OK, chat("a"), HANG], [HANG], [OK.replace(b"200 OK", b"500 No"), HANG]])
async def test_a_server_that_hangs_is_a_timeout(parts):
    outcome = await measure_parts(parts, timeout_s=0.3)
    assert outcome.error == "timeout"
    assert outcome.end_s < 3.0


async def test_an_end_mark_is_the_end_however_the_connection_ends():
    closed = OK.replace(b"Connection", b"Content-Length: 9999\r\nConnection")
    outcome = await measure_parts([closed, chat("a"), DONE])
    assert outcome.error == ""


async def test_nobody_there_is_a_connection_error():
    outcome = Outcome("k", "c")
    async with open_client() as client:
        await send_request(
            client, Endpoint("http://127.0.0.1:1/v1", "m", "chat"), b"{}", outcome, 1.0, time.perf_counter
        )
    assert outcome.error == "connection"
