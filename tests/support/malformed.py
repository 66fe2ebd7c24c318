"""Sends malformed requests to a running daemon: none may be answered 5xx, hang, or bring a secret to light.

    python -m tests.support.malformed http://127.0.0.1:8000 --requests 100000 --key-file key.txt
    python -m tests.support.malformed /run/outrider/admin.sock --requests 10000
    python -m tests.support.malformed http://127.0.0.1:8000 --admin --requests 10000 --key-file admin-key.txt

Each request is one of three kinds: a valid one whose JSON was changed, one whose HTTP was changed, or random bytes. On
an admin socket, and with --admin, they are admin calls with changed bodies. The seed and the number of a
request that failed make it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

CANARY: Final = "canary-7d1f0c52"
"""Stands in prompts, headers and keys that are sent; no answer to a wrong key and no log may have it."""
_ANSWER_S: Final = 90.0  # longer than a daemon waits for what is missing, and keeps a connection open
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Coroutine[Any, Any, Streams]]
_MOST_READ: Final = 1 << 20
_NASTY: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.0, -0.0, 1e308, 1e-320, float("nan"),
    float("inf"), "", " ", "\x00", "\ud800", "\u202e", "a" * 10_000, "0", "null", "../../etc/passwd", "%s%n", [], [[]],
    [None], {}, {"": ""}, {"a": {"b": {}}}, [1, "x"], list(range(2000)), {"$ref": "#"}, {"type": "object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/a"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$", "type": "string"}}},
    [{"type": "function_call", "call_id": 1}], [{"role": "user", "content": [{"type": "tool_result", "content": 1}]}],
    {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/a"}}}, {"type": "any"},
    {"type": "allowed_tools"}, {"type": "json_object"}, [{"role": "user"}], [{"role": "tool", "content": CANARY}],
    [{"type": "image_url"}],
)  # fmt: skip
_KEYS: Final = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "logit_bias", "response_format",
    "tools", "tool_choice", "presence_penalty", "repetition_penalty", "min_tokens", "stop_token_ids", "timeout_s",
    "user", "speculation", "tokens", "add_generation_prompt", "input_file_id", "endpoint", "unknown", "input", "text",
    "instructions", "previous_response_id", "store", "reasoning", "include", "metadata", "max_output_tokens", "system",
    "stop_sequences", "thinking", "output_config", "type", "role", "content",
)  # fmt: skip
_PATHS: Final = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/toy",
    "/v1/files", "/v1/batches", "/v1/files/x/content", "/v1/batches/x/cancel", "/v1/responses", "/v1/messages",
    "/v1/responses/x", "/v1/responses/x/cancel", "/v1/messages/count_tokens", "/v1/messages/batches",
    "/metrics", "/health", "/docs", "/openapi.json", "/", "/..", "/%00", "/v1/../admin/status", "//v1//completions",
    "/v1/completions?" + "a=" * 500, "/" + "a" * 5000, "*", "http://other/v1/models", "/v1/mod\u00e9ls",
)  # fmt: skip
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "", "G\tT")
_TYPES: Final = (
    "application/json", "text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "\x80",
    "multipart/form-data; boundary=x", "application/json; charset=utf-16", "application/;",
)  # fmt: skip
_VALID: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"model": "toy", "prompt": CANARY, "max_tokens": 2}),
    ("/v1/completions", {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"model": "toy", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "model": "toy",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_completion_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/responses", {"model": "toy", "input": CANARY, "max_output_tokens": 2}),
    (
        "/v1/responses",
        {
            "model": "toy",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": CANARY}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "max_output_tokens": 2,
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "toy",
            "max_tokens": 2,
            "system": [{"type": "text", "text": CANARY}],
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "toy", "messages": [{"role": "user", "content": CANARY}]}),
    ("/tokenize", {"model": "toy", "prompt": CANARY}),
    ("/detokenize", {"model": "toy", "tokens": [1, 2]}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
)
_ADMIN: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/admin/speculation", {"override": {"mode": "off"}, "asked_by": "a tester", "user": "", "engine": None}),
    ("/admin/hold", {"kind": "device", "name": "none", "state": "cordoned"}),
    ("/admin/hold", {"name": "target-0", "state": "draining"}),
    ("/admin/hold", {"name": "target-0", "state": "", "model": "toy"}),
    ("/admin/failover", {"worker": "target-0", "to": "target-1", "model": None}),
    ("/admin/failover", {"worker": "target-0", "to": None}),
    ("/admin/drafters", {"names": ["suffix"], "engine": 0, "model": None}),
    ("/admin/drafters", {"names": [], "engine": None}),
    ("/admin/requests/cancel", {"request": "cmpl-0"}),
    ("/admin/requests", {}),
    ("/admin/parts?model=toy", {}),
    ("/admin/quarantine/add", {"request": "cmpl-0", "minutes": 1.0}),
    ("/admin/quarantine/release", {"digests": ["00"]}),
    ("/admin/canary/promote", {}),
    ("/admin/explain/x", {}),
    ("/admin/status", {}),
    ("/admin/plan", {}),
)
_ADMIN_KEYS: Final = (
    "override", "asked_by", "user", "engine", "kind", "name", "state", "digests", "depth", "mode", "x",
    "worker", "to", "names", "model", "request", "minutes",
)  # fmt: skip


@dataclass
class Findings:
    """What came back: answers by status, and each request that failed, by its number."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def describe(self) -> str:
        """Return it in a few lines."""
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return "\n".join([f"answers: {counts}; the slowest took {self.slowest_s:.2f} s", *self.failures[:20]])


def make_request(seed: int, number: int, host: str, key: str = "") -> bytes:
    """Return the bytes of one request. `key`: what most of them bear."""
    dice = random.Random(f"{seed}/{number}")  # not for secrets
    kind = dice.random()
    if kind < 0.05:
        return dice.randbytes(dice.randrange(1, 2000))
    path, body = dice.choice(_VALID)
    raw = _encode(dice, _mutate(dice, body)) if kind < 0.75 else _encode(dice, body)
    method = "POST"
    headers = [("Host", host), ("Content-Type", "application/json"), ("Connection", "close")]
    if key and dice.random() < 0.9:
        headers.append(("Authorization", f"Bearer {key}") if dice.random() < 0.8 else ("x-api-key", key))
    else:
        headers.append(
            ("Authorization", dice.choice((f"Bearer {CANARY}", CANARY, "Bearer", "Basic eDp5", "Bearer \x01")))
        )
    length: str | None = str(len(raw))
    if kind >= 0.75:
        method, path, length, raw = _mutate_http(dice, headers, method, path, raw)
    if length is not None:
        headers.append(("Content-Length", length))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
    whole = head.encode("utf-8", "surrogatepass") + raw
    if kind >= 0.92:
        whole = _flip(dice, whole)
    return whole


def make_admin_request(seed: int, number: int, host: str = "outrider", key: str = "") -> bytes:
    """Return the bytes of one admin call. Its length is right: an admin socket waits for the rest of a request. `key`:
    what most of them bear."""
    dice = random.Random(f"{seed}/admin/{number}")  # not for secrets
    route, body = dice.choice(_ADMIN)
    raw = _encode(dice, _mutate(dice, body, _ADMIN_KEYS))
    if dice.random() < 0.1:
        raw = _flip(dice, raw)
    method = dice.choice(("POST", "POST", "POST", "GET", "PUT", "DELETE"))
    path = route if dice.random() < 0.9 else route + dice.choice(("/", "/x", "?a=1", "%00", "/..%2f"))
    kind = "application/json" if dice.random() < 0.9 else dice.choice(_TYPES)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    if key:
        borne = key if dice.random() < 0.9 else CANARY
        head += f"Authorization: Bearer {borne}\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode("latin-1") + raw


def _mutate_http(
    dice: random.Random, headers: list[tuple[str, str]], method: str, path: str, raw: bytes
) -> tuple[str, str, str | None, bytes]:
    """Change what stands around a body. Returns method, path, length and body."""
    length: str | None = str(len(raw))
    for _ in range(dice.randrange(1, 4)):
        match dice.randrange(11):
            case 0:
                method = dice.choice(_METHODS)
            case 1 | 2:
                path = dice.choice(_PATHS)
            case 3:
                headers[1] = ("Content-Type", dice.choice(_TYPES))
            case 4:
                length = dice.choice(("0", "-1", "1", "99999999999999999999", "x", "5, 5", "", None))
            case 5:
                headers.append(("Transfer-Encoding", dice.choice(("chunked", "gzip", "chunked, chunked", "identity"))))
                raw = dice.choice((b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", raw))
            case 6:
                headers.append(
                    (dice.choice(("X-A", "Cookie", "Expect", "Range")), "a" * dice.choice((10, 5_000, 100_000)))
                )
            case 7:
                headers += [(f"X-{index}", CANARY) for index in range(dice.choice((5, 200)))]
            case 8:
                headers.append(dice.choice((
                    ("Host", "other"), ("Origin", "https://a.example"), ("Idempotency-Key", dice.choice(("", "a"))),
                    ("Last-Event-ID", dice.choice(("x", "0.0.0", CANARY))), ("X-Request-Id", "a\x01b"),
                    ("Content-Encoding", "gzip"), ("Upgrade", "websocket"), ("Accept", "text/event-stream"),
                )))  # fmt: skip
            case 9:
                raw = raw[: dice.randrange(len(raw) + 1)]
                length = str(len(raw)) if dice.random() < 0.9 else length
            case _:
                raw = _flip(dice, raw)
                length = str(len(raw))
    return method, path, length, raw


def _mutate(dice: random.Random, body: dict[str, Any], keys: tuple[str, ...] = _KEYS) -> Any:
    """Return a body with a few values, keys or levels changed."""
    changed: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(dice.randrange(1, 4)):
        match dice.randrange(6):
            case 0 if changed:
                changed.pop(dice.choice(list(changed)))
            case 1 | 2:
                changed[dice.choice(keys)] = dice.choice(_NASTY)
            case 3 if changed:
                changed[dice.choice(list(changed))] = dice.choice(_NASTY)
            case 4:
                changed[dice.choice(keys)] = {dice.choice(keys): dice.choice(_NASTY)}
            case _:
                changed[dice.choice(keys)] = [dice.choice(_NASTY) for _ in range(dice.randrange(4))]
    if keys is _KEYS:
        changed.setdefault("max_output_tokens" if "input" in changed else "max_tokens", 2)
    return dice.choice(_NASTY) if dice.random() < 0.03 else changed


def _encode(dice: random.Random, body: Any) -> bytes:
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    chance = dice.random()
    if chance < 0.02:
        return b"[" * dice.choice((100, 5_000)) + raw
    if chance < 0.04:
        return b"\xef\xbb\xbf" + raw
    if chance < 0.06:
        return raw.decode().encode("utf-16")
    return raw + b"}" if chance < 0.07 else raw


def _flip(dice: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(dice.randrange(1, 8)):
        if changed:
            changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


async def send_requests(
    url: str, count: int, *, seed: int = 1, key: str = "", at_once: int = 16, admin: bool = False
) -> Findings:
    """Send so many requests, some at a time. Those whose end the daemon waits for end by its time-outs. `url`: or the
    path of an admin socket. `admin`: admin calls, there too."""
    place = urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    found = Findings()

    def make(number: int) -> bytes:
        if not place.scheme:
            return make_admin_request(seed, number)
        if admin:
            return make_admin_request(seed, number, f"{host}:{port}", key)
        return make_request(seed, number, f"{host}:{port}", key)

    def connect() -> Coroutine[Any, Any, Streams]:
        return asyncio.open_connection(host, port) if place.scheme else asyncio.open_unix_connection(url)

    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            raw = make(number)
            begun_s = time.monotonic()
            try:
                answer = await asyncio.wait_for(_ask(connect, raw), _ANSWER_S)
            except TimeoutError:
                found.failures.append(f"seed {seed}, request {number}: no end of the answer within {_ANSWER_S:g} s")
                continue
            except ConnectionRefusedError:
                found.failures.append(f"seed {seed}, request {number}: nobody listens any more")
                return
            found.slowest_s = max(found.slowest_s, time.monotonic() - begun_s)
            _judge(found, f"seed {seed}, request {number}", answer, key)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return found


async def _ask(connect: Connect, raw: bytes) -> bytes:
    reader, writer = await connect()
    answer = b""
    try:
        writer.write(raw)
        while len(answer) < _MOST_READ and (part := await reader.read(65_536)):
            answer += part
    except (ConnectionResetError, BrokenPipeError):
        pass  # a request that is refused may be closed before all of it was read
    finally:
        writer.transport.abort()
    return answer


def _judge(found: Findings, what: str, answer: bytes, key: str) -> None:
    status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "none"
    found.statuses[status] += 1
    asked_for_less_time = status == "504" and b"the request's time was over" in answer  # by `timeout_s`
    if status.startswith("5") and not asked_for_less_time:
        found.failures.append(f"{what}: {answer[:300]!r}")
    if key and key.encode() in answer:
        found.failures.append(f"{what}: the key came back")
    if status in ("401", "403") and CANARY.encode() in answer:
        found.failures.append(f"{what}: what was sent came back to a stranger")


def main(show: Callable[[str], None] = print) -> int:
    """Run from the command line; returns 1 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the daemon listens, or its admin socket")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--admin", action="store_true", help="send admin calls to the URL")
    parser.add_argument("--key-file", type=Path, help="a file with an API key, where the daemon asks for one")
    asked = parser.parse_args()
    key = asked.key_file.read_text(encoding="utf-8").strip() if asked.key_file else ""
    begun_s = time.monotonic()
    found = asyncio.run(
        send_requests(asked.url, asked.requests, seed=asked.seed, key=key, at_once=asked.at_once, admin=asked.admin)
    )
    took_s = time.monotonic() - begun_s
    show(f"{asked.requests} requests in {took_s:.0f} s, {asked.requests / took_s:.0f}/s\n{found.describe()}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
