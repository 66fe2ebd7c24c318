"""Reads the input of a batch: JSON lines with `custom_id`, `method`, `url` and `body`, as OpenAI writes them.

Only where each line stands is kept in memory. A line that cannot be asked is kept with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.errors import OutriderError

ROUTES = ("/v1/chat/completions", "/v1/completions")
MAX_CUSTOM_ID = 512  # characters. Not tuned.
_DIGEST_BYTES = 16
_FIELDS = ("custom_id", "method", "url", "body")


class BatchError(OutriderError):
    """A batch cannot be run, or could not be finished; the message is one line."""


class NoRoom(BatchError):
    """The disk is full: a run can go on when it is not."""


class BadLine(Exception):
    """A line that is no request; `custom_id` where it has one that can be used."""

    def __init__(self, code: str, message: str, custom_id: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id
        self.param = param


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `key` is the same whenever the same file is read, and no other line has it."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    key: str


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line stands, and the name of its result."""

    number: int
    offset: int
    size: int
    result_id: str
    bad: BadLine | None = None


@dataclass(slots=True)
class BatchInput:
    """An input file that was read once. `routes`: those that its lines may name."""

    path: Path
    digest: str
    places: list[LinePlace] = field(default_factory=list)
    routes: tuple[str, ...] = ROUTES

    def read_lines(self, places: list[LinePlace]) -> Iterator[tuple[LinePlace, BatchLine]]:
        """Yield the requests at these places. Raises BatchError where the file is not what it was."""
        with _open(self.path) as file:
            for place in places:
                file.seek(place.offset)
                try:
                    line = _parse(file.read(place.size), place.number, self.routes)
                except BadLine:
                    raise BatchError(f"{self.path}:{place.number}: the file was changed while it was read") from None
                key = _digest(f"{self.digest} {line['custom_id']}")
                yield place, BatchLine(place.number, line["custom_id"], line["url"], line["body"], key)


def read_input(path: Path, routes: tuple[str, ...] = ROUTES) -> BatchInput:
    """Read a file of requests. Raises BatchError where there is no such file, or no line in it."""
    examined: list[tuple[int, int, int, BadLine | None]] = []
    seen: set[str] = set()
    offset, whole = 0, blake2b(digest_size=_DIGEST_BYTES)
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            whole.update(raw)
            if raw.strip():
                examined.append((number, offset, len(raw), _examine(raw, number, routes, seen)))
            offset += len(raw)
    if not examined:
        raise BatchError(f"{path}:1: there is no line in it; write one request a line")
    digest = whole.hexdigest()
    places = [
        LinePlace(number, at, size, f"batch_req_{_digest(f'{digest} line {number}')}", bad)
        for number, at, size, bad in examined
    ]
    return BatchInput(path, digest, places, routes)


def _examine(raw: bytes, number: int, routes: tuple[str, ...], seen: set[str]) -> BadLine | None:
    """Return why a line cannot be asked; None where it can."""
    try:
        custom_id: str = _parse(raw, number, routes)["custom_id"]
    except BadLine as bad:
        return bad
    if custom_id in seen:
        text = f"line {number}: an earlier line has the custom_id {custom_id!r} too"
        return BadLine("duplicate_custom_id", text, custom_id, "custom_id")
    seen.add(custom_id)
    return None


def _parse(raw: bytes, number: int, routes: tuple[str, ...]) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"line {number}: is no JSON: {error}") from None
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", f"line {number}: is no JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        text = f"line {number}: 'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters"
        raise BadLine("missing_custom_id", text, param="custom_id")
    if unknown := sorted(line.keys() - set(_FIELDS)):
        text = f"line {number}: unknown field {unknown[0]!r}; a line has {', '.join(_FIELDS)}"
        raise BadLine("unknown_field", text, custom_id, unknown[0])
    if line.get("method", "POST") != "POST":
        raise BadLine("invalid_method", f"line {number}: 'method' must be POST", custom_id, "method")
    if line.get("url") not in routes:
        raise BadLine("invalid_url", f"line {number}: 'url' must be {' or '.join(routes)}", custom_id, "url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", f"line {number}: 'body' must be a JSON object", custom_id, "body")
    if body.get("stream"):
        text = f"line {number}: a batch has whole answers; leave 'stream' out"
        raise BadLine("invalid_body", text, custom_id, "body.stream")
    return line


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
