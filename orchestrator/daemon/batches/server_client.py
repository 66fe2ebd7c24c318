"""Asks an OpenAI-compatible server over HTTP, for `outrider batch`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx

from orchestrator.daemon.batches.lines import BatchError, BatchLine
from orchestrator.daemon.batches.run import BUSY, Answer, Outage, Unreachable, message_of

KEY_HEADER = "Idempotency-Key"
CONNECT_TIMEOUT_S = 5.0  # not tuned
KEEP_IDLE_S = 2.0
"""A connection that was idle for longer may have been closed by the server just now. Not tuned."""
_LONGEST_WAIT_S = 300.0  # of a Retry-After that is believed. Not tuned.
_FIRST_PAUSE_S = 0.5  # not tuned
# A host that went away without a word is noticed after 15 + 3 * 5 s.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class ServerClient:
    """Implements run.Asking. `base`: the API's base, which ends in /v1."""

    def __init__(self, base: str, client: httpx.AsyncClient) -> None:
        self._base = base.removesuffix("/v1")
        self._client = client

    async def __call__(self, line: BatchLine, request_id: str) -> Answer:
        headers = {KEY_HEADER: f"batch-{line.key}", "X-Request-Id": request_id}
        answer = await self._send("POST", f"{self._base}{line.url}", line.body, headers)
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise BatchError(f"{self._base}: refuses the API key (set OPENAI_API_KEY): {message_of(answer.body)}")
        return answer

    async def wait_until_there(self, outage: Outage) -> None:
        """Wait until the server answers. Raises BatchError where it does not, or has no such API for this key."""
        while True:
            try:
                answer = await self._send("GET", f"{self._base}/v1/models", None, {})
            except Unreachable as lost:
                outage.observe_loss(f"{self._base}: {lost}")
                await asyncio.sleep(_FIRST_PAUSE_S)
                continue
            outage.observe_answer()
            if answer.status == HTTPStatus.OK or answer.status in BUSY:
                return
            raise BatchError(f"{self._base}/v1/models: {answer.status}: {message_of(answer.body)}")

    async def _send(self, method: str, url: str, body: Any, headers: dict[str, str]) -> Answer:
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers = {**headers, "Content-Type": "application/json"}
        try:
            response = await self._client.request(method, url, content=content, headers=headers)
        except httpx.InvalidURL as error:
            raise BatchError(f"{url}: is no URL: {error}") from error
        except httpx.UnsupportedProtocol as error:
            raise BatchError(f"{url}: is no URL of an API: {error}") from error
        except httpx.TransportError as error:
            raise Unreachable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        try:
            parsed = response.json()
        except ValueError:
            parsed = None
        shaped = isinstance(parsed, dict)
        proxied = response.status_code in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT) and not shaped
        if proxied or (response.is_success and not shaped):
            raise Unreachable(f"{response.status_code}, and no answer in JSON")
        request_id = response.headers.get("X-Request-Id", "")
        shown = parsed if shaped else response.text[:1000]
        return Answer(response.status_code, shown, request_id, _read_wait(response))


@asynccontextmanager
async def open_client(base: str, *, api_key: str, concurrency: int, timeout_s: float) -> AsyncIterator[ServerClient]:
    """Yield a client with as many connections as requests. A request that takes longer than `timeout_s` is asked for
    again, and goes on where it was."""
    limits = httpx.Limits(
        max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=KEEP_IDLE_S
    )
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEPALIVE)
    async with httpx.AsyncClient(timeout=timeout, headers=headers, transport=transport) as client:
        yield ServerClient(base.rstrip("/"), client)


def _read_wait(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After; None where there is none. A date, which HTTP allows too, is not read."""
    text = response.headers.get("Retry-After", "")
    try:
        return min(_LONGEST_WAIT_S, max(0.0, float(text)))
    except ValueError:
        return None
