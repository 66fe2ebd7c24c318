"""Which content a model has. It crosses process boundaries, and imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which content a model had when it was loaded. `source`: as the options of its worker name it; `digest`: of its
    files (16 hex digits), `name`: what they call it, `origin`: where they came from, with the commit."""

    source: str
    digest: str
    name: str = ""
    origin: str = ""
