"""What each candidate brings over plain decoding, how sure that is, and which one to configure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from device_profiles.units import MS_PER_S
from orchestrator.recommend.candidates import CHAIN, CONFIGURED
from orchestrator.recommend.record import Prompt, Record, tpot_ms

NONE = "none"
"""The candidate without drafts: plain decoding."""
CONTROL = "control"
"""Plain decoding once more: what it differs by from plain decoding is the machine's doing, not the drafts'."""
# Bars of docs/drafts.md: a chain within 0.95 of the best single draft, and never 3 % below plain.
ROUTER_BAR, PLAIN_BAR = 0.95, 0.97
FORMULAS = {
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1) over all requests with n > 1 tokens",
    "speed_up": "TPOT without drafts / TPOT with them",
    "interval": "95 % of the speed-ups of prompts drawn anew (bootstrap, percentiles, 2000 draws)",
    "acceptance_rate": "accepted / drafted tokens",
    "mean_acceptance_length": "1 + accepted / verification steps",
    "router_share": f"tokens/s of the chain / those of the best single draft of the category; bar {ROUTER_BAR}",
    "length_share": "mean acceptance length of the chain / the longest of a single draft: no time is in it",
    "control": "plain decoding once more, in turn: what its speed-up is off 1 is the machine's doing",
    "chain_vs_plain": f"tokens/s of the chain / those without drafts; bar {PLAIN_BAR}",
}
_DRAWS = 2000  # of the bootstrap. Not tuned.
_ENDS = (2.5, 97.5)  # percent


def bootstrap_interval(plain: Sequence[Record], other: Sequence[Record]) -> list[float] | None:
    """Return the 95 % interval of the speed-up over these prompts, or None where there are fewer than two.

    Both are resampled together, as they are of the same prompts: Efron and Tibshirani, "An Introduction to the
    Bootstrap", 1993, chapter 13 (percentile intervals).
    """
    if len(plain) < 2:
        return None
    drawn = np.random.default_rng(0).integers(0, len(plain), (_DRAWS, len(plain)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _draw_tpot(plain, drawn) / _draw_tpot(other, drawn)
    ratios = ratios[np.isfinite(ratios)]
    return [float(end) for end in np.percentile(ratios, _ENDS)] if ratios.size else None


def _draw_tpot(records: Sequence[Record], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the TPOT of each draw: what the prompts' tokens behind their first took, over how many they are."""
    several = [len(record.tokens) > 1 for record in records]
    took_s = np.array([record.last_s - record.first_s for record in records]) * several
    steps = np.array([len(record.tokens) - 1 for record in records]) * several
    drawn_s: np.ndarray[Any, Any] = took_s[drawn].sum(axis=1) / steps[drawn].sum(axis=1)
    return drawn_s


def describe_way(plain: Sequence[Record], records: Sequence[Record]) -> dict[str, Any]:
    stats = [record.stats for record in records if record.stats]
    drafted, accepted = sum(stat.drafted for stat in stats), sum(stat.accepted for stat in stats)
    taken_ms, steps = tpot_ms(records), sum(stat.steps for stat in stats)
    return {
        "tpot_ms": taken_ms,
        "tokens_per_s": MS_PER_S / taken_ms if taken_ms else 0.0,
        "speed_up": tpot_ms(plain) / taken_ms if taken_ms else 1.0,
        "interval": bootstrap_interval(plain, records),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1.0 + (accepted / steps if steps else 0.0),
        "drafted": drafted,
        "identical": all(stat.tokens == other.tokens for stat, other in zip(plain, records, strict=True)),
    }


def describe_categories(prompts: Sequence[Prompt], by_way: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """Return a row for each category: every candidate, the best single one with hindsight, and the chain beside it."""
    rows = []
    for category in sorted({prompt.category for prompt in prompts}):
        chosen = [number for number, prompt in enumerate(prompts) if prompt.category == category]
        some = {name: [records[number] for number in chosen] for name, records in by_way.items()}
        ways = {name: describe_way(some[NONE], records) for name, records in some.items()}
        rows.append({"category": category, "prompts": len(chosen), "ways": ways, **compare_chain(ways)})
    return rows


def compare_chain(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fastest single draft, and what the chain is beside it and none; None where there is no chain."""
    singles = [name for name in ways if name not in (NONE, CONTROL, CHAIN, CONFIGURED)]
    best = max(singles, key=lambda name: float(ways[name]["tokens_per_s"]), default=NONE)
    chain, plain = ways.get(CHAIN), ways[NONE]["tokens_per_s"]
    of_best = ways[best]["tokens_per_s"]
    longest = max((float(ways[name]["mean_acceptance_length"]) for name in singles), default=1.0)
    return {
        "best_single": best,
        "length_share": chain["mean_acceptance_length"] / longest if chain else None,
        "router_share": chain["tokens_per_s"] / of_best if chain and of_best else None,
        "chain_vs_plain": chain["tokens_per_s"] / plain if chain and plain else None,
    }


def choose_drafts(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the candidate to configure: the fastest of those whose interval is above 1, else none. `alike`: others
    that pay, and whose interval reaches its speed-up."""
    drafting = {name: way for name, way in ways.items() if name not in (NONE, CONTROL)}
    paying = {name: way for name, way in drafting.items() if way["interval"] is not None and way["interval"][0] > 1.0}
    if not paying:
        return {"name": NONE, "speed_up": 1.0, "interval": None, "alike": []}
    name = max(paying, key=lambda candidate: float(paying[candidate]["speed_up"]))
    best = paying[name]
    alike = [other for other, way in paying.items() if other != name and way["interval"][1] >= best["speed_up"]]
    return {"name": name, "speed_up": best["speed_up"], "interval": best["interval"], "alike": alike}
