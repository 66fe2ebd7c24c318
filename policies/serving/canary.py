"""A share of the requests is served another way (another drafter, depth policy, or none), and the two are compared.

A request's variant follows from its id alone, so a request that is run again goes the same way. A larger share takes in
all that a smaller one did. Variants are compared by Welch's test of two means with unequal variances (Welch, "The
generalization of Student's problem", 1947); running sums are kept (Welford, 1962), not samples. Variants that lose
nothing make the same tokens, so they can only be slower, never wrong. One that tolerates other tokens than the target's
own is held to how many of them are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b
from math import inf, sqrt
from typing import NamedTuple

_HASH_BYTES = 8
_HASH_RANGE = 2 ** (8 * _HASH_BYTES)  # as many hashes as there are
# Student's t at 97.5 %, by degrees of freedom; beyond the last its series in 1 / freedom is right to four digits.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# Of Student's t at 97.5 %, as a series in 1 / freedom: within 0.2 % from 10 on (ADR 0030).
_T_SERIES = (1.95996, 2.37227, 2.82250)


class CanaryVariant(StrEnum):
    CONTROL = "control"
    CANARY = "canary"


def arm_of(request_id: str, *, share: float, salt: str = "") -> CanaryVariant:
    """Return a request's variant; `share` (0 to 1) of all ids are the canary's. Another `salt` draws anew."""
    digest = blake2b(request_id.encode(), digest_size=_HASH_BYTES, key=salt.encode()[:64]).digest()
    return CanaryVariant.CANARY if int.from_bytes(digest, "big") < share * _HASH_RANGE else CanaryVariant.CONTROL


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


class Moments(NamedTuple):
    """`seen` values of a figure, their running `mean` and sum of squared deviations."""

    seen: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_value(self, value: float) -> Moments:
        seen = self.seen + 1
        gap = value - self.mean
        mean = self.mean + gap / seen
        return Moments(seen, mean, self.squares + gap * (value - mean))

    @property
    def error_squared(self) -> float:
        """The squared standard error of the mean; without a bound below two values."""
        return self.squares / (self.seen - 1) / self.seen if self.seen > 1 else inf

    @property
    def interval(self) -> Interval:
        if self.seen < 2:
            return Interval(-inf, inf)
        half = _t_975(self.seen - 1) * sqrt(self.error_squared)
        return Interval(self.mean - half, self.mean + half)


class Figures(NamedTuple):
    """Figures of one variant. Acceptance is accepted / drafted tokens, a figure of each request that had drafts;
    agreement the share of a request's tokens that are the target's own choice behind what is before them."""

    ttft_ms: Moments = Moments()
    tpot_ms: Moments = Moments()
    acceptance: Moments = Moments()
    agreement: Moments = Moments()


def observe_request_figures(
    figures: Figures,
    *,
    ttft_ms: float | None,
    tpot_ms: float | None,
    acceptance: float | None,
    agreement: float | None = None,
) -> Figures:
    """Take in a request that ended; None where a figure does not exist (one token has no TPOT)."""
    return Figures(
        figures.ttft_ms if ttft_ms is None else figures.ttft_ms.with_value(ttft_ms),
        figures.tpot_ms if tpot_ms is None else figures.tpot_ms.with_value(tpot_ms),
        figures.acceptance if acceptance is None else figures.acceptance.with_value(acceptance),
        figures.agreement if agreement is None else figures.agreement.with_value(agreement),
    )


def difference(canary: Moments, control: Moments) -> Interval:
    """Return the interval of canary less control (Welch); everything where either has fewer than two values."""
    if canary.seen < 2 or control.seen < 2:
        return Interval(-inf, inf)
    a, b = canary.error_squared, control.error_squared
    gap = canary.mean - control.mean
    if a + b == 0.0:
        return Interval(gap, gap)
    freedom = (a + b) ** 2 / (a * a / (canary.seen - 1) + b * b / (control.seen - 1))
    half = _t_975(freedom) * sqrt(a + b)
    return Interval(gap - half, gap + half)


class PromotionRule(NamedTuple):
    """When to decide. Nothing before `least_requests` of the canary. The canary is promoted where its TPOT is surely
    lower by `gain` (0.02: two percent of control's) and its TTFT not surely higher by `tolerance`. It is rolled back
    where either is surely higher by that, and where its agreement is surely below `least_agreement`; it is not promoted
    while that may be. It is rolled back too where after `most_requests` it is not surely better."""

    # ADR 0030: looked at with each doubling, 1 of 100 pairs of equal variants was promoted; each time, 3.
    least_requests: int = 50
    # ADR 0030: equal variants are undecided until then. Not tuned.
    most_requests: int = 2000
    # ADR 0030: without it 10 of 100 pairs of equal variants were promoted by chance, with it 1.
    gain: float = 0.02
    # Not tuned.
    tolerance: float = 0.05
    # ADR 0030. Not tuned.
    least_agreement: float = 0.95


class CanaryMove(StrEnum):
    GO_ON = "go_on"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


class Decision(NamedTuple):
    """What to do and why: a name of the figure, and the interval that it rests on: of canary less control, or of the
    canary's own agreement."""

    move: CanaryMove
    figure: str
    interval: Interval


def decide_canary(arms: Mapping[CanaryVariant, Figures], rule: PromotionRule) -> Decision:
    canary, control = arms.get(CanaryVariant.CANARY, Figures()), arms.get(CanaryVariant.CONTROL, Figures())
    tpot = difference(canary.tpot_ms, control.tpot_ms)
    ttft = difference(canary.ttft_ms, control.ttft_ms)
    requests = canary.ttft_ms.seen
    if requests < rule.least_requests or control.ttft_ms.seen < rule.least_requests:
        return Decision(CanaryMove.GO_ON, "requests", tpot)
    agreement = canary.agreement.interval
    if agreement.high < rule.least_agreement:
        return Decision(CanaryMove.ROLL_BACK, "agreement", agreement)
    if ttft.low > rule.tolerance * control.ttft_ms.mean:
        return Decision(CanaryMove.ROLL_BACK, "ttft_ms", ttft)
    if tpot.low > rule.tolerance * control.tpot_ms.mean:
        return Decision(CanaryMove.ROLL_BACK, "tpot_ms", tpot)
    agrees = agreement.low >= rule.least_agreement or not canary.agreement.seen
    if tpot.high < -rule.gain * control.tpot_ms.mean and agrees:
        return Decision(CanaryMove.PROMOTE, "tpot_ms", tpot)
    if requests >= rule.most_requests and not agrees:
        return Decision(CanaryMove.ROLL_BACK, "agreement", agreement)
    if requests >= rule.most_requests:
        return Decision(CanaryMove.ROLL_BACK, "tpot_ms", tpot)
    return Decision(CanaryMove.GO_ON, "tpot_ms", tpot)


def looks(requests: int, rule: PromotionRule) -> bool:
    """Return whether to look for a promotion, with so many requests in the variant that has fewer: at `least_requests`,
    twice, four times as many and so on. Whoever looks after every request finds a chance interval that says yes sooner
    or later. To roll back for one costs nothing but the trial, so that is looked for always."""
    times, rest = divmod(requests, rule.least_requests)
    return rest == 0 and times > 0 and times & (times - 1) == 0


def _t_975(freedom: float) -> float:
    if freedom < len(_T_975) + 1:
        return _T_975[max(int(freedom), 1) - 1]  # freedom downwards: the wider interval
    return _T_SERIES[0] + _T_SERIES[1] / freedom + _T_SERIES[2] / freedom**2
