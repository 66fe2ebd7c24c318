"""The section `slo`: service level objectives, which requests are to meet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.section import Section

_HOUR_MS = 3_600_000


class SloSection(Section):
    """Service level objectives. While one is at risk, speculation, prefill and admission give way or gain, whichever
    helps; goodput is requests a second that meet all of them."""

    ttft_ms: float = Field(default=0.0, ge=0, le=_HOUR_MS)
    """The time to the first token that requests are to meet; 0 is no objective."""
    ttft_percentile: float = Field(default=95.0, ge=50, le=99.9)
    """So many of a hundred requests are to meet `slo.ttft_ms`."""
    tpot_ms: float = Field(default=0.0, ge=0, le=_HOUR_MS)
    """The time per output token behind the first that requests are to meet: a request's mean; 0 is no objective."""
    tpot_percentile: float = Field(default=95.0, ge=50, le=99.9)
    """So many of a hundred requests are to meet `slo.tpot_ms`."""
    max_round_ms: float = Field(default=0.0, ge=0, le=60_000)
    """The latency budget of a round that verifies. Drafts get the rows that are predicted to fit. Where not even all
    sequences fit, they take turns in groups of 8 or more, if these keep `slo.tpot_ms`. Turns cost throughput, since
    each reads the weights anew. 0 is no bound."""
    late: Literal["queue", "refuse"] = "queue"
    """What becomes of a request whose first token cannot be expected within `slo.ttft_ms`. `queue`: it is served, late.
    `refuse`: it is answered 429 with `Retry-After`, so that it can go elsewhere."""
