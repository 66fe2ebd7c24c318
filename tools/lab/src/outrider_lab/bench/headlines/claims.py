"""The claims of the product's brief, and how a measured figure is set beside each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["share", "times", "percent"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim by its name. It is shown by a value of `bar` or more, or where `above` is set by more than it. `unit`:
    `share` is a part by which something falls, `times` a ratio, `percent` a rate."""

    name: str
    wanted: str
    bar: float
    unit: Unit
    above: bool = False

    def is_met(self, value: float) -> bool:
        """Return whether a value shows the claim."""
        return value > self.bar if self.above else value >= self.bar

    def format(self, value: float) -> str:
        """Return a value in the words of the claim."""
        if self.unit == "share":
            return f"{-value:+.0%}"
        return f"{value:.2f}x" if self.unit == "times" else f"{value:.0%}"


CLAIMS = (
    Claim("latency, draft as it is", "-44 % per-token latency with a draft as it is", 0.44, "share"),
    Claim("latency, 4-bit draft", "-63 % per-token latency with a draft of 4-bit weights", 0.63, "share"),
    Claim("p90 latency", "the p90 of per-token latency falls, too", 0.0, "share", above=True),
    Claim("acceptance", "68 to 85 % of the draft's tokens are accepted", 0.68, "percent"),
    Claim("one device", "2 to 3 times the tokens/s on one device", 2.0, "times"),
    Claim("structured output", "2.3 times the tokens/s on structured output", 2.3, "times"),
    Claim("slow link", "85 -> 48 ms a token over a round trip of 12 ms (-44 %)", 1.0 - 48.0 / 85.0, "share"),
    Claim("cost", "-30 % cost of a token", 0.30, "share"),
    Claim("cluster", "more tokens/s than the cluster's best single device", 1.0, "times", above=True),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured for a claim, by which command. `value` None: nothing was, and `why` says the reason. `note`
    says what stands for what, and whatever else is to be known of the figure."""

    command: str
    value: float | None = None
    figures: str = ""
    note: str = ""
    why: str = ""


def set_beside(claims: Sequence[Claim], found: Mapping[str, Finding]) -> list[dict[str, Any]]:
    """Return an object for each claim: `claim`, `wanted`, `measured`, `command`, `shown` (true, false, or why it cannot
    be shown here), the figures behind them, and `misses_by` (None: by nothing, or it is not known)."""
    return [_describe(claim, found.get(claim.name, Finding("", why="it was not measured"))) for claim in claims]


def _describe(claim: Claim, found: Finding) -> dict[str, Any]:
    value = found.value
    met = value is not None and claim.is_met(value)
    measured = None if value is None else f"{claim.format(value)}{f' ({found.figures})' if found.figures else ''}"
    return {
        "claim": claim.name,
        "wanted": claim.wanted,
        "measured": measured,
        "command": found.command,
        "shown": found.why if value is None else met,
        "value": value,
        "bar": claim.bar,
        "misses_by": None if value is None or met else claim.bar - value,
        "note": found.note,
    }
