"""Thoughts that a client wants no text of: they go to it and come back in a signature, so that the model has them."""

from __future__ import annotations

import base64
from typing import Final

_BEGIN: Final = "outrider."
"""No other server's signature begins so: these are base64, which has no point."""


def sign_thought(text: str) -> str:
    """Return the signature that carries a thought, "" of none."""
    return _BEGIN + base64.b64encode(text.encode()).decode() if text else ""


def read_signature(signature: str | None) -> str:
    """Return the thought that a signature carries; "" where it is none of ours, or was changed."""
    if not signature or not signature.startswith(_BEGIN):
        return ""
    try:
        return base64.b64decode(signature[len(_BEGIN) :], validate=True).decode()
    except ValueError:
        return ""
