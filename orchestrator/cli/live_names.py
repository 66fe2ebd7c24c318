"""Names of what runs, for a shell to complete. Whoever presses a key is not kept waiting: no answer is no names."""

from __future__ import annotations

import json
from typing import Any, Final

import typer

from orchestrator.cli.daemon_socket import fetch_page
from orchestrator.config.socket_place import guess_socket
from orchestrator.errors import OutriderError

_WITHIN_S: Final = 0.5
KINDS: Final = ("device", "host", "worker")


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return workers."""
    return _begin_with(incomplete, list_names(_ask(ctx), "worker"))


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return devices, hosts and workers."""
    status = _ask(ctx)
    return _begin_with(incomplete, [name for kind in KINDS for name in list_names(status, kind)])


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return models."""
    return _begin_with(incomplete, [target["model"] for target in _list_targets(_ask(ctx)) if target["model"]])


def list_names(status: dict[str, Any] | None, kind: str) -> list[str]:
    """Return the names of the parts of a kind that a daemon tells of."""
    names: list[str] = []
    for target in _list_targets(status):
        if kind == "worker":
            names += [part["name"] for key in ("replicas", "standbys", "drafts") for part in target[key]]
        elif kind == "device":
            names += [device["name"] for device in target["devices"]]
        elif kind == "host":
            names += [host["name"] or host["host"] for host in target["hosts"]]
            names += [device["name"].partition("/")[0] for device in target["devices"]]
    return sorted(set(names))


def _list_targets(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if status is None else [status, *status["models"]]


def _begin_with(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _ask(ctx: typer.Context) -> dict[str, Any] | None:
    """Return the status of the daemon that the command line is about; None where none answers at once."""
    given = ctx.params
    try:
        path = given.get("socket") or guess_socket(given.get("config"), given.get("port"))
        status: dict[str, Any] | None = (
            None if path is None else json.loads(fetch_page(path, "/admin/status", answer_s=_WITHIN_S))
        )
    except (OutriderError, ValueError):
        return None
    return status
