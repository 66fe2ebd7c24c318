"""Which draft tokens are worth their rows: the guard that makes speculation never cost speed.

A round of S sequences takes T(rows) and yields S + sum of the chances of the draft tokens in it. A token's chance is
that it *and all before it* are accepted. Over many rounds tokens per time are greatest when every round maximises

    tokens - value * time,   value = the tokens per ms that decoding makes on the average

(the average reward of a renewal process, Dinkelbach 1967), so a token is verified where its chance is above value *
(the time that its row adds). Chances fall along a draft, so taking the best tokens of all sequences first takes whole
beginnings of drafts, and the depths may all differ. Rows that are run anyway are free (policies/speculation/widths).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from operator import neg

from policies.speculation.cost_model import CostModel
from policies.speculation.widths import pad_to_width

# ADR 0028. Not tuned: of a draft of 12 such tokens 78 % are still believed, so certain drafts run to their bound.
MOST_CERTAIN = 0.98
_NEVER = 1e9  # above every chance
LEAST_CHANCE = 0.03
"""A token below it is never worth a row, however cheap rows seem to be. Not tuned: a wrong price is not to fill up a
forward with chances that hardly ever come true."""


def cumulate_acceptance(confidences: Sequence[float], factor: float, most: int, sure: int, floor: float) -> list[float]:
    """Return the chances, all before included, of a draft's leading tokens that may be worth a row.

    They are at most `most`: the first `sure` ones whatever their chance, then more while it is above `floor`. `factor`:
    see policies.speculation.odds. A drafter that is certain of a token is believed nearly as much (MOST_CERTAIN), so
    that outcomes can still correct it.
    """
    chances: list[float] = []
    chance, more = 1.0, factor - 1.0
    for confidence in confidences[:most]:
        believed = confidence if confidence < MOST_CERTAIN else MOST_CERTAIN
        chance *= believed * factor / (1.0 + believed * more)
        if chance <= floor and len(chances) >= sure:
            break
        chances.append(chance)
    return chances


def floor_of(cost: CostModel, rows: int, value: float) -> float:
    """Return the chance below which no token can be worth a row in a forward of at least `rows`."""
    return max(LEAST_CHANCE, value * cost.least_added_ms(rows))


def rank_candidates(cumulative_acceptance: Sequence[Sequence[float]], free: Sequence[int]) -> list[float]:
    """Return the chances of all tokens that take a row, the best first. `cumulative_acceptance[s]`: the chances of the
    tokens of sequence s (falling), of which the first `free[s]` take no row."""
    if any(free):
        candidates = [
            chance for chances, none in zip(cumulative_acceptance, free, strict=True) for chance in chances[none:]
        ]
    else:
        candidates = list(chain.from_iterable(cumulative_acceptance))
    candidates.sort(reverse=True)
    return candidates


def worth_taking(candidates: Sequence[float], added_ms: Sequence[float], value: float) -> int:
    """Return how many of the candidates are worth their rows, the best first. `added_ms[i]`: what row i beyond those
    that are run anyway adds; there are no more rows than that."""
    best = total = 0.0
    taken = 0
    for index, (chance, row_ms) in enumerate(zip(candidates, added_ms, strict=False), start=1):
        if chance < LEAST_CHANCE:
            break
        total += chance - value * row_ms
        if total > best:
            best, taken = total, index
    return taken


def allocate_depths(
    cumulative_acceptance: Sequence[Sequence[float]], free: Sequence[int], candidates: Sequence[float], taken: int
) -> list[int]:
    """Return the depths of the free tokens and the first `taken` candidates."""
    least = candidates[taken - 1] if taken else _NEVER
    equal = taken - bisect_left(candidates, -least, 0, taken, key=neg)  # of equal tokens the first sequences' are taken
    depths: list[int] = []
    for chances, none in zip(cumulative_acceptance, free, strict=True):
        depth = none if none < len(chances) else len(chances)
        for chance in chances[depth:] if depth else chances:
            if chance > least:
                depth += 1
            elif chance == least and equal:
                depth += 1
                equal -= 1
            else:
                break
        depths.append(depth)
    return depths


def allocate_depths_in_widths(
    cumulative_acceptance: Sequence[Sequence[float]],
    known: Sequence[int],
    widths: Sequence[int],
    added_ms: Sequence[float],
    value: float,
) -> list[int]:
    """Return depths where rows come in fixed widths: each sequence takes steps from one width to a wider one, the step
    with the most expected tokens per row first. `known[s]`: rows of sequence s before its draft. The rest
    as in `rank_candidates` and `worth_taking`."""
    steps = [
        (gain / rows, gain, rows, place, depth)
        for place, chances in enumerate(cumulative_acceptance)
        for gain, rows, depth in _steps(chances, known[place], widths)
    ]
    steps.sort(key=lambda step: -step[0])
    depths = [
        min(len(chances), pad_to_width(rows, widths) - rows)
        for chances, rows in zip(cumulative_acceptance, known, strict=True)
    ]
    best = total = 0.0
    used = taken = 0
    for index, (_, gain, rows, _, _) in enumerate(steps, start=1):
        if used + rows > len(added_ms):
            break
        total += gain - value * sum(added_ms[used : used + rows])
        used += rows
        if total > best:
            best, taken = total, index
    for _, _, _, place, depth in steps[:taken]:
        depths[place] = max(depths[place], depth)
    return depths


def _steps(chances: Sequence[float], known: int, widths: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return (expected tokens, rows, depth then) of each step, tokens per row falling: a step that is followed by a
    better one is taken together with it."""
    hull: list[tuple[float, int, int]] = []
    rows = pad_to_width(known, widths)
    depth = rows - known
    while depth < len(chances):
        wider = pad_to_width(rows + 1, widths)
        after = min(wider - known, len(chances))
        gain, more = sum(chances[depth:after]), wider - rows
        while hull and hull[-1][0] * more < gain * hull[-1][1]:
            before_gain, before_rows, _ = hull.pop()
            gain, more = gain + before_gain, more + before_rows
        hull.append((gain, more, after))
        rows, depth = wider, wider - known
    return hull
