"""`outrider support-bundle`: one file for whoever is to help, without prompts, answers and secrets."""

from __future__ import annotations

import json
import os
import platform
import socket as sockets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, daemon_command
from orchestrator.cli.daemon_socket import Place, StatusError, fetch_page, query_daemon
from orchestrator.cli.options import end_with_json
from orchestrator.errors import OutriderError
from orchestrator.plain_table import print_lines, print_table
from orchestrator.redaction import HostNames, redact_secrets, redact_values

_NEVER = (
    "prompts and answers: no page of the daemon has them",
    "keys, tokens and passwords: the daemon knows digests; what looks like one is taken out of every file",
    "environment variables, the file of keys, certificates",
    "the journal of answers and the files of batches, which have prompts",
)
_OWNERS_ONLY = 0o600  # a mode of files
_LOG_LINES = 10_000  # what the daemon gives at most


class BundleError(OutriderError):
    """The bundle cannot be written."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the bundle, as text; `problem`: why there is none."""

    name: str
    about: str
    text: str = ""
    problem: str = ""


@daemon_command
def support_bundle(
    daemon: Daemon,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; else outrider-support-TIME.tar.gz, here.")
    ] = None,
    hide_hosts: Annotated[
        bool, typer.Option("--hide-hosts", help="Replace hosts' names and addresses: host-1, host-2.")
    ] = False,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is inside as JSON.")] = False,
) -> None:
    """Gather status, configuration, plan, health, log, metrics, versions and doctor's findings in a tar.gz; without a
    daemon as much as there is. It says what is inside and what was left out."""
    path = output or Path(f"outrider-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if path.exists():
        raise BundleError(f"{path}: is there already; name another file with --output")
    parts = list(_collect_parts(daemon))
    hosts = HostNames(_list_hosts(parts)) if hide_hosts else None
    files = {part.name: redact_part(part, hosts) for part in parts if not part.problem}
    left_out = [f"{part.name} ({part.about}): {part.problem}" for part in parts if part.problem]
    left_out += _NEVER
    if hosts is not None:
        left_out.append(f"hosts' names and addresses: {len(hosts)} have another name")
        left_out = [hosts.replace(line) for line in left_out]
    left_out = [redact_secrets(line) for line in left_out]
    contents = [
        {"name": part.name, "about": part.about, "size_bytes": len(files[part.name].encode())}
        for part in parts
        if part.name in files
    ]
    made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = {"made_at": made_at, "contents": contents, "left_out": left_out}
    _write(path, {"manifest.json": json.dumps(manifest, indent=1) + "\n", **files})
    summary = {"file": str(path), "size_bytes": path.stat().st_size, **manifest}
    end_with_json(summary, wanted=as_json)
    _print(summary)


def redact_part(part: Part, hosts: HostNames | None) -> str:
    """Return a part's text without secrets, and with other names of hosts where those are hidden."""
    text = part.text
    if part.name.endswith(".json"):
        text = json.dumps(redact_values(json.loads(text)), indent=1) + "\n"
    text = redact_secrets(text)
    return text if hosts is None else hosts.replace(text)


def _list_hosts(parts: list[Part]) -> list[str]:
    names = [sockets.gethostname(), sockets.getfqdn()]
    status = next((json.loads(part.text) for part in parts if part.name == "status.json" and part.text), None)
    for target in [] if status is None else (status, *status["models"]):
        names += [str(host[key]) for host in target["hosts"] for key in ("name", "host", "address") if host.get(key)]
        names += [device["name"].partition("/")[0] for device in target["devices"]]
    return names


def _write(path: Path, files: dict[str, str]) -> None:
    """Write an archive that only this user can read. Raises BundleError."""
    import io
    import tarfile

    folder = path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNERS_ONLY)
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, text in files.items():
                data = text.encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), _OWNERS_ONLY
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; name another file with --output") from error


def _print(summary: dict[str, Any]) -> None:
    from device_profiles.units import human_bytes

    rows = [(file["name"], human_bytes(file["size_bytes"]), file["about"]) for file in summary["contents"]]
    print_table(("file", "size", "it is"), rows)
    print_lines("left out:", *(f"  {line}" for line in summary["left_out"]))
    note = "Read it before you pass it on: lines of native libraries are in it as they were printed."
    print_lines(f"{summary['file']} ({human_bytes(summary['size_bytes'])}). {note}", wraps=False)


def _collect_parts(daemon: Daemon) -> Iterator[Part]:
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
    yield Part("versions.json", "Outrider, Python, the system and all packages", _format_json(_list_versions()))
    yield _gather("doctor.json", "what `outrider doctor` finds", lambda: _format_json(_examine(daemon.config)))
    yield _gather(
        "profiles.json", "which devices and models were measured", lambda: _format_json(_list_profiles(daemon.config))
    )


def _list_versions() -> dict[str, Any]:
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
