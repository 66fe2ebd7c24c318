"""What the keys of another engine's server may not say together: one that is a replica, or one that drafts."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from orchestrator.config.section import is_http_url
from orchestrator.config.source_text import Place, SourceFile
from orchestrator.config.target import ENDPOINT_KEYS, ReplicaTarget
from orchestrator.errors import ConfigError

_MOST_KEY_BYTES: Final = 16 * 1024
_BESIDE: Final = {"endpoint", *ENDPOINT_KEYS, "exactness", "max_running"}


def check_endpoint(at: Place, replica: ReplicaTarget, file: SourceFile, *, planned: bool, alike: bool) -> None:
    """Refuse keys that contradict each other, and a key of the server that cannot be used. Raises ConfigError."""
    if not replica.endpoint:
        for key in sorted(replica.model_fields_set & ENDPOINT_KEYS):
            raise file.refuse((*at, key), "goes with endpoint; write the server's address there, or leave the key out")
        return
    if "endpoint" in replica.model_fields_set and (why := _refuse_url(replica.endpoint)):
        raise file.refuse((*at, "endpoint"), why)
    for key in sorted(replica.model_fields_set - _BESIDE):
        why = "is of a worker that computes by itself, and an endpoint's server does; leave one of the two out"
        raise file.refuse((*at, key), why)
    if planned:
        why = "goes with a target that says where it runs: name model.adapter and model.device"
        raise file.refuse((*at, "endpoint"), why)
    if alike:
        why = "has bits of its own, and model.alike is true; leave one of the two out"
        raise file.refuse((*at, "endpoint"), why)
    check_key_file(at, replica.api_key_file, file)


def check_key_file(at: Place, written: str, file: SourceFile) -> None:
    """Refuse a file of a server's key that cannot be used, or that others may read. `written`: "" where there is none.
    Raises ConfigError."""
    if not written:
        return
    try:
        _check_key(file.resolve(written))
    except ConfigError as error:
        raise file.refuse((*at, "api_key_file"), error) from error


def _refuse_url(url: str) -> str:
    """Return why this is no address of a server; "" where it is one."""
    if not is_http_url(url):
        return "is no URL of HTTP, as in http://gpu-box:8000/v1"
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        return "holds more than an address: write a key into a file, and its name into api_key_file"
    return ""


def _check_key(path: Path) -> None:
    """Look at a file that holds a key, without saying what that is. Raises ConfigError."""
    try:
        about = path.stat()
        text = path.read_text(encoding="utf-8").strip() if about.st_size <= _MOST_KEY_BYTES else ""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write the server's key into it, or leave it out") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text; write the server's key into it") from error
    if about.st_mode & stat.S_IRWXO:
        raise ConfigError(f"{path}: is open to every user of this machine; chmod o= it")
    if not text or not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(f"{path}: a key is one line of printable ASCII without spaces")
