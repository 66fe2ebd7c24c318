"""The sections `speculation` and `canary`: how drafts are made and judged; another variant, tried by some requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.drafts import Draft
from orchestrator.config.section import Section


class Pid(Section):
    """The controller of each request's depth (`method: auto`): it holds the acceptance rate at a set point. Deeper than
    that pays is never verified, whatever it says."""

    set_point: float = Field(default=0.5, gt=0, lt=1)
    """The wanted acceptance rate, as a share of the rate that drafts promise."""
    proportional: float = Field(default=1.5, ge=0, le=100)
    """Tokens of depth for each unit of error."""
    integral: float = Field(default=6.0, ge=0, le=100)
    """Tokens of depth for each unit of error and 4 judged draft tokens; 0: the depth is not learned."""
    derivative: float = Field(default=0.25, ge=0, le=100)
    """Tokens of depth taken off for each unit by which the rate rises in 4 judged draft tokens."""
    min_depth: int = Field(default=1, ge=0, le=64)
    """The controller goes no shallower; fewer tokens are verified where they do not pay."""
    max_depth: int = Field(default=0, ge=0, le=64)
    """The controller goes no deeper; 0: as `num_speculative_tokens`."""


class Speculation(Section):
    """How speculation runs when a request does not say otherwise."""

    method: Literal["auto", "fixed", "off"] = "auto"
    """`auto`: the depth follows what pays. `fixed`: every round drafts up to `num_speculative_tokens`, as many as a
    drafter proposes, whatever they cost. `off` switches every drafter off: plain decoding in the same loop."""
    num_speculative_tokens: int = Field(default=12, ge=0, le=64)
    """The most tokens drafted for one sequence in one round (depth); 0 is plain decoding. No override goes beyond."""
    max_predicted_tokens: int = Field(default=64, ge=0, le=64)
    """With `method: auto`: the most tokens drafted in one round for a request that brings a `prediction` of its output.
    For such a request it takes the place of `num_speculative_tokens`, where that is less."""
    min_speculative_tokens: int = Field(default=0, ge=0, le=64)
    """The least depth that a request, or an override of a session or a replica, can ask for where it does not switch
    speculation off; at most `num_speculative_tokens`."""
    pid: Pid = Pid()
    """The controller of each request's depth."""
    low_acceptance_rate: float = Field(default=0.15, ge=0, lt=1)
    """The log warns, with the likely cause, where a drafter's acceptance rate is below; 0: never."""
    acceptance: Literal["coupled", "rejection", "tolerance"] = "coupled"
    """The rule by which drafts become output, for requests that name none. `coupled`: the target's own tokens,
    whatever is drafted. `rejection`: the target's distribution; which tokens come out depends on the drafts.
    `tolerance`: lossy; more drafts are accepted, and the output is not the target's."""
    allow_tolerance: bool = False
    """`true`: requests may ask for `tolerance`. It is allowed where it is the rule of `acceptance`, too."""
    tolerance_acceptance_rate: float = Field(default=0.9, gt=0, lt=1)
    """The share of judged drafts (those with all before them accepted) that `tolerance` is to accept."""
    tolerance_delta: float = Field(default=0.0, ge=0, le=20)
    """A fixed tolerance, in nats, from the first draft on, in place of one that is learned. 0: it is learned, and
    learned anew where acceptance drifts."""
    tolerance_warmup_tokens: int = Field(default=512, ge=16, le=100_000)
    """Judged drafts that `tolerance` learns from before it applies; until then the rule is `rejection`. Greedy and
    sampled requests learn separately, and a new worker learns anew."""
    tolerance_max_delta: float = Field(default=2.0, gt=0, le=20)
    """The most by which a draft may be less likely to the target than to the drafter, in nats: 2 is 7.4 times."""

    @property
    def depth(self) -> int:
        """The most drafts of a sequence in a round; 0: speculation is off."""
        return 0 if self.method == "off" else self.num_speculative_tokens


class CanarySpeculation(Section):
    """What of `speculation` is other for the canary."""

    method: Literal["same", "auto", "fixed", "off"] = "same"
    """As `speculation.method`; `same`: no other."""
    num_speculative_tokens: int = Field(default=0, ge=0, le=64)
    """As `speculation.num_speculative_tokens`; 0: no other."""
    acceptance: Literal["same", "coupled", "rejection", "tolerance"] = "same"
    """As `speculation.acceptance`, of the canary's requests that name no rule; `same`: no other."""


class Canary(Section):
    """A share of the requests is drafted for by another variant, and compared with the control until one is chosen."""

    share: float = Field(default=0.0, ge=0, le=0.5)
    """The share of requests that are served by the canary; 0: there is none."""
    speculation: CanarySpeculation = CanarySpeculation()
    """What of `speculation` is other for the canary."""
    drafts: tuple[Draft, ...] = Field(default=(), max_length=4, strict=False)
    """The canary's drafters, as in `drafts`; they are loaded beside those. Empty: the same."""
    decide: Literal["rule", "operator"] = "rule"
    """Who promotes it or rolls it back: the rule of the keys below, or `outrider canary promote` and `abort` alone. The
    operator's word counts in both cases."""
    least_requests: int = Field(default=50, ge=2, le=1_000_000)
    """Requests of each variant before anything is decided."""
    most_requests: int = Field(default=2000, ge=2, le=10_000_000)
    """Requests of the canary after which it is rolled back if it is not surely better."""
    min_gain: float = Field(default=0.02, ge=0, lt=1)
    """It is promoted where its TPOT is surely (95 %) lower by more than this share of the control's."""
    tolerance: float = Field(default=0.05, ge=0, le=1)
    """It is rolled back where its TTFT or TPOT is surely (95 %) higher by more than this share of the control's."""
    least_agreement: float = Field(default=0.95, ge=0, le=1)
    """It is rolled back where the share of its output's tokens that are the target's own choice is surely (95 %) below,
    and promoted only where it is surely not. Only `tolerance` makes others."""
