"""What is different between two plans: the one that runs and one that is proposed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from device_profiles.units import human_bytes
from policies.planning.plan.result import Plan, ReplicaPlacement, Shard


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `part`: what it is about ("replica 0 target", "replica 0 depth", "standby"). `before` and
    `after` are texts for people, empty where there is nothing. `restart`: whether a worker has to be started anew."""

    part: str
    kind: Literal["added", "removed", "changed"]
    before: str
    after: str
    restart: bool


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All differences, and what they are predicted to bring: tokens per second of all streams, what a million tokens
    cost and what energy a token takes, before and after (0 where not known)."""

    changes: tuple[Change, ...]
    before_tokens_per_s: float
    after_tokens_per_s: float
    before_cost_per_million_tokens: float = 0.0
    after_cost_per_million_tokens: float = 0.0
    before_joules_per_token: float = 0.0
    after_joules_per_token: float = 0.0

    @property
    def gain(self) -> float:
        """Relative gain in predicted tokens per second; infinite where nothing was predicted before."""
        if not self.before_tokens_per_s:
            return float("inf") if self.after_tokens_per_s else 0.0
        return self.after_tokens_per_s / self.before_tokens_per_s - 1.0


def diff(before: Plan, after: Plan, missing: Collection[int] = ()) -> PlanDiff:
    """Return what would change; predictions alone are no change. `missing`: the replicas of `before`, by their numbers,
    that do not run."""
    remaining = [(number, replica) for number, replica in enumerate(before.replicas) if number not in missing]
    before = replace(before, replicas=tuple(replica for _, replica in remaining))
    old, new = _list_parts(before, remaining), _list_parts(after, enumerate(after.replicas))
    changes = []
    for part in {**old, **new}:
        left, right = old.get(part, ""), new.get(part, "")
        if left != right:
            kind: Literal["added", "removed", "changed"] = (
                "changed" if left and right else "added" if right else "removed"
            )
            changes.append(Change(part, kind, left, right, restart=not part.endswith(("depth", "standby"))))
    return PlanDiff(
        tuple(changes),
        before.goodput_tokens_per_s,
        after.goodput_tokens_per_s,
        before.cost_per_million_tokens,
        after.cost_per_million_tokens,
        before.joules_per_token,
        after.joules_per_token,
    )


def _list_parts(plan: Plan, replicas: Iterable[tuple[int, ReplicaPlacement]]) -> dict[str, str]:
    parts = {"model": plan.target}
    for index, replica in replicas:
        parts |= {f"replica {index} {name}": text for name, text in _replica(replica).items()}
    if plan.standby is not None:
        parts["standby"] = "; ".join(_shard(shard) for shard in plan.standby.shards)
    return parts


def _replica(replica: ReplicaPlacement) -> dict[str, str]:
    parts = {"target": "; ".join(_shard(shard) for shard in replica.shards), "depth": str(replica.depth)}
    if replica.draft is not None:
        where = f" on {_shard(replica.draft.shard)}" if replica.draft.shard is not None else ""
        how = ", beside the target" if replica.draft.overlap else ""
        parts["draft"] = f"{replica.draft.drafter}{where}{how}"
    if replica.kv_cache_bytes:
        parts["KV cache"] = human_bytes(replica.kv_cache_bytes)
    return parts


def _shard(shard: Shard) -> str:
    threads = f", {shard.threads} threads" if shard.threads else ""
    return f"{shard.device} {shard.runtime} {shard.weights}, layers {shard.first_layer}-{shard.end_layer - 1}{threads}"
