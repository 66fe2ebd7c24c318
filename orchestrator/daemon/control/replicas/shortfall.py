"""What is wanted and does not serve: replicas, standbys and draft workers that no worker can be had for. No effects.

Health (control.health) is about parts that failed under work. A worker that was refused has done none, and its device
and host may be well, so it is told by its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from orchestrator.daemon.control.port import DraftView, HealthView, MissingReplica, ReplicaView, StateView
from orchestrator.daemon.control.state import FAILED, READY, UNLOADED
from orchestrator.protocol.contract import ClusterMembers
from policies.serving.failover.health import Health

_STARTS_IN_VAIN = 2
"""So many workers in a row that never served are no accident. Not tuned."""

AWAY: Final = "away"
LOST: Final = "lost"
"""States of a cluster, and of a host of it."""
_LOST_WHY: Final = "it left Ray's cluster without a word; `outrider join` there brings it back"

OUT_REASONS: Final = {
    "failed": "is failed",
    "unlike": "is left out as unlike",
    "restarts": "is out of restarts",
    "host": "waits for its host",
    "server": "waits for its server",
    "slow": "has been loading for longer than expected",
}
"""Why a replica does not serve and will not soon, and how that is said of it."""


def list_wanted(view: StateView) -> list[ReplicaView]:
    """Return the replicas that are to serve, by plan or cluster.yaml; none of a model that a request loads."""
    return [replica for replica in view.replicas if not replica.standby and replica.phase != UNLOADED]


def list_missing(view: StateView) -> list[ReplicaView]:
    return [replica for replica in list_wanted(view) if replica.phase != READY]


def find_out_reason(replica: ReplicaView) -> str:
    """Return why a replica does not serve, and will not soon, as in OUT_REASONS; "" where it does, or will."""
    if replica.phase == FAILED:
        return "unlike" if replica.hindrance == "unlike" else "failed"
    if replica.hindrance in ("host", "server"):
        return replica.hindrance
    in_vain = replica.ready is None and replica.totals.restarts >= _STARTS_IN_VAIN
    return "restarts" if replica.spent or in_vain else replica.hindrance


def describe_missing(replica: ReplicaView, *, whole: bool = True) -> str:
    """Return what became of a replica, in a line: "target-1 is failed: no such device". Not `whole`: without the cause,
    which names hosts and paths."""
    became = OUT_REASONS.get(find_out_reason(replica), f"is {replica.phase}")
    return f"{replica.name} {became}{f': {replica.detail}' if replica.detail and whole else ''}"


def list_shortfall(view: StateView, *, whole: bool = True) -> list[str]:
    """Return in a line each what is to serve and does not. `whole`: see describe_missing."""
    unmet = [wish.why if whole else f"a configured replica {OUT_REASONS[wish.reason]}" for wish in view.unmet]
    return [*(describe_missing(replica, whole=whole) for replica in list_missing(view)), *unmet]


def count_out(view: StateView) -> dict[str, int]:
    """Return how many replicas do not serve, and will not soon, by each of OUT_REASONS."""
    reasons = [*map(find_out_reason, list_wanted(view)), *(wish.reason for wish in view.unmet)]
    return {reason: reasons.count(reason) for reason in OUT_REASONS}


def list_missing_of_plan(replicas: Iterable[ReplicaView], places: Mapping[int, int]) -> tuple[MissingReplica, ...]:
    """Return the replicas of a plan that are out. `places`: the number in the plan of each replica, by its own."""
    out = {places[replica.engine]: replica for replica in replicas if replica.engine in places}
    return tuple(
        MissingReplica(number, replica.name, describe_missing(replica), reason)
        for number, replica in sorted(out.items())
        if (reason := find_out_reason(replica))
    )


def judge_workers(
    replicas: Sequence[ReplicaView], drafts: Sequence[DraftView], refused: Mapping[str, str]
) -> list[HealthView]:
    """Return the workers that are out, by name, as parts that are not healthy. `replicas` with the standbys;
    `refused`: why standbys may not serve, by their names."""
    out = [(replica.name, replica.phase, replica.detail) for replica in replicas if find_out_reason(replica)]
    out += [(_name_draft(draft, drafts), draft.phase, draft.detail) for draft in drafts if draft.phase == FAILED]
    out += [(name, FAILED, why) for name, why in refused.items()]
    return [
        HealthView("worker", name, FAILED if phase == FAILED else Health.OPEN.value, why, 0.0)
        for name, phase, why in out
    ]


def judge_cluster(away: str, members: ClusterMembers | None) -> list[HealthView]:
    """Return a cluster whose head is `away`, and the hosts that it lost, as parts that are not healthy."""
    head = [HealthView("cluster", members.address if members is not None else "ray", AWAY, away, 0.0)] if away else []
    lost = members.lost if members is not None else ()
    return head + [HealthView("host", address, LOST, _LOST_WHY, 0.0) for address in lost]


def _name_draft(draft: DraftView, drafts: Sequence[DraftView]) -> str:
    several = sum(other.name == draft.name for other in drafts) > 1
    return f"{draft.name} {draft.number}" if several else draft.name
