"""The figures of `outrider bench policy`, and how each of them comes about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from outrider_lab.bench.policy.arms import ADAPTIVE, CONTROL, PLAIN
from outrider_lab.bench.policy.replays import HINDSIGHT, STEPS, steady_rate
from outrider_lab.bench.policy.requests import MIX
from outrider_lab.bench.policy.session import Cell, ComparisonResult, PolicyVariant, adaptive_cells
from outrider_lab.replay.run import Replay

Mixes = Mapping[tuple[int | str, str], Mapping[str, Replay]]
FORMULAS = {
    "tokens_per_s": "tokens / seconds of rounds that only decode while all places are taken, drafting and policy "
    "included",
    "worst_vs_plain": "least adaptive / plain tokens/s over categories, concurrencies and kinds of drafters, the two "
    "in turns of 9 rounds, of which 8 count; the worst cells below 0.97 are run again, eight times, and the median "
    "ratio counts; of a replay alone, the replayed one",
    "vs_hindsight": "replayed: time for a token with the best fixed depth of each request / adaptive's, over the whole "
    "mix: all categories, concurrencies and kinds of drafters",
    "policy_us_per_round": "mean processor time of asked + decided + observed over the rounds of the real loop, at the "
    "most sequences; 0 in rounds that the policy does without",
    "identical": "all outputs of all variants are plain decoding's, token for token, greedy and seeded",
}
BARS = {
    "worst_vs_plain": ">= 0.97",
    "vs_hindsight": ">= 0.95",
    "policy_us_per_round": "< 50 at 16",
    "identical": "yes",
}


def cell_rows(found: ComparisonResult, replayed: Mapping[tuple[str, int, str], float]) -> list[dict[str, Any]]:
    """Return a row for each category, concurrency and kind of drafter."""
    return [
        {
            "category": cell.category,
            "concurrency": cell.concurrency,
            "drafter": arm.kind,
            **_pair_values(found, cell, arm),
            "replayed_ratio": replayed.get((cell.category, cell.concurrency, arm.kind)),
        }
        for cell, arm in adaptive_cells(found)
    ]


def _pair_values(found: ComparisonResult, cell: Cell, arm: PolicyVariant) -> dict[str, Any]:
    """Return what a policy came to beside plain decoding; but for the ratio, the first time that it ran."""
    pairs = found.pairs[cell, arm]
    first = pairs[0]
    return {
        "plain_tokens_per_s": first.plain.tokens_per_s,
        "tokens_per_s": first.own.tokens_per_s,
        "ratio": found.ratio(cell, arm),
        "ratios": [pair.ratio for pair in pairs],
        "acceptance_rate": first.own.acceptance,
        "mean_depth": first.own.mean_depth,
    }


def control_ratios(found: ComparisonResult) -> list[float]:
    """Return plain over plain runs beside it: what the machine alone makes of the same work."""
    return [found.ratio(cell, arm) for cell, arm in found.pairs if arm.policy == CONTROL]


def sample_rows(found: ComparisonResult) -> list[dict[str, Any]]:
    """Return the real runs over the mix: every policy that ran, beside plain."""
    return [
        {
            "concurrency": STEPS if cell.steps else cell.concurrency,
            "policy": arm.policy,
            **_pair_values(found, cell, arm),
        }
        for cell, arm in sorted(found.pairs, key=lambda place: (place[0].steps, place[0].concurrency))
        if cell.category == MIX
    ]


def mix_rows(mixes: Mixes) -> list[dict[str, Any]]:
    """Return a row for each replay of the mix."""
    return [
        {
            "concurrency": load,
            "drafter": kind,
            "policy": policy,
            "tokens": one.tokens,
            "seconds": one.ms / 1000.0,
            "tokens_per_s": steady_rate(one, load),
            "vs_plain": steady_rate(one, load) / steady_rate(found[PLAIN], load),
        }
        for (load, kind), found in mixes.items()
        for policy, one in found.items()
    ]


def against(mixes: Mixes, other: str, load: int | str | None = None) -> float:
    """Return another policy's time for a token over adaptive's, at a load, or over all; all kinds of drafters."""
    chosen = [(own, found) for (own, _), found in mixes.items() if load in (None, own)]
    times = [[1.0 / steady_rate(found[name], own) for own, found in chosen] for name in (other, ADAPTIVE)]
    return sum(times[0]) / sum(times[1])


def load_rows(mixes: Mixes) -> list[dict[str, Any]]:
    """Return adaptive against the others at each load."""
    return [
        {
            "concurrency": load,
            "vs_plain": against(mixes, PLAIN, load),
            "vs_hindsight": against(mixes, HINDSIGHT, load),
        }
        for load in dict.fromkeys(load for load, _ in mixes)
    ]


def policy_us(found: ComparisonResult) -> tuple[float | None, int]:
    """Return what the policy takes in a round with the most sequences that were seen, and how many these are."""
    adaptive = [pair.own for (_, arm), pairs in found.pairs.items() if arm.policy == ADAPTIVE for pair in pairs]
    rounds = [one for visit in adaptive for one in visit.rounds]
    if not rounds:
        return None, 0
    most = max(one.sequences for one in rounds)
    return mean(one.policy_us for one in rounds if one.sequences == most), most


def summary_of(
    cells: Iterable[Mapping[str, Any]],
    replayed: Mapping[tuple[str, int, str], float],
    mixes: Mixes,
    found: ComparisonResult | None,
) -> dict[str, Any]:
    return {
        "worst_vs_plain": min([row["ratio"] for row in cells], default=min(replayed.values())),
        "vs_hindsight": against(mixes, HINDSIGHT),
        "policy_us_per_round": policy_us(found)[0] if found is not None else None,
        "identical": not found.mismatches if found is not None else None,
    }
