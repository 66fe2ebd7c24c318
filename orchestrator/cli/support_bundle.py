"""`outrider support-bundle`: one file for whoever is to help, without prompts, answers and secrets."""

from __future__ import annotations

import json
import os
import socket as sockets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, daemon_command
from orchestrator.cli.options import print_json
from orchestrator.cli.support_parts import Part, collect_parts
from orchestrator.errors import OutriderError
from orchestrator.plain_table import print_lines, print_table
from orchestrator.redaction import HostNames, redact_secrets, redact_values

_NEVER = (
    "prompts and answers: no page of the daemon has them",
    "keys, tokens and passwords: the daemon knows digests; what looks like one is taken out of every file",
    "environment variables, the file of keys, certificates",
    "the journal of answers and the files of batches, which have prompts",
)
_OWNERS_ONLY = 0o600


class BundleError(OutriderError):
    """The bundle cannot be written."""


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
    parts = list(collect_parts(daemon))
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
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def redact_part(part: Part, hosts: HostNames | None) -> str:
    """Return a part's text without secrets, and with other names of hosts where those are hidden."""
    text = part.text
    if part.name.endswith(".json"):
        text = json.dumps(redact_values(json.loads(text)), indent=1) + "\n"
    text = redact_secrets(text)
    return text if hosts is None else hosts.replace(text)


def _list_hosts(parts: list[Part]) -> list[str]:
    """Return the names and addresses of this host and of those that the daemon knows."""
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
