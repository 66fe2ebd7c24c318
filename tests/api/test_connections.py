"""Real sockets that are slow, idle or many: the service goes on for everybody else, and gives back what they held."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.config.model import Api
from orchestrator.daemon.api import connections
from orchestrator.daemon.api.answer_stream import EventStream, KeepAlive
from orchestrator.daemon.api.connections import Connections, raise_open_files
from orchestrator.daemon.api.listening import listen_tcp, serving
from orchestrator.errors import RequestError
from tests.api.support import ScriptedControl, app_over
from tests.support.waiting import until_async

ASK: dict[str, Any] = {"model": "toy", "prompt": "x"}
PATIENT = Api(max_connections=64, body_timeout_s=30.0, header_timeout_s=30.0, idle_timeout_s=30.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(ASK).encode()
WITHIN_S = 60.0
IDLE_S = 0.7


def limits_with(**changes: Any) -> Api:
    """Return patient limits with these changes."""
    return PATIENT.model_copy(update=changes)


@dataclass
class Served:
    """An app that is served: where, and the connections and tasks that tests have begun."""

    port: int
    opened: list[asyncio.StreamWriter] = field(default_factory=list)
    dripping: list[asyncio.Task[bytes]] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection; it is closed in the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened.append(writer)
        return reader, writer

    async def ask(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request, and read the head of its answer."""
        reader, writer = await self.connect()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer

    def drip(self, begin: bytes, rest: bytes) -> asyncio.Task[bytes]:
        """Send the beginning, then the rest byte by byte, slowly; gives what the server says before it closes."""
        self.dripping.append(asyncio.create_task(self._drip(begin, rest)))
        return self.dripping[-1]

    async def close(self) -> None:
        """Leave nothing open, whatever became of the test."""
        for task in self.dripping:
            task.cancel()
        await asyncio.gather(*self.dripping, return_exceptions=True)
        for writer in self.opened:
            writer.close()
        for writer in self.opened:
            with suppress(OSError):
                await writer.wait_closed()

    async def _drip(self, begin: bytes, rest: bytes) -> bytes:
        reader, writer = await self.connect()
        answer = asyncio.create_task(reader.read())
        writer.write(begin)
        try:
            for index in range(len(rest)):
                writer.write(rest[index : index + 1])
                await asyncio.wait({answer}, timeout=0.05)
                if answer.done():
                    break
            return await asyncio.wait_for(answer, WITHIN_S)
        finally:
            answer.cancel()


@asynccontextmanager
async def serve_watched(app: ASGIApp, limits: Api) -> AsyncIterator[tuple[Served, Connections, AsyncOpenAI]]:
    """Serve an app within limits; gives where it is, its connections and the real client for it."""
    watch = Connections(limits)
    with listen_tcp("127.0.0.1", 0) as tcp:
        served = Served(tcp.getsockname()[1])
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="unused", max_retries=0)
        async with serving(app, tcp, watch):
            try:
                async with client:
                    yield served, watch, client
            finally:
                await served.close()


@pytest.mark.parametrize(
    ("begin", "rest", "limits", "reason"),
    [
        (b"", HEAD * 10, limits_with(header_timeout_s=0.4), "head_timeout"),
        (
            HEAD + b"Content-Length: 1000\r\n\r\n",
            b'{"model": "toy", ' * 50,
            limits_with(body_timeout_s=0.4),
            "body_timeout",
        ),
    ],
)
async def test_who_sends_byte_by_byte_is_answered_408_and_nobody_else_waits(begin, rest, limits, reason):
    async with serve_watched(app_over(ScriptedControl()), limits) as (served, watch, client):
        slow = [served.drip(begin, rest) for _ in range(20)]
        await until_async(lambda: len(watch) > 0 or bool(watch.closed))  # on a machine that stood still, closed by now
        await client.completions.create(**ASK)
        for answer in await asyncio.gather(*slow):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert watch.closed == {reason: 20}
        await until_async(lambda: len(watch) <= 1)  # the client's own


class Small(ScriptedControl):
    """Has room for two."""

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        if self.view().streams + coming >= 2:
            raise RequestError("full", status=429, code="queue_full", retry_after_s=1)


async def test_who_sends_a_body_slowly_takes_nobodys_place():
    async with serve_watched(app_over(Small()), PATIENT) as (served, watch, client):
        for _ in range(10):
            _, writer = await served.connect()
            writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        await until_async(lambda: len(watch) == 10 and watch.idle == 0)
        await client.completions.create(**ASK)


async def test_a_connection_that_asks_nothing_is_closed_and_one_that_asks_is_kept():
    limits = limits_with(idle_timeout_s=IDLE_S)
    async with serve_watched(app_over(ScriptedControl()), limits) as (served, watch, _):
        silent, _ = await served.connect()
        reader, writer = await served.connect()
        first_s = last_s = time.monotonic()
        while last_s < first_s + 2 * IDLE_S:  # each answer begins the time anew
            asked_s = time.monotonic()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, OSError):
                assert time.monotonic() - last_s > IDLE_S  # the machine stood still
                break
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(int(line.split(b":")[1]) for line in head.splitlines() if b"content-length" in line.lower())
            await reader.readexactly(length)
            last_s = asked_s
            await asyncio.sleep(0.1)
        assert await asyncio.wait_for(silent.read(), WITHIN_S) == b""
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        assert watch.closed == {"idle_timeout": 2}


@dataclass
class Endless:
    """An app that answers with events for ever; `ended` once that was stopped."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(self, lambda: None, {}, KeepAlive(b"", 0.0))(scope, receive, send)

    async def read_chunk(self) -> bytes:
        await asyncio.sleep(0)
        return b"data: " + b"x" * 30_000 + b"\n\n"

    async def aclose(self) -> None:
        self.ended.set()


async def test_small_events_are_sent_at_once():
    async with serve_watched(app_over(ScriptedControl()), PATIENT) as (served, watch, _):
        await served.connect()
        await until_async(lambda: len(watch) == 1)
        (one,) = watch._open
        taken = one.transport.get_extra_info("socket")
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_reader_that_stops_reading_is_cut_and_its_request_ends():
    app = Endless()
    async with serve_watched(app, limits_with(write_timeout_s=0.5)) as (served, watch, _):
        _, writer = await served.ask(BODY)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(app.ended.wait(), WITHIN_S)
        assert watch.closed == {"write_timeout": 1}
        await until_async(lambda: len(watch) == 0)


async def test_a_reader_that_reads_slowly_is_served():
    app = Endless()
    async with serve_watched(app, limits_with(write_timeout_s=2.0)) as (served, watch, _):
        reader, _ = await served.ask(BODY)
        for _ in range(20):
            await reader.readexactly(200_000)
            await asyncio.sleep(0.02)
        assert watch.closed == {}
        assert not app.ended.is_set()


async def test_while_the_daemon_drains_such_a_reader_is_waited_for_less(monkeypatch):
    monkeypatch.setattr(connections, "_HURRIED_WRITE_S", 0.2)
    app = Endless()
    async with serve_watched(app, PATIENT) as (served, watch, _):
        _, writer = await served.ask(BODY)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        watch.hurry()
        await asyncio.wait_for(app.ended.wait(), WITHIN_S)  # half of what a reader has otherwise
        assert watch.closed == {"write_timeout": 1}


async def test_more_idle_connections_than_there_may_be_do_not_keep_anybody_out():
    async with serve_watched(app_over(ScriptedControl()), limits_with(max_connections=32)) as (
        served,
        watch,
        client,
    ):
        idle = [await served.connect() for _ in range(100)]
        for _ in range(5):
            await client.completions.create(**ASK)
        assert len(watch) <= 32
        assert watch.closed["shed"] >= 68
        oldest, newest = idle[0][0], idle[-1][0]
        assert await asyncio.wait_for(oldest.read(), WITHIN_S) == b""
        assert not newest.at_eof()


async def test_where_none_is_idle_a_new_connection_is_told_to_come_back():
    control = ScriptedControl(hang_at=1)
    async with serve_watched(app_over(control), limits_with(max_connections=16)) as (
        served,
        watch,
        _,
    ):
        body = json.dumps({**ASK, "stream": True}).encode()
        busy = [await served.ask(body) for _ in range(16)]
        reader, _ = await served.connect()
        answer = await asyncio.wait_for(reader.read(), WITHIN_S)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: 1" in answer
        assert watch.closed == {"full": 1}
        for _, writer in busy:
            writer.close()
        await control.until_all_ended()
        await until_async(lambda: len(watch) == 0)


async def test_the_rest_of_a_refused_body_is_taken_and_the_connection_goes_on():
    app = app_over(ScriptedControl(), max_body=1000)
    async with serve_watched(app, limits_with(header_timeout_s=0.3)) as (served, _, _client):
        reader, writer = await served.connect()
        writer.write(HEAD + b"Content-Length: 200000\r\n\r\n" + b"x" * 100_000)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert head.startswith(b"HTTP/1.1 413 ")
        writer.write(b"x" * 100_000)
        await asyncio.sleep(0.6)  # longer than a head may take: nothing of one has come
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert b"HTTP/1.1 200 " in await asyncio.wait_for(reader.readuntil(b"200 OK"), WITHIN_S)


def test_open_files_leave_room_for_connections_and_some_more():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        room = raise_open_files(2000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert room <= soft - 256
        assert room == 2000 or soft == hard
        assert raise_open_files(10**6) <= max(16, hard - 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_client_that_is_gone_when_it_would_be_refused_leaves_nothing_open():
    async with serve_watched(app_over(ScriptedControl()), PATIENT) as (served, watch, _):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
            await until_async(lambda: len(watch) == 1)
            (connection,) = watch._open
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.end("head_timeout", refused=True)  # the reset is there, and nobody has read of it yet
        assert connection.transport.is_closing()
        await until_async(lambda: len(watch) == 0)
