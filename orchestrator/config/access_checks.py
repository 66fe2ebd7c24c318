"""Whether the endpoint may be opened as configured: to whom, and with which files."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from orchestrator.config.model import Api
from orchestrator.config.source_text import SourceFile
from orchestrator.config.tls import load_context, tls_paths
from orchestrator.errors import ConfigError

ANY: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.\-]*://([a-z0-9.\-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.\-]*[a-z0-9])?|\*")


def check_access(api: Api, file: SourceFile) -> None:
    """Refuse what would open the endpoint to more than was meant. Raises ConfigError with the line."""
    if problem := find_keyless(api, api.host):
        raise file.refuse(("api", "host"), problem)
    for index, host in enumerate(api.allowed_hosts):
        if not _HOST.fullmatch(host.lower()):
            why = f"{host!r} is no name of a host, without port and scheme"
            raise file.refuse(("api", "allowed_hosts", index), why)
    for index, origin in enumerate(api.allowed_origins):
        if origin == ANY and not api.keys_file:
            why = "'*' lets every web page use this daemon; that needs api.keys_file"
            raise file.refuse(("api", "allowed_origins", index), why)
        if origin != ANY and not _ORIGIN.fullmatch(origin.lower()):
            why = f"{origin!r} is no origin, as in 'https://chat.example.org'"
            raise file.refuse(("api", "allowed_origins", index), why)
    if bool(api.tls.certificate) != bool(api.tls.key):
        has, lacks = ("certificate", "key") if api.tls.certificate else ("key", "certificate")
        raise file.refuse(("api", "tls", has), f"goes with api.tls.{lacks}; write both, or none")
    if api.tls.wanted:
        try:
            load_context(*tls_paths(api.tls, file.base))
        except ConfigError as error:
            raise file.refuse(("api", "tls", "certificate"), error) from error


def find_keyless(api: Api, host: str) -> str:
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
