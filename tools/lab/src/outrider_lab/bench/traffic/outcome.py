"""One request as the client saw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from device_profiles.units import MS_PER_S
from outrider_lab.bench.errors import BenchError

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Outcome:
    """Times are seconds from the start of the run.

    `number` is the request's place in the run. `arrival_s` is what latencies are measured from: the scheduled arrival
    in an open loop, the sending in a closed one. `chunks_s` are the times of the events with text, `last_s` that of
    the last event with a choice. Token counts are the server's own (`usage`), None where it gave none. `changes`: how
    often it says that the bits changed. `done`: the
    end mark came; what happens to the connection after it is no failure. `error` is the kind of failure, "" for none.
    """

    key: str
    category: str
    number: int = 0
    arrival_s: float = 0.0
    sent_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int | None = None
    generated: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    changes: int = 0
    done: bool = False
    finish: str = ""
    text: str = ""
    error: str = ""
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """First text - arrival."""
        return self.chunks_s[0] - self.arrival_s if self.chunks_s else None

    @property
    def latency_s(self) -> float:
        """Last event with a choice - arrival."""
        return self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (n - 1); None for one token, without text, or where nobody counted."""
        if self.ttft_s is None or self.generated is None or self.generated < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.generated - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between events with text."""
        return [later - earlier for earlier, later in zip(self.chunks_s, self.chunks_s[1:], strict=False)]

    def fail(self, kind: str, message: str) -> None:
        """Note the first thing that went wrong before the end; the message on one line."""
        if not self.error and not self.done:
            self.error, self.message = kind, " ".join(message.split())[:300]


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
