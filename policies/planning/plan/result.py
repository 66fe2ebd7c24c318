"""A plan: what runs where, what is predicted of it, and why everything else lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from device_profiles.units import MILLION, S_PER_HOUR
from policies.planning.plan.hardware import Source
from policies.planning.plan.wanted import Objective
from policies.planning.pool import PoolPrediction, predict_pool


class NoPlan(ValueError):
    """Nothing satisfies what was asked for; the message says why, and the way out."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one worker takes on one device, by parts."""

    fixed: int = 0
    weights: int = 0
    kv_cache: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.fixed + self.weights + self.kv_cache + self.workspace


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of a model's layers on one device: `first_layer` up to, not including, `end_layer`. A model
    that is not cut has one shard. `cores`: the numbers of the host's cores that are its own, empty: any. `group`: of
    equal bits, as of its Option. `ranks`: the ids of the devices over which its layers are split; `device` is the name
    of all of them then, and `memory` what they hold together."""

    device: str
    host: str
    profile: str
    runtime: str
    weights: str
    threads: int
    first_layer: int
    end_layer: int
    memory: Memory
    stage_ms: float
    cores: tuple[int, ...] = ()
    source: Source = "measured"
    group: str = ""
    ranks: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return self.ranks or (self.device,)


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    """Where drafts come from. `shard` is None where no model is run. `process`: `target` drafts in the target's worker,
    between its forwards; `own` in a worker of its own. `overlap`: whether it drafts while the target verifies."""

    drafter: str
    shard: Shard | None
    process: Literal["target", "own"]
    overlap: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of one replica, at the depth that it starts with.

    `goodput_tokens_per_s`: output tokens of all its streams per second, prefill included; `stream_tokens_per_s`: of
    each. `tpot_ms`: a round without prefill, per token. `tokens_per_round`: of each sequence, the target's own
    included. A round takes `round_ms`. It is made of `verify_ms`, `draft_ms` and `link_ms` as far as they do not
    overlap, and of `prefill_ms`, the share of the prompts of the requests that start in it. `sequences` run at once, in
    `micro_batches` that follow each other through the shards. `plain_tokens_per_s`: goodput at depth 0, without
    drafting. `error`: the relative error of the cost fits behind it. `joules_per_token` and
    `cost_per_million_tokens` (in currency units, of output tokens) are of the devices in use, and 0 where one of them
    tells no power or no price. `client_ms` of `ttft_ms` are the way between the API and the target.
    `requests`: its share of those that are there at once (None: as many as `sequences`); those beyond `sequences` wait,
    `wait_ms` on average. One without any is predicted with one.
    """

    goodput_tokens_per_s: float
    stream_tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    tokens_per_round: float
    round_ms: float
    verify_ms: float
    draft_ms: float
    link_ms: float
    prefill_ms: float
    depth: int
    sequences: int
    micro_batches: int
    plain_tokens_per_s: float
    error: float = 0.0
    joules_per_token: float = 0.0
    cost_per_million_tokens: float = 0.0
    client_ms: float = 0.0
    requests: int | None = None
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a score: its value of 0 (worst) to 1, its weight, and the figures behind it."""

    name: str
    value: float
    weight: float
    why: str


@dataclass(frozen=True, slots=True)
class Score:
    """The weighted mean of its terms, 0 to 1."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """The weighted mean; 0 where nothing has weight."""
        weight = sum(term.weight for term in self.terms)
        return sum(term.value * term.weight for term in self.terms) / weight if weight else 0.0


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """One target with its drafts. `depth`: what it starts with, 0 does not speculate. `kv_cache_bytes`: what a target
    in shards is loaded with, of all layers; 0: as configured."""

    shards: tuple[Shard, ...]
    draft: DraftPlacement | None
    depth: int
    prediction: Prediction
    score: Score
    load_s: float
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Standby:
    """Where a replica goes when its target (or one shard of it) is lost, and what is predicted then. `apart`: it is in
    another zone, on another host, or only another device. `free`: nothing of the plan runs on it, so that it may be
    loaded beforehand."""

    shards: tuple[Shard, ...]
    apart: Literal["device", "host", "zone"]
    free: bool
    prediction: Prediction
    why: str


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """What was not taken, and why. `what`: a device, an option on it, or a whole plan. The figures are as in
    Prediction, and 0 where they were not predicted."""

    what: str
    why: str
    role: str = ""
    goodput_tokens_per_s: float = 0.0
    cost_per_million_tokens: float = 0.0
    joules_per_token: float = 0.0
    tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole plan. `rejected` has at least one entry for every device and every option that is not in use.
    `objective`: what it has most of; `currency`: the word for the units of its prices."""

    target: str
    replicas: tuple[ReplicaPlacement, ...]
    standby: Standby | None
    rejected: tuple[RejectedCandidate, ...]
    reasons: tuple[str, ...] = ()
    objective: Objective = Objective.THROUGHPUT
    currency: str = "USD"

    @property
    def goodput_tokens_per_s(self) -> float:
        return self.pool.goodput_tokens_per_s

    @property
    def pool(self) -> PoolPrediction:
        return predict_pool([replica.prediction for replica in self.replicas])

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the replicas of each group of equal bits, by its name."""
        groups: dict[str, tuple[int, ...]] = {}
        for number, replica in enumerate(self.replicas):
            name = ", ".join(shard.group for shard in replica.shards)
            groups[name] = (*groups.get(name, ()), number)
        return groups

    @property
    def cost_per_million_tokens(self) -> float:
        """Predicted cost of a million output tokens of all replicas, in currency units; 0 where not known."""
        return self._mean([replica.prediction.cost_per_million_tokens for replica in self.replicas])

    @property
    def joules_per_token(self) -> float:
        """Predicted energy of an output token of any replica; 0 where not known."""
        return self._mean([replica.prediction.joules_per_token for replica in self.replicas])

    @property
    def price_per_hour(self) -> float:
        """What the devices in use cost an hour, in currency units; 0 where not known."""
        return self.cost_per_million_tokens * self.goodput_tokens_per_s * S_PER_HOUR / MILLION

    def _mean(self, values: list[float]) -> float:
        """Return the mean over all output tokens of what a token takes; 0 where a replica does not tell."""
        rates = [replica.prediction.goodput_tokens_per_s for replica in self.replicas]
        if not all(values) or not any(rates):
            return 0.0
        return sum(value * rate for value, rate in zip(values, rates, strict=True)) / self.goodput_tokens_per_s

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Every worker's part: targets and draft models."""
        targets = tuple(shard for replica in self.replicas for shard in replica.shards)
        drafts = (replica.draft.shard for replica in self.replicas if replica.draft is not None)
        return targets + tuple(shard for shard in drafts if shard is not None)
