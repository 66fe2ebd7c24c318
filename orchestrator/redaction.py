"""Takes secrets, and where it is asked for hosts' names and addresses, out of what leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any, Final

LEFT_OUT: Final = "[redacted]"

_SECRET_KEY = re.compile(
    r"(^|[_-])(password|passwd|secret|token|key|credentials?|authorization|cookie|dsn|headers)$", re.IGNORECASE
)
_SECRETS: Final = (
    (re.compile(r"\b([a-z][a-z0-9+.-]*:/{1,2})[^\s/@\"']+@", re.IGNORECASE), rf"\1{LEFT_OUT}@"),
    (
        re.compile(r"([?&][\w.-]*(?:token|key|secret|signature|password|sig)=)[^&\s\"']+", re.IGNORECASE),
        rf"\1{LEFT_OUT}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE), rf"\1 {LEFT_OUT}"),
    (re.compile(r"\boutrider-[A-Za-z0-9_-]{16,}"), LEFT_OUT),
    (re.compile(r"\b(?:sk|pk|hf|gh[pousr]|glpat|xox[abp])[-_][A-Za-z0-9_-]{12,}"), LEFT_OUT),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL), LEFT_OUT),
)
_ADDRESS = re.compile(
    r"(?<![\w.-])\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\d)|(?<![\w.:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])"
)


def redact_secrets(text: str) -> str:
    """Return a text without what looks like a key, a password in a URL, or a private key."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def redact_values(data: Any) -> Any:
    """Return plain data without secrets: those that a text shows, and those that stand under a secret's name."""
    if isinstance(data, dict):
        return {key: _redact_value(str(key), value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_values(value) for value in data]
    return redact_secrets(data) if isinstance(data, str) else data


def _redact_value(key: str, value: Any) -> Any:
    if not value or isinstance(value, (bool, int, float)) or not _SECRET_KEY.search(key):
        return redact_values(value)
    return dict.fromkeys(value, LEFT_OUT) if isinstance(value, dict) else LEFT_OUT


class HostNames:
    """Gives each host another name, the same wherever it is met. This machine's own loopback keeps its name."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._given: dict[str, str] = {}
        known = sorted({name for name in names if name and not _is_common(name)}, key=len, reverse=True)
        for name in known:
            self._rename(name)
        words = "|".join(re.escape(name) for name in known)
        self._names = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])") if known else None

    def __len__(self) -> int:
        return len(self._given)

    def replace(self, text: str) -> str:
        if self._names is not None:
            text = self._names.sub(lambda found: self._rename(found[0]), text)
        return _ADDRESS.sub(lambda found: self._rename_address(found[0]), text)

    def _rename_address(self, text: str) -> str:
        try:
            address = ip_address(text)
        except ValueError:
            return text
        return text if address.is_loopback or address.is_unspecified else self._rename(text)

    def _rename(self, name: str) -> str:
        return self._given.setdefault(name, f"host-{len(self._given) + 1}")


def _is_common(name: str) -> bool:
    """Return whether a name says nothing of its host, or is a word of texts that are not about hosts."""
    try:
        address = ip_address(name)
    except ValueError:
        return name in ("here", "localhost", "outrider")
    return address.is_loopback or address.is_unspecified
