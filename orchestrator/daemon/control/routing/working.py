"""Which replicas of a small pool rest, as the others make more without them. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.daemon.control.replicas.replicas import Replica
from policies.serving.replica_load import FELT_COMPANY, SharedPaces, reckon_tpot_ms
from policies.serving.working_set import MOST_MEMBERS, Member, choose_working

# Paces change with each round, and hardly within it. Bounds time.
_KEPT_S: Final = 1.0
_NONE: Mapping[str, str] = {}


class WorkingSet:
    """What was last found, for the replicas and the number of requests that it was found for."""

    def __init__(self) -> None:
        self._known: tuple[object, Mapping[str, str]] = (None, _NONE)
        self._until_s = 0.0

    def find_resting(self, replicas: Sequence[Replica], paces: SharedPaces, now_s: float) -> Mapping[str, str]:
        """Say of replicas why they take nothing while so many requests are there, and one more. All of them would."""
        if not 1 < len(replicas) <= MOST_MEMBERS or all(replica.paces.company < FELT_COMPANY for replica in replicas):
            return _NONE
        requests = 1 + sum(replica.standing.live for replica in replicas)
        known_for = (requests, *(replica.name for replica in replicas))
        if known_for != self._known[0] or now_s >= self._until_s:
            self._known, self._until_s = (known_for, _find_resting(replicas, paces, requests)), now_s + _KEPT_S
        return self._known[1]


def _find_resting(replicas: Sequence[Replica], paces: SharedPaces, requests: int) -> Mapping[str, str]:
    members = [_describe(replica, paces) for replica in replicas]
    working, made, whole = choose_working(members, requests)
    why = f"rests: for {requests} requests the others make {made:.0f} tokens/s without it, and {whole:.0f} with it"
    return {member.name: why for member in members if member.name not in working}


def _describe(replica: Replica, paces: SharedPaces) -> Member:
    standing, company = replica.standing, replica.paces.company
    group = paces.find_group(standing.alike)
    tpots_ms = [
        reckon_tpot_ms(
            replica.paces.plain.tpot_ms(sequences),
            paces.share_tpot_ms(group, standing.expected_pace, sequences),
            sequences,
        )
        for sequences in range(1, standing.places + 1)
    ]
    return Member(replica.name, tpots_ms, company if company >= FELT_COMPANY else 1.0)
