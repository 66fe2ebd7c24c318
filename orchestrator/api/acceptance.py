"""By which rule a request's drafts become output: what it asks for, within what the operator allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.cluster.port import Sampling
from orchestrator.errors import RequestError
from policies.acceptance import Acceptance

HEADER = "X-Outrider-Acceptance"

Rule = Literal["greedy", "coupled", "rejection", "tolerance"]


@dataclass(frozen=True, slots=True)
class AcceptanceBounds:
    """`default` is for requests that name no rule. `tolerance`: requests may ask for the one that is lossy."""

    default: Acceptance = "coupled"
    tolerance: bool = False

    def chosen(self, asked: Acceptance | None) -> Acceptance:
        """Return a request's rule. Raises RequestError where the operator does not allow it."""
        rule = asked or self.default
        if rule == "tolerance" and not (self.tolerance or self.default == "tolerance"):
            raise RequestError(
                '\'acceptance\' "tolerance" may change the output and is not allowed here: ask for "coupled" or '
                '"rejection", or the operator for speculation.allow_tolerance',
                param="speculative_config.acceptance",
                code="lossy_not_allowed",
            )
        return rule


def rule_of(sampling: Sampling) -> Rule:
    """Return the rule in effect: at temperature 0 all that lose nothing are one."""
    if sampling.temperature == 0.0 and sampling.acceptance != "tolerance":
        return "greedy"
    return sampling.acceptance
