"""By which rule a request's drafts become output: what it asks for, within what the operator allows."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import RequestError
from policies.sampling import Acceptance

HEADER = "X-Outrider-Acceptance"


@dataclass(frozen=True, slots=True)
class AcceptanceBounds:
    """`default` is for requests that name no rule. `tolerance`: requests may ask for the one that is lossy."""

    default: Acceptance = "coupled"
    tolerance: bool = False

    @property
    def tolerance_allowed(self) -> bool:
        """True where a request may be judged tolerantly."""
        return self.tolerance or self.default == "tolerance"

    def choose_rule(self, asked: Acceptance | None) -> Acceptance:
        """Return a request's rule. Raises RequestError where the operator does not allow it."""
        rule = asked or self.default
        if rule == "tolerance" and not self.tolerance_allowed:
            raise RequestError(
                '\'acceptance\' "tolerance" may change the output and is not allowed here: ask for "coupled" or '
                '"rejection", or the operator for speculation.allow_tolerance',
                param="speculative_config.acceptance",
                code="lossy_not_allowed",
            )
        return rule
