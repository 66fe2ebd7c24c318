"""JSON that is written in lines: one value a line, whatever its reader takes for the end of one."""

from __future__ import annotations

from typing import Final

_ESCAPES: Final = (
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
    ("\x85".encode(), rb"\u0085"),
)


def escape_line_ends(data: bytes) -> bytes:
    """Return JSON in UTF-8 without the characters that many readers split lines at, and JSON does not escape: U+2028,
    U+2029 and U+0085. They stand only in texts, so that the value is the same."""
    for raw, escaped in _ESCAPES:
        data = data.replace(raw, escaped)
    return data
