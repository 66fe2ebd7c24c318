"""By which rule a request's drafts become output: what it asks for, within what the operator allows."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import RequestError
from policies.sampling import Acceptance

HEADER = "X-Outrider-Acceptance"


@dataclass(frozen=True, slots=True)
class AcceptanceBounds:
    """`default` is for requests that name no rule. `tolerance`: requests may ask for the one that is lossy. `stores` of
    documents that requests may name."""

    default: Acceptance = "coupled"
    tolerance: bool = False
    stores: tuple[str, ...] = ()

    @property
    def tolerance_allowed(self) -> bool:
        """True where a request may be judged tolerantly."""
        return self.tolerance or self.default == "tolerance"

    def choose_stores(self, names: list[str] | None) -> list[str] | None:
        """Return the stores that a request is drafted from; None for all. Raises RequestError for one that there is
        not."""
        for name in names or ():
            if name not in self.stores:
                known = f"there are {', '.join(self.stores)}" if self.stores else "there are none"
                raise RequestError(f"there is no store {name!r} of documents: {known}", param="draft_stores")
        return names

    def choose_rule(self, wanted: Acceptance | None) -> Acceptance:
        """Return a request's rule. Raises RequestError where the operator does not allow it."""
        rule = wanted or self.default
        if rule == "tolerance" and not self.tolerance_allowed:
            raise RequestError(
                '\'acceptance\' "tolerance" may change the output and is not allowed here: ask for "coupled" or '
                '"rejection", or the operator for speculation.allow_tolerance',
                param="speculative_config.acceptance",
                code="lossy_not_allowed",
            )
        return rule
