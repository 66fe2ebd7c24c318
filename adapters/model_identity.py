"""Which content a model has. It crosses process boundaries, and imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServedClass:
    """The numerical class that a model runs in. `place`: on what hardware and runtime, and of what the operator leaves
    open; `others`: those that passed there, too, or were not tried."""

    place: str
    name: str
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which content a model had when it was loaded. `source`: as the options of its worker name it; `digest`: of its
    files (16 hex digits), `name`: what they call it, `origin`: where they came from, with the commit. `classes`: how it
    runs, which is not part of its content."""

    source: str
    digest: str
    name: str = ""
    origin: str = ""
    classes: list[ServedClass] = field(default_factory=list, compare=False)
