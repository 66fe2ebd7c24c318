"""Reads the file of API keys. Every problem is one line that names the file and the way out."""

from __future__ import annotations

import stat
from pathlib import Path

from orchestrator.errors import ConfigError


def keys_path(configured: str, base: Path) -> Path:
    """Return where the keys are; `base` is the configuration file's directory."""
    return base / Path(configured).expanduser()


def read_keys(path: Path) -> list[str]:
    """Return the keys, one a line; empty lines and lines that begin with # do not count.

    Raises ConfigError when the file cannot be read, is open to every user of the machine, or holds no usable key.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write one key a line there, or remove api.keys_file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text; write one key a line") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{path}: is open to every user of this machine; chmod o= it")
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{path}:{number}: a key is printable ASCII without spaces")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no key; write one a line, or remove api.keys_file")
    return keys
