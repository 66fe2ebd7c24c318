"""How a daemon takes over a worker that another one has left behind."""

from __future__ import annotations

import msgspec

ORPHAN_GRACE_S = 1.0
"""From the Stop that an orphan gives itself to its end."""


class Adoption(msgspec.Struct, frozen=True):
    """The first frame of a daemon that takes an orphan over."""

    digest: str
    """Of the worker that it wants."""
    wait_s: float
    """How long that one is to wait for the next daemon."""
