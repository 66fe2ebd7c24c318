"""The parts of a device's name, whichever runtime spells it."""

from __future__ import annotations

import re

_PARTS = re.compile(r"([^:.\d]*)[:.]?(.*)", re.DOTALL)


def split_device(device: str) -> tuple[str, str]:
    """Return a device's kind in small letters, and what tells it from others of its kind ("" where nothing does):
    "CUDA:1", "cuda1" and "CUDA.1" are ("cuda", "1")."""
    kind, number = _PARTS.fullmatch(device).groups()  # type: ignore[union-attr]  # everything matches
    return kind.casefold(), number
