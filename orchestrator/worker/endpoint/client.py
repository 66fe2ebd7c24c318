"""HTTP to a server of completions, and what its refusals mean. No text that it says is shown with a secret in it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from orchestrator.redaction import LEFT_OUT, redact_secrets
from orchestrator.worker.server_key import read_server_key

ASK_WITHIN_S: Final = 3.0
"""A question that costs the server nothing is answered within this. Not tuned: a
Python server may be busy for a second."""
# Not tuned: a lost SYN is sent again after 1 s and 3 s.
CONNECT_WITHIN_S: Final = 5.0
# Letters of an error that are told, not tuned: a line or two of a log.
_MOST_SAID: Final = 300
_API_PATHS: Final = ("/v3/v1", "/v1", "/v3")
_TOO_LONG: Final = (
    "maximum context length",
    "maximum model length",
    "model's context length",
    "exceed_context_size",
    "longer than the context length",
    "exceeds model max length",
    "max_num_tokens",
    "must have less than",
)
_NO_KEY: Final = "Unauthorized request"
_LOADING: Final = "Loading model"


class ServerError(Exception):
    """Root of what goes wrong at the server."""


class ServerAway(ServerError):
    """It is not there, or it loads: it may come without us."""


class ServerBusy(ServerError):
    """It takes no request now, and may a little later."""


class KeyRefused(ServerError):
    """It wants another key."""


class TooLong(ServerError):
    """The request does not fit its context."""


class RequestRefused(ServerError):
    """It takes no such request."""


class StreamLost(ServerError):
    """An answer ended before its end."""


class HttpAnswer(NamedTuple):
    """`body`: None where it is no JSON."""

    status: int
    headers: Mapping[str, str]
    text: str
    body: Any


class EndpointClient:
    """One server. `url`: as the operator wrote it, with the path of its API or without; `key_file`: has the key, "" for
    none. Raises OSError where the key cannot be read. To be closed."""

    def __init__(self, url: str, key_file: str = "") -> None:
        self.url = url.rstrip("/")
        self.key_file = key_file
        self.api = next((path for path in _API_PATHS if urlsplit(self.url).path.endswith(path)), "")
        self._base = self.url.removesuffix(self.api)
        self._key = read_server_key(key_file)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_WITHIN_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> HttpAnswer:
        """Ask for something that costs the server nothing. Raises ServerAway."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> HttpAnswer:
        """Ask for something small. Raises ServerAway."""
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> HttpAnswer:
        try:
            answer = await self._http.request(method, self._base + path, json=body, timeout=ASK_WITHIN_S)
        except httpx.HTTPError as error:
            raise ServerAway(describe_failure(error)) from error
        text = self._hide_key(answer.text)
        return HttpAnswer(answer.status_code, answer.headers, text, _parse(text))

    def _hide_key(self, text: str) -> str:
        """Return what a server says of a failure without the key, whatever that looks like."""
        return text.replace(self._key, LEFT_OUT) if self._key else text

    async def stream_lines(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Send a request and yield the lines of its answer as they come. Closing the iterator ends the request there.

        Raises what `raise_refusal` does, ServerAway where the server cannot be reached, and StreamLost.
        """
        try:
            async with self._http.stream("POST", self._base + path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise_refusal(answer.status_code, self._hide_key((await answer.aread()).decode("utf-8", "replace")))
                async for line in answer.aiter_lines():
                    yield self._hide_key(line) if '"error"' in line else line
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerAway(describe_failure(error)) from error
        except httpx.HTTPError as error:
            raise StreamLost(describe_failure(error)) from error


def raise_refusal(status: int, text: str) -> None:
    """Raise what an answer that is none means: the server's state, its key, or the request."""
    words = describe_refusal(text)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN) or _NO_KEY in text:
        raise KeyRefused(words)
    if status == httpx.codes.SERVICE_UNAVAILABLE and _LOADING in text:
        raise ServerAway(f"it is loading: {words}")
    if status in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS):
        raise ServerBusy(words)
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise StreamLost(f"HTTP {status}: {words}")
    if any(sign in text for sign in _TOO_LONG):
        raise TooLong(words)
    raise RequestRefused(f"HTTP {status}: {words}")


def describe_refusal(text: str) -> str:
    """Return what a server says of an error, whatever it wraps it in: one line, without secrets."""
    body = _parse(text)
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or body.get("detail") or json.dumps(body)
    words = " ".join(str(body if body is not None else text).split())
    return redact_secrets(words)[:_MOST_SAID] or "no reason given"


def describe_failure(error: Exception) -> str:
    """Return why a server could not be reached, in one line without secrets."""
    words = " ".join(str(error).split())
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return redact_secrets(words)[:_MOST_SAID] or type(error).__name__


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
