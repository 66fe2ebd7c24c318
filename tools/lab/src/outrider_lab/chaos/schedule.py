"""When which fault strikes. A pure function of the seed: the same seed breaks the same things at the same times."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_AT_S = 2.0
GAP_S = (3.0, 9.0)
QUIET_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How often a kind comes beside other kinds (`weight`), and for how long its faults hold before they are healed."""

    weight: int = 1
    shortest_s: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. `pick` chooses among the targets that there are then: from 0 up to, and without, 1."""

    number: int
    kind: str
    at_s: float
    hold_s: float
    pick: float


def plan_turns(seed: int, shapes: Mapping[str, Shape], count: int, targets: int) -> list[PlannedFault]:
    """Return faults that each begin when the one before is over, of each target in turn."""
    drawn = random.Random(f"turns {seed}")  # noqa: S311  # which fault comes when is no secret
    faults = []
    for number in range(count):
        kind = drawn.choice(sorted(shapes))
        hold_s = round(drawn.uniform(0.0, shapes[kind].longest_s), 3)
        faults.append(PlannedFault(number, kind, 0.0, hold_s, (number % targets + 0.5) / targets))
    return faults


def plan_faults(
    seed: int,
    shapes: Mapping[str, Shape],
    duration_s: float,
    gap_s: tuple[float, float] = GAP_S,
    *,
    first_at_s: float = FIRST_AT_S,
    quiet_end_s: float = QUIET_END_S,
) -> list[PlannedFault]:
    """Return the faults of a run, in their order. Each kind comes as often as its weight says, in rounds of all kinds.

    The last `quiet_end_s` are left free. Where there is room for one fault only, there is one.
    """
    drawn = random.Random(f"faults {seed}")  # noqa: S311  # which fault comes when is no secret
    names = sorted(shapes)
    found: list[PlannedFault] = []
    bag: list[str] = []
    at_s = first_at_s
    while names and (at_s <= duration_s - quiet_end_s or not found):
        if not bag:
            bag = [name for name in names for _ in range(shapes[name].weight)]
            drawn.shuffle(bag)
        kind = bag.pop()
        hold_s = round(drawn.uniform(shapes[kind].shortest_s, shapes[kind].longest_s), 3)
        found.append(PlannedFault(len(found), kind, round(at_s, 3), hold_s, drawn.random()))
        at_s += drawn.uniform(*gap_s)
    return found
