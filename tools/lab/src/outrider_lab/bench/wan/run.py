"""The pairs and links of `outrider bench wan`, and what is said of them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.worker.measuring.prompts import OWN_PROMPTS, PromptText
from outrider_lab.bench.overlap.measure import OverlapPair
from outrider_lab.bench.wan.measure import measure_link

RTT_MS = 12.0
"""The round trip that the summary is of, where it was measured."""

FORMULAS = {
    "tokens_per_s": "tokens / time from the request at the client to the last token at the client, over whole answers",
    "vs_plain_from_edge": "overlapped / plain, target at the centre, draft and client at the edge; of the summary: the "
    "smallest of all pairs at its round trip",
    "vs_sequential": "overlapped / drafts made before each verification, over the same link; of the summary: the "
    "smallest",
    "reverse_vs_plain": "overlapped / plain, target and client at the edge, draft at the centre; of the summary: the "
    "smallest",
    "bytes_per_token": "bytes over the draft's link in both directions, with encryption / tokens, overlapped; of the "
    "summary: the largest",
    "worst_vs_plain": "the smallest overlapped / plain of all round trips",
}
BARS = {"vs_plain_from_edge": 1.5, "vs_sequential": 1.0, "worst_vs_plain": 0.97}


def measure_wan(
    pairs: Sequence[tuple[OverlapPair, Sequence[float]]],
    max_tokens: int,
    tell: Callable[[str], object],
    texts: Sequence[PromptText] = OWN_PROMPTS,
) -> dict[str, Any]:
    """Return `summary`, `rows`, `formulas` and `bars` of pairs, each over links of some round trips; `tell` hears of
    each. Raises BenchError, AdapterError."""
    rows = []
    for pair, rtts_ms in pairs:
        for rtt_ms in rtts_ms:
            named = ", ".join(f"{name} {value}" for name, value in pair.stated)
            tell(f"{named}, a round trip of {rtt_ms:g} ms")
            rows.append(measure_link(pair, rtt_ms, texts, max_tokens))
    return {"summary": summarise_wan(rows), "rows": rows, "formulas": FORMULAS, "bars": BARS}


def summarise_wan(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all pairs at RTT_MS, or at the longest round trip where nothing was measured there."""
    rtts_ms = {row["rtt_ms"] for row in rows}
    rtt_ms = RTT_MS if RTT_MS in rtts_ms else max(rtts_ms)
    there = [row for row in rows if row["rtt_ms"] == rtt_ms]
    return {
        "rtt_ms": rtt_ms,
        "vs_plain_from_edge": min(row["vs_plain_from_edge"] for row in there),
        "vs_sequential": min(row["vs_sequential"] for row in there),
        "reverse_vs_plain": min(row["reverse_vs_plain"] for row in there),
        "bytes_per_token": max(row["bytes_per_token"] for row in there),
        "worst_vs_plain": min(row["vs_plain_from_edge"] for row in rows),
        "identical": all(row["identical"] for row in rows),
    }
