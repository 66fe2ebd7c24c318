"""Which replicas of a small pool rest, as the others make more without them. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.daemon.control.replicas.replicas import Replica
from policies.serving.replica_load import FELT_COMPANY, SharedPaces, reckon_tpot_ms
from policies.serving.working_set import MOST_MEMBERS, Member, choose_working

# Paces change with each round, and hardly within it. Bounds time. Those that began together end together, too, and so
# many follow: the most requests of this time and of as long before it are reckoned with.
_KEPT_S: Final = 1.0
# Who rests runs nothing, so nothing shows that company costs less than a busy moment made of it. Behind so long a rest
# it is learnt anew. ADR 0144: the second or three that this takes cost 1 % of what the others make.
_LONGEST_REST_S: Final = 30.0
_NONE: Mapping[str, str] = {}


class WorkingSet:
    """What was last found, for the replicas and the number of requests that it was found for."""

    def __init__(self) -> None:
        self._known: tuple[object, Mapping[str, str]] = (None, _NONE)
        self._until_s = 0.0
        self._most = (0, 0)  # requests, in the last whole time and in this one
        self._counted_until_s = 0.0
        self._rests_since_s: float | None = None

    def find_resting(
        self, replicas: Sequence[Replica], paces: SharedPaces, now_s: float, prefix: Sequence[int] = ()
    ) -> Mapping[str, str]:
        """Say of replicas why they take nothing while so many requests are there as of late. All of them would, and who
        remembers most of a prompt, given by its blocks' keys, takes that."""
        if not 1 < len(replicas) <= MOST_MEMBERS or all(replica.paces.company < FELT_COMPANY for replica in replicas):
            self._rests_since_s = None
            return _NONE
        requests = self._count_most(1 + sum(replica.standing.live for replica in replicas), now_s)
        known_for = (requests, *(replica.name for replica in replicas))
        if known_for != self._known[0] or now_s >= self._until_s:
            resting = self._end_long_rest(replicas, _find_resting(replicas, paces, requests), now_s)
            self._known, self._until_s = (known_for, resting), now_s + _KEPT_S
        resting = self._known[1]
        if not resting or not prefix:
            return resting
        cached = {replica.name: replica.prefixes.count_cached_tokens(prefix) for replica in replicas}
        most = max(tokens for name, tokens in cached.items() if name not in resting)
        return {name: why for name, why in resting.items() if cached[name] <= most}

    def _end_long_rest(
        self, replicas: Sequence[Replica], resting: Mapping[str, str], now_s: float
    ) -> Mapping[str, str]:
        """Return who rests on; nobody where they have rested for long, and what company costs is forgotten then."""
        if all(replica.standing.live for replica in replicas):
            self._rests_since_s = None  # whoever rests works all the same, as requests name its bits: it is measured
        elif resting and self._rests_since_s is None:
            self._rests_since_s = now_s
        elif self._rests_since_s is not None and now_s >= self._rests_since_s + _LONGEST_REST_S:
            for replica in replicas:
                replica.paces = replica.paces._replace(company=1.0)
            self._rests_since_s = None
            return _NONE
        return resting

    def _count_most(self, requests: int, now_s: float) -> int:
        before, now = self._most
        if now_s >= self._counted_until_s:
            before, now = now if now_s < self._counted_until_s + _KEPT_S else 0, 0
            self._counted_until_s = now_s + _KEPT_S
        self._most = before, max(now, requests)
        return max(self._most)


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
