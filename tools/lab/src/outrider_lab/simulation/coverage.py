"""What of the simulator was compared with real runs, so that every output can say what was not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.fleet import Fleet

VALIDATED_FAULTS: Final = frozenset({"kill_worker", "cut_link"})
_MOST_REPLICAS, _MOST_PLACES = 2, 16


def list_unvalidated(fleet: Fleet, faults: Sequence[Fault] = ()) -> list[str]:
    """Return what in this simulation no real run was compared with (`outrider simulate --validate`), a line each."""
    kinds = {one.kind.name: one.kind for one in fleet.replicas}.values()
    found = []
    stated = [one.name for one in kinds if one.source != "measured"]
    if stated:
        found.append(f"costs from datasheets: {', '.join(stated)}")
    if len(fleet.replicas) > _MOST_REPLICAS:
        found.append(f"{len(fleet.replicas):,} replicas (validated with up to {_MOST_REPLICAS})")
    if any(one.draft is not None for one in kinds):
        found.append("draft workers")
    if any(one.places > _MOST_PLACES for one in kinds):
        found.append(f"more than {_MOST_PLACES} sequences at a time")
    if len({one.group for one in kinds}) > 1 and any(one.max_depth for one in kinds):
        found.append("drafts in groups of unlike bits")
    if any(one.standby for one in fleet.replicas):
        found.append("standbys")
    others = sorted({fault.kind for fault in faults} - VALIDATED_FAULTS)
    if others:
        found.append(f"faults: {', '.join(others)}")
    return found
