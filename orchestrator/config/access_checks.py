"""Whether the endpoint may be opened as configured: to whom, and with which files."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Final, Protocol

from orchestrator.config.source_text import Lines, Place
from orchestrator.config.tls import TlsSection
from orchestrator.config.tls_files import load_context, tls_paths
from orchestrator.errors import ConfigError

ANY: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.\-]*://([a-z0-9.\-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.\-]*[a-z0-9])?|\*")


class Endpoint(Protocol):
    """What is looked at; `config.model.Api` has it."""

    @property
    def host(self) -> str: ...
    @property
    def keys_file(self) -> str: ...
    @property
    def allow_keyless(self) -> bool: ...
    @property
    def allowed_hosts(self) -> list[str]: ...
    @property
    def allowed_origins(self) -> list[str]: ...
    @property
    def tls(self) -> TlsSection: ...


def check_access(api: Endpoint, path: Path, lines: Lines) -> None:
    """Refuse what would open the endpoint to more than was meant. Raises ConfigError with the line."""

    def place(*keys: str | int) -> str:
        full: Place = ("api", *keys)
        line = lines.get(full, lines.get(full[:2], lines.get(("api",), 1)))
        return f"{path}:{line}: api.{'.'.join(str(key) for key in keys if isinstance(key, str))}:"

    if problem := find_keyless(api, api.host):
        raise ConfigError(f"{place('host')} {problem}")
    for index, host in enumerate(api.allowed_hosts):
        if not _HOST.fullmatch(host.lower()):
            raise ConfigError(f"{place('allowed_hosts', index)} {host!r} is no name of a host, without port and scheme")
    for index, origin in enumerate(api.allowed_origins):
        where = place("allowed_origins", index)
        if origin == ANY and not api.keys_file:
            raise ConfigError(f"{where} '*' lets every web page use this daemon; that needs api.keys_file")
        if origin != ANY and not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigError(f"{where} {origin!r} is no origin, as in 'https://chat.example.org'")
    if bool(api.tls.certificate) != bool(api.tls.key):
        has, lacks = ("certificate", "key") if api.tls.certificate else ("key", "certificate")
        raise ConfigError(f"{place('tls', has)} goes with api.tls.{lacks}; write both, or none")
    if api.tls.wanted:
        try:
            load_context(*tls_paths(api.tls, path.resolve().parent))
        except ConfigError as error:
            raise ConfigError(f"{place('tls', 'certificate')} {error}") from error


def find_keyless(api: Endpoint, host: str) -> str:
    """Return why nobody may listen on this host without keys; "" where it may be."""
    if api.keys_file or api.allow_keyless or is_loopback(host):
        return ""
    return (
        f"{host!r} can be reached from other machines, and no key is asked for: set api.keys_file (outrider keys "
        "create NAME), listen on 127.0.0.1, or set api.allow_keyless: true where everybody who reaches it may use it"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
