"""Service level objectives, and which requests meet them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from device_profiles.units import MS_PER_S
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.traffic.outcome import Outcome

NAMES = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """Read `ttft=500,tpot=50` (milliseconds). Raises BenchError naming the wrong part."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in NAMES or name in found:
            raise BenchError(f"--slo {part!r}: write each of {', '.join(NAMES)} at most once, as in ttft=500,tpot=50")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not 0.0 < found[name] < math.inf:
            raise BenchError(f"--slo {part!r}: {value!r} is not a number of milliseconds above 0")
    return found


def meets(outcome: Outcome, slo: Mapping[str, float]) -> bool | None:
    """Return whether a request met every objective, or None where its missing token count leaves that open.

    A failed request meets none. Where there is one token, there is no TPOT, and its objective is met.
    """
    if outcome.error:
        return False
    measured = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.latency_s}
    if any(value is not None and value * MS_PER_S > slo.get(name, math.inf) for name, value in measured.items()):
        return False
    if "ttft" in slo and outcome.ttft_s is None:
        return False
    return None if "tpot" in slo and outcome.generated is None else True
