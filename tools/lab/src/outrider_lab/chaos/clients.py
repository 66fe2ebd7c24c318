"""Ordinary clients: the `openai` library with its default two retries. Where the daemon dies too, they resume streams.

A client that lost its connection sends the same request again, with the same `Idempotency-Key`. `Last-Event-ID` names
the last event that it saw. The daemon answers with the events behind that one; a 503 of one that starts is asked again.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from outrider_lab.chaos.answers import ClientAnswer
from outrider_lab.chaos.cases import Case

RESUME_WITHIN_S = 60.0
RESUME_EVERY_S = 0.5
STREAM_LIMIT_S = 180.0
_EXTRA = ("ignore_eos", "min_tokens", "speculative_config", "system_fingerprint")


class StreamBroken(Exception):
    """The client has an error; its text is what the client was told."""


@dataclass(slots=True)
class Told:
    """What came of a request. `last_event`: the id of the last event that was seen whole."""

    answer: ClientAnswer = field(default_factory=ClientAnswer)
    events: int = 0
    last_event: str = ""
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class ChaosClient:
    """Sends cases. `resumes`: it outlives the daemon's death, as its documentation tells clients to."""

    client: AsyncOpenAI
    resumes: bool
    note_token: Callable[[], None] = lambda: None

    async def send(self, case: Case, told: Told, *, stream: bool) -> None:
        """Send a request and gather its answer. Raises StreamBroken."""
        try:
            async with asyncio.timeout(STREAM_LIMIT_S):
                await self._send_until_answered(case, told, stream=stream)
        except TimeoutError:
            raise StreamBroken(f"not done after {STREAM_LIMIT_S:.0f} s") from None

    async def _send_until_answered(self, case: Case, told: Told, *, stream: bool) -> None:
        headers = {"Idempotency-Key": f"chaos-{uuid.uuid4().hex}"} if self.resumes else {}
        give_up_s: float | None = None
        while True:
            seen = told.events
            try:
                await (self._stream(case, told, headers) if stream else self._ask(case, told, headers))
                return
            except Exception as error:
                if not self.resumes or not (is_connection_loss(error) or is_starting(error)):
                    raise StreamBroken(describe_error(error)) from error
                if told.events and not told.last_event:
                    text = f"the daemon was lost, and its events have no ids to resume from: {describe_error(error)}"
                    raise StreamBroken(text) from error
                now_s = asyncio.get_running_loop().time()
                if give_up_s is None or told.events > seen:
                    give_up_s = now_s + RESUME_WITHIN_S
                if now_s > give_up_s:
                    raise StreamBroken(
                        f"not resumed within {RESUME_WITHIN_S:.0f} s: {describe_error(error)}"
                    ) from error
            told.resumes += 1
            if told.last_event:
                headers["Last-Event-ID"] = told.last_event
            await asyncio.sleep(RESUME_EVERY_S)

    async def _ask(self, case: Case, told: Told, headers: dict[str, str]) -> None:
        answer = await self._create(case)(**_arguments(case, headers))
        told.answer = ClientAnswer.of_body(answer.to_dict())
        self.note_token()

    async def _stream(self, case: Case, told: Told, headers: dict[str, str]) -> None:
        asked = {**_arguments(case, headers), "stream": True, "stream_options": {"include_usage": True}}
        if self.resumes:
            async with self._create(case, raw=True)(**asked) as response:
                await self._take_events(response.iter_lines(), told)
        else:
            async for chunk in await self._create(case)(**asked):
                self._take(chunk.to_dict(), told)
        if not told.answer.finish:
            raise StreamBroken("the stream ended without a finish_reason")

    async def _take_events(self, lines: AsyncIterator[str], told: Told) -> None:
        """Read server-sent events with their ids. An event counts when the empty line behind it has come."""
        data, event_id = "", ""
        async for line in lines:
            name, _, value = line.partition(":")
            if name == "id":
                event_id = value.strip()
            elif name == "data":
                data += value.strip()
            elif not line.strip() and data:
                told.last_event = event_id or told.last_event
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise StreamBroken(str(chunk["error"].get("message", chunk["error"])))
                self._take(chunk, told)
                data, event_id = "", ""
        raise ConnectionResetError("the stream ended without [DONE]")

    def _take(self, chunk: dict[str, Any], told: Told) -> None:
        told.events += 1
        if told.answer.add(chunk):
            self.note_token()

    def _create(self, case: Case, *, raw: bool = False) -> Callable[..., Any]:
        route: Any = self.client.chat.completions if case.route == "chat" else self.client.completions
        created: Callable[..., Any] = (route.with_streaming_response if raw else route).create
        return created


def _arguments(case: Case, headers: dict[str, str]) -> dict[str, Any]:
    plain = {name: value for name, value in case.body.items() if name not in _EXTRA}
    extra = {name: value for name, value in case.body.items() if name in _EXTRA}
    return {**plain, "extra_body": extra or None, "extra_headers": headers or None}


def is_connection_loss(error: BaseException) -> bool:
    """Return whether the connection broke. The library's own HTTP client may be any, so its errors go by their name."""
    if isinstance(error, APITimeoutError):
        return False
    if isinstance(error, APIConnectionError | ConnectionError):
        return True
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def is_starting(error: BaseException) -> bool:
    """Return whether a daemon answered that does not serve yet."""
    return isinstance(error, APIStatusError) and error.status_code == httpx.codes.SERVICE_UNAVAILABLE


def describe_error(error: BaseException) -> str:
    """Return an error in a line, as a client sees it."""
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
    name = type(error).__name__ if isinstance(error, APIError) or not isinstance(error, StreamBroken) else ""
    return f"{name}: {error}{cause}".removeprefix(": ").replace("\n", " ")[:300]
