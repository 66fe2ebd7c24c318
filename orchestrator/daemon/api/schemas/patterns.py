"""Regular expressions that look around, which no grammar can: those that libraries write, without it."""

from __future__ import annotations

import re
from typing import NamedTuple

_LOOKS_AROUND = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<found>\(\?(?:[=!]|<[=!]))", re.DOTALL)
_REFERS_BACK = re.compile(r"\\(?:[1-9]|k<)")


class Plain(NamedTuple):
    """A pattern, and the length that the look-around bounded."""

    pattern: str
    max_length: int | None = None


_TIME = r"(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_PLAIN = {
    # Pydantic's Decimal: digits somewhere
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": Plain(r"^[+-]?(?:\d+\.?\d*|\.\d+)$"),
    # Zod's e-mail: no dot at the beginning, and no two together
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": Plain(
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    # Zod's duration: something behind P, and behind T
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": Plain(
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T{_TIME})?|T{_TIME})$"
    ),
    # Zod's host name: its length, without the dot at the end that 'format' does not have
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": Plain(rf"^{_LABEL}(?:\.{_LABEL})*$", 253),
}


def looks_around(pattern: str) -> bool:
    return any(match["found"] or _REFERS_BACK.match(match[0]) for match in _LOOKS_AROUND.finditer(pattern))


def find_plain(pattern: str) -> Plain | None:
    """Return what a known pattern means without looking around (no dot ends its host names); None for others."""
    return _PLAIN.get(pattern)
