"""What the references of a schema mean, and definitions of its own for what is meant at several places.

Nothing is written twice: a schema within a schema could double with every level, and a client chooses how deep it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from orchestrator.daemon.api.schemas.walk import Node, read_pointer

_KEY = "$defs"
# Bytes of schemas that references copy: a schema cannot grow without end by them (ADR 0100).
_MOST_COPIED = 256 * 1024


class Definitions:
    """The references of one document. `targets`: the schema that each means, by its text, also where it was moved."""

    def __init__(self, root: Node, targets: Mapping[str, Node]) -> None:
        self._root = root
        self._targets = dict(targets)
        self._names = map(str, count())
        self._left = _MOST_COPIED
        self._tokens = {token for reference in targets for token in read_pointer(reference)}

    def find(self, reference: Any) -> Node | None:
        return self._targets.get(reference) if isinstance(reference, str) else None

    def leads_through(self, key: str) -> bool:
        """Whether a reference of the client's leads through a key, so that what is behind it may not move."""
        return key in self._tokens

    def define(self, schema: Node) -> str:
        """Give a schema a place among the definitions, under a name that was free, and return the reference to it."""
        known = self._root.get(_KEY)
        if isinstance(known, list):  # a pointer reads the items of an array by their numbers
            known = {str(number): part for number, part in enumerate(known)}
        if not isinstance(known, dict):
            known = {}
        self._root[_KEY] = known
        name = next(name for name in self._names if name not in known)
        known[name] = schema
        reference = f"#/{_KEY}/{name}"
        self._targets[reference] = schema
        return reference

    def may_copy(self, size: int) -> bool:
        """Whether so much more may be read again, and written, for a further reference to the same thing."""
        self._left -= size
        return self._left >= 0
