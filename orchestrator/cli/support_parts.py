"""What a support bundle is made of: pages of the daemon, and what this machine says without one."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.cli.admin_command import Daemon
from orchestrator.cli.daemon_socket import Place, StatusError, fetch_page, query_daemon
from orchestrator.errors import OutriderError

_LOG_LINES = 10_000


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the bundle, as text; `problem`: why there is none."""

    name: str
    about: str
    text: str = ""
    problem: str = ""


def collect_parts(daemon: Daemon) -> Iterator[Part]:
    """Yield all parts. What cannot be had has a problem instead of a text."""
    try:
        path = daemon.find_place()
        status = query_daemon(path)
    except OutriderError as error:
        yield Part("status.json", "the daemon's state", problem=str(error))
        yield _gather("config.json", "the configuration of cluster.yaml", lambda: _read_config(daemon.config))
    else:
        yield Part("status.json", "the daemon's state: models, replicas, drafts, devices, hosts", _format_json(status))
        yield from _collect_pages(path, status)
    yield Part("versions.json", "Outrider, Python, the system and all packages", _format_json(list_versions()))
    yield _gather("doctor.json", "what `outrider doctor` finds", lambda: _format_json(_examine(daemon.config)))
    yield _gather(
        "profiles.json", "which devices and models were measured", lambda: _format_json(_list_profiles(daemon.config))
    )


def list_versions() -> dict[str, Any]:
    """Return versions of what runs here."""
    packages = {str(package.metadata["Name"]): package.version for package in metadata.distributions()}
    return {
        "outrider": metadata.version("outrider"),
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "packages": dict(sorted(packages.items(), key=lambda named: named[0].lower())),
    }


def _collect_pages(path: Place, status: dict[str, Any]) -> Iterator[Part]:
    """Yield what the daemon says over its admin socket."""

    def fetch_json(route: str) -> str:
        return _format_json(query_daemon(path, route))

    pages = {
        "config": "the effective configuration",
        "health": "parts that something is wrong with",
        "plan": "the running plan, and why",
        "quarantine": "digests of quarantined requests",
    }
    for name, about in pages.items():
        yield _gather(f"{name}.json", about, partial(fetch_json, f"/admin/{name}"))
    yield _gather(
        "metrics.txt", "the metrics, as Prometheus reads them", lambda: fetch_page(path, "/admin/metrics").decode()
    )
    try:
        log = query_daemon(path, f"/admin/logs?most={_LOG_LINES}")
    except StatusError as error:
        yield Part("log.jsonl", "the newest lines of the log", problem=str(error))
        return
    more = f"; `journalctl -u {log['unit']}` has more" if log["unit"] else ""
    yield Part("log.jsonl", f"the newest {len(log['entries'])} lines of the log{more}", _format_lines(log["entries"]))
    events = [entry for entry in log["entries"] if "request_id" not in entry and entry["event"] != "worker output"]
    yield Part("events.jsonl", "those of them that are about no single request", _format_lines(events))


def _gather(name: str, about: str, read: Callable[[], str]) -> Part:
    """Return a part, with a problem where it cannot be read."""
    try:
        return Part(name, about, read())
    except (OutriderError, OSError) as error:
        return Part(name, about, problem=str(error))


def _read_config(config: Path | None) -> str:
    from orchestrator.config.load import default_config_path, load_config

    return _format_json(load_config(config or default_config_path(), sources=False).model_dump(mode="json"))


def _examine(config: Path | None) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from orchestrator.cli.doctor import examine
    from orchestrator.config.socket_place import find_config_path

    return [asdict(check) for check in examine(config or find_config_path())]


def _list_profiles(config: Path | None) -> dict[str, Any]:
    """Return when each device and model was measured, without the measurements."""
    from orchestrator.config.load import load_or_default
    from orchestrator.planning.profiling.work import profile_store

    store = profile_store(load_or_default(config))
    named = ("fingerprint", "adapter", "device", "runtime_version", "threads", "role", "model", "formats", "exactness")
    shown = (*named, "measured_at", "drifted", "others")
    return {
        kind: [{name: getattr(profile, name) for name in shown if hasattr(profile, name)} for profile in profiles]
        for kind, profiles in (("devices", store.devices()), ("models", store.models()))
    }


def _format_json(data: Any) -> str:
    return json.dumps(data, indent=1, default=str) + "\n"


def _format_lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)
