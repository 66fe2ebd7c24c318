"""Fixed depths: what is configured where nothing adapts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.replay.port import Done
from policies.seeds import ClassKey
from policies.speculation import Proposal, Round


class FixedDepth:
    """`by_key`: depths of single requests, where they differ from `depth`. Depth 0 is plain decoding."""

    def __init__(self, depth: int, by_key: Mapping[str, int] | None = None, name: str = "") -> None:
        self.name = name or f"fixed-{depth}"
        self._depth = depth
        self._by_key = dict(by_key or {})

    def begin(self, key: str, of: ClassKey) -> None:
        """See the port."""

    def end(self, key: str) -> None:
        """See the port."""

    def asked(self, now: Round) -> list[int]:
        """See the port."""
        return [min(self._by_key.get(place.key, self._depth), place.most) for place in now.places]

    def decided(self, now: Round, proposals: Sequence[Proposal]) -> list[int]:
        """See the port."""
        return [proposal.tokens for proposal in proposals]

    def observed(self, now: Round, done: Done) -> None:
        """See the port."""
