"""Which cores of a host each worker of a plan gets: as many as it has threads, and none that another one has.

Cores of one physical core go together, since what runs on one takes time from the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreNeed:
    """What one worker runs: `threads`, on the cores that are `fixed` for it, or on any that are left."""

    threads: int
    fixed: tuple[int, ...] = ()


def split_cores(needs: Sequence[CoreNeed], groups: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """Return the cores of each worker, in the order of `needs`; () where it may run on any.

    `groups`: the usable cores of each physical core. Where these are too few, cores are given out one by one. Where
    even that does not do, nobody gets any but those that are fixed.
    """
    ordered = [tuple(sorted(group)) for group in groups if group]
    singles = [(core,) for group in ordered for core in group]
    for units in (ordered, singles):
        split = _give_out(needs, units)
        if split is not None:
            return split
    return [need.fixed for need in needs]


def _give_out(needs: Sequence[CoreNeed], units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
    taken = {core for need in needs for core in need.fixed}
    free = iter([unit for unit in units if not taken & set(unit)])
    parts: list[tuple[int, ...]] = []
    for need in needs:
        if need.fixed:
            parts.append(need.fixed)
            continue
        mine = [unit for _, unit in zip(range(need.threads), free, strict=False)]
        if len(mine) < need.threads:
            return None
        parts.append(tuple(sorted(core for unit in mine for core in unit)))
    return parts
