"""How each arm of a trial speculates, inside a worker: a request says which it is in, and is served accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from orchestrator.drafting.variants import VariantDrafter
from orchestrator.workers.messages import Submit


class VariantDepth(NamedTuple):
    """At most `most` drafts for a sequence in a round (0: none). `fixed`: always so many, unless the request says
    otherwise; else the depth policy chooses."""

    most: int
    fixed: bool = False


class SpeculationVariants:
    """`ways` by the lanes that have their own; everybody else goes the `usual` way. `drafter`: which one a lane has,
    where they differ."""

    def __init__(
        self, usual: VariantDepth, ways: Mapping[str, VariantDepth], drafter: VariantDrafter | None = None
    ) -> None:
        self._usual = usual
        self._ways = dict(ways)
        self._drafter = drafter

    def apply_variant(self, request: Submit) -> Submit:
        """Return a request with its arm's depth; what it asks for itself holds within the arm's bound."""
        way = self._ways.get(request.lane, self._usual)
        if request.depth is not None:
            return msgspec.structs.replace(request, depth=min(request.depth, way.most))
        if way.fixed and way.most > 0 and request.most_depth is None:
            return msgspec.structs.replace(request, depth=way.most)
        most = way.most if request.most_depth is None else min(request.most_depth, way.most)
        return msgspec.structs.replace(request, most_depth=most)

    def join_drafter(self, request: Submit) -> None:
        """A request was taken in: its drafts come from its arm's drafter."""
        if self._drafter is not None:
            self._drafter.join(request.request_id, request.lane)
