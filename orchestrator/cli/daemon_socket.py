"""Asks a daemon over its admin socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.errors import OutriderError

_ANSWER_S = 10.0


class StatusError(OutriderError):
    """No daemon answers, or it refuses."""


def query_daemon(path: Path, route: str = "/admin/status", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the daemon's status, or what another admin route says (to `body`, where there is one). Raises StatusError
    when none answers on the socket, or the route refuses."""
    import socket

    import httpx

    try:
        with socket.socket(socket.AF_UNIX) as tried:  # httpx leaves its own open where nobody listens
            tried.settimeout(_ANSWER_S)
            tried.connect(str(path))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=_ANSWER_S) as client:
            response = client.request("GET" if body is None else "POST", f"http://outrider{route}", json=body)
            if response.is_client_error:
                raise StatusError(str(response.json()["error"]["message"]))
            response.raise_for_status()
            found: dict[str, Any] = response.json()
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise StatusError(
            f"no daemon answers on {path} ({error}); start one with `outrider serve`, or name its --port or "
            f"--socket{_list_sockets_beside(path)}"
        ) from error
    return found


def _list_sockets_beside(path: Path) -> str:
    """Return the admin sockets that are where this one would be."""
    found = sorted(str(one) for one in path.parent.glob("outrider-*.sock") if one != path)
    return f"; there is {', '.join(found)}" if found else ""


def socket_of(config: Path | None, port: int | None) -> Path:
    """Return the admin socket of the daemon of a cluster.yaml (None: the default places, and the defaults where there
    is none), on another port where one is given. Raises ConfigError."""
    from orchestrator.config.load import admin_socket_path, load_or_default

    loaded = load_or_default(config)
    return admin_socket_path(loaded, loaded.api.port if port is None else port)


def name_model(model: str | None, route: str) -> str:
    """Return a route that is about this model; about all where none is named."""
    from urllib.parse import quote

    return route if model is None else f"{route}?model={quote(model, safe='')}"
