"""How each variant of a trial speculates, inside a worker: a request says which it is in, and is served accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from orchestrator.protocol.commands import Submit
from orchestrator.worker.drafting.variants import VariantDrafter


class VariantDepth(NamedTuple):
    """At most `most` drafts for a sequence in a round (0: none). `fixed`: always so many, unless the request says
    otherwise; else the depth policy chooses."""

    most: int
    fixed: bool = False


class SpeculationVariants:
    """`depths` of the variants that have their own; all other requests have the `default`. `drafter`: which one a
    variant has, where they differ. `predicted`: the most drafts of a request with a prediction, where that is more and
    the variant's depth is not fixed."""

    def __init__(
        self,
        default: VariantDepth,
        depths: Mapping[str, VariantDepth],
        drafter: VariantDrafter | None = None,
        predicted: int = 0,
    ) -> None:
        self._default = default
        self._depths = dict(depths)
        self._drafter = drafter
        self._predicted = predicted

    def take(self, other: SpeculationVariants) -> None:
        """Serve requests that come from now on as another one does."""
        self._default, self._depths, self._drafter = other._default, other._depths, other._drafter
        self._predicted = other._predicted

    def apply_variant(self, request: Submit) -> Submit:
        """Return a request with its variant's depth; what it asks for itself holds within that bound."""
        variant = self._depths.get(request.variant, self._default)
        bound = variant.most
        if request.prediction and bound > 0 and not variant.fixed:
            bound = max(bound, self._predicted)
        if request.depth is not None:
            return msgspec.structs.replace(request, depth=min(request.depth, bound))
        if variant.fixed and variant.most > 0 and request.most_depth is None:
            return msgspec.structs.replace(request, depth=variant.most)
        most = bound if request.most_depth is None else min(request.most_depth, bound)
        return msgspec.structs.replace(request, most_depth=most)

    def join_drafter(self, request: Submit) -> None:
        """A request was taken in: its drafts come from its variant's drafter."""
        if self._drafter is not None:
            self._drafter.join(request.request_id, request.variant)
