"""Makes Outrider a service, and no service again: files, user, directories, units. Each step is told."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.daemon.systemd.files import (
    CONFIG,
    STATE,
    UNITS,
    ServiceError,
    ServiceFile,
    below,
    list_written,
    write_file,
)

_STEP_S: Final = 600.0  # `systemctl start` waits for a first load
_HOST: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done: what, to which file or by which command, and what came of it."""

    what: str
    subject: str
    problem: str = ""

    def to_status(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"what": self.what, "subject": self.subject, "problem": self.problem or None}


def install_files(root: Path, wanted: list[ServiceFile]) -> list[Step]:
    """Write what is new or differs. Raises ServiceError."""
    words = {"new": "wrote", "differs": "replaced", "unchanged": "unchanged", "kept": "kept as it is"}
    done = []
    for file in wanted:
        standing = file.compare(root)
        if standing in ("new", "differs"):
            write_file(root, file)
        done.append(Step(words[standing], str(below(root, file.path))))
    return done


def enable_units(root: Path, units: tuple[str, ...], *, start: bool) -> list[Step]:
    """Make the user and the directories, and enable the units. In an image the first boot makes user and directories,
    by the files that are there. Raises ServiceError at the first step that fails."""
    if root != _HOST:
        return [_run("systemctl", f"--root={root}", "enable", *units)]
    _require_systemd()
    done = [
        _run("systemd-sysusers", "/etc/sysusers.d/outrider.conf"),
        _run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/outrider.conf"),
        _run("systemctl", "daemon-reload"),
        _run("systemctl", "enable", *units),
    ]
    if start:
        # A socket that has begun to listen elsewhere takes its new address only when it is started anew.
        started = [unit for unit in units if not unit.endswith("-sleep.service")]
        done.append(_run("systemctl", "restart", *started))
    return done


def remove_service(root: Path, *, purge: bool) -> list[Step]:
    """Stop and disable the units and remove what was written; the configuration, the state and the user stay unless
    they are to be purged. Raises ServiceError."""
    done = []
    written = list_written(root)
    units = [path.name for path in written if path.parent == UNITS]
    if units and root == _HOST:
        _require_systemd()
        done.append(_run("systemctl", "disable", "--now", *units))
    elif units:
        done.append(_run("systemctl", f"--root={root}", "disable", *units))
    for path in written:
        done.append(_remove(root, path))
    if root == _HOST and units:
        done.append(_run("systemctl", "daemon-reload"))
    for path in (CONFIG.parent, *STATE):
        if below(root, path).exists():
            done.append(_remove(root, path) if purge else Step("kept", str(below(root, path))))
    return done


def _remove(root: Path, path: Path) -> Step:
    place = below(root, path)
    try:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
            if place.parent.name.endswith(".d") and not any(place.parent.iterdir()) and "outrider" in place.parent.name:
                place.parent.rmdir()
    except OSError as error:
        raise ServiceError(f"{place}: {error.strerror}; run it as root (sudo)") from error
    return Step("removed", str(place))


def _require_systemd() -> None:
    if not Path("/run/systemd/system").is_dir():
        raise ServiceError(
            "this system was not started by systemd; write the files alone with --no-start and --root, or run "
            "`outrider serve` by what starts programs here"
        )


def _run(*command: str) -> Step:
    """Run one command of systemd's. Raises ServiceError where it fails."""
    line = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_S, check=False)
    except FileNotFoundError:
        raise ServiceError(f"`{line}`: there is no {command[0]} here; apt install systemd") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{line}` takes over {_STEP_S:.0f} s; follow it: journalctl -fu outrider") from None
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise ServiceError(f"`{line}` failed: {why or done.returncode}; see journalctl -u outrider")
    return Step("ran", line)
