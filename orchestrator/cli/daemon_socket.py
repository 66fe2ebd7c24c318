"""Asks a daemon: over its admin socket, or over TCP with a key of the scope `admin`."""

from __future__ import annotations

import json
import os
import socket
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OutriderError

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig

URL_VARIABLE = "OUTRIDER_URL"
KEY_VARIABLE = "OUTRIDER_KEY"
"""A key is never an option: every user of a machine sees what its processes were started with."""
# Of a daemon that hangs; its own answers take milliseconds (ADR 0068).
ANSWER_S = 10.0

Place = Path | str
"""The admin socket, or the URL of the API."""


class StatusError(OutriderError):
    """No daemon answers, or it refuses."""


class DaemonRefused(StatusError):
    """A daemon answers, and refuses."""


def query_daemon(
    place: Place,
    route: str = "/admin/status",
    body: dict[str, Any] | None = None,
    *,
    answer_s: float | None = ANSWER_S,
) -> dict[str, Any]:
    """Return the daemon's status, or what another admin route says (to `body`, where there is one). `answer_s`: the
    longest time that a step of this may take; None: no bound. Raises StatusError when none answers there, or the route
    refuses."""
    text = fetch_page(place, route, body, answer_s=answer_s)
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise _build_silence_error(place, error) from error
    return answer


def _ask_url(url: str, route: str, body: bytes | None, answer_s: float | None) -> tuple[int, bytes]:
    """Return status and body of an answer over TCP. Raises OSError and ValueError."""
    import httpx

    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    base = url.rstrip("/").removesuffix("/v1")
    method = "GET" if body is None else "POST"
    try:
        answer = httpx.request(method, f"{base}{route}", content=body, headers=headers, timeout=answer_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(str(error)) from error
    return answer.status_code, answer.content


def _read_refusal(text: bytes, status: int, place: Place) -> str:
    """Return why a route refuses, and where that is about the key, what to do."""
    message = str(json.loads(text)["error"]["message"])
    if isinstance(place, str) and status in (401, 403):
        way_out = f"put a key of the scope admin into {KEY_VARIABLE} (`outrider keys create NAME --scope admin`)"
        return f"{message}; {way_out}"
    if isinstance(place, str) and status == 404 and "/admin/" in message:
        return f"{message}; over TCP the admin routes are there where api.keys_file names keys"
    return message


def fetch_page(
    place: Place, route: str, body: dict[str, Any] | None = None, *, answer_s: float | None = ANSWER_S
) -> bytes:
    """Return what an admin route answers, as JSON. Bounds and errors are those of `query_daemon`."""
    content = None if body is None else json.dumps(body).encode()
    try:
        if isinstance(place, str):
            status, text = _ask_url(place, route, content, answer_s)
        else:
            status, text = _ask(place, route, content, answer_s)
        if 400 <= status < 500:
            raise DaemonRefused(_read_refusal(text, status, place))
        if status != 200:
            raise ValueError(f"HTTP {status}")
    except (OSError, LookupError, ValueError) as error:
        raise _build_silence_error(place, error) from error
    return text


def _ask(path: Path, route: str, body: bytes | None, answer_s: float | None) -> tuple[int, bytes]:
    """Return status and body of an answer. In HTTP/1.0 it ends with its connection, so that no library has to be
    imported for it: that would take longer than the answer does. Raises OSError and ValueError."""
    head = f"{'GET' if body is None else 'POST'} {route} HTTP/1.0\r\nHost: outrider\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S if answer_s is None else answer_s)
        connection.connect(str(path))
        connection.settimeout(answer_s)
        connection.sendall(f"{head}\r\n".encode("ascii") + (body or b""))
        with connection.makefile("rb") as answer:
            status = int(answer.readline().split(maxsplit=2)[1])
            fields = takewhile(bytes.strip, iter(answer.readline, b""))  # up to an empty line, or to the end
            lengths = [line for line in fields if line.lower().startswith(b"content-length:")]
            if not lengths:
                raise ValueError("the answer was cut off")
            length = int(lengths[0].partition(b":")[2])
            text = answer.read(length)
    if len(text) < length:
        raise ValueError("the answer was cut off")
    return status, text


def _build_silence_error(place: Place, reason: Exception) -> StatusError:
    if isinstance(place, str):
        return StatusError(f"no daemon answers at {place} ({reason}); look at --url and {URL_VARIABLE}")
    others = sorted(str(other) for other in place.parent.glob("outrider-*.sock") if other != place)
    beside = f"; there is {', '.join(others)}" if others else ""
    way_out = f"start one with `outrider serve`, or name its --port or --socket{beside}"
    return StatusError(f"no daemon answers on {place} ({reason}); {way_out}")


def socket_of(config: Path | None, port: int | None) -> Place:
    """Return the admin socket of the daemon of a cluster.yaml (None: the default places, and the defaults where there
    is none), on another port where one is given. Where neither is named, OUTRIDER_URL goes first. Raises
    ConfigError."""
    from orchestrator.config.load import admin_socket_path, load_or_default

    url = os.environ.get(URL_VARIABLE, "")
    if url and config is None and port is None:
        return url
    loaded = load_or_default(config)
    return admin_socket_path(loaded, loaded.api.port if port is None else port)


def ask_daemon_of(config: ClusterConfig, route: str = "/admin/status") -> dict[str, Any] | None:
    from orchestrator.config.load import admin_socket_path

    try:
        return query_daemon(admin_socket_path(config, config.api.port), route)
    except StatusError:
        return None


def name_model(model: str | None, route: str) -> str:
    """Return a route that is about this model; about all where none is named."""
    from urllib.parse import quote

    return route if model is None else f"{route}?model={quote(model, safe='')}"
