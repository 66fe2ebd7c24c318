"""What a plan is for: the target, its possible drafters, the load, and what the operator demands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from device_profiles.profile import Exactness


class Objective(StrEnum):
    """What the best plan has most of (policies/planning/merit.py has the formulas)."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as far as placing goes. `hidden_bytes`: what one row sends from one layer shard to the next."""

    name: str
    layers: int
    hidden_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A way to draft. `model`: None where no model is run (drafts from the text itself, on the target's host).

    `acceptance[i]`: the chance that draft i is accepted if all before it are (the last goes on). `coverage`: the share
    of rounds in which it has a proposal at all. `offered[i]`: the share of all rounds that have a token at place i of
    the draft, as left by a rule that drops what is not worth a row. The last goes on; empty: all places of a proposal
    have one. `changes`: the share of one sequence's rounds that run another number of rows than the one before.
    `by_policy`: these are figures of a policy that chooses depths itself, up to the deepest that is allowed. With a
    lower bound they would be others, so they are looked at with that bound only. `runtime`: all this is so of targets
    in this runtime, whose costs decide which drafts are worth their rows; others do not use it ("": of any).
    `token_ms`: what drafting one token for one sequence takes where no model is run. `max_depth`: the most it can
    propose, 0 where only the workload bounds it.
    """

    name: str
    acceptance: tuple[float, ...]
    model: ModelFacts | None = None
    coverage: float = 1.0
    offered: tuple[float, ...] = ()
    changes: float = 0.0
    token_ms: float = 0.0
    max_depth: int = 0
    by_policy: bool = False
    runtime: str = ""

    def serves(self, runtime: str) -> bool:
        return self.runtime in ("", runtime)


@dataclass(frozen=True, slots=True)
class Workload:
    """The load to plan for: so many requests at once, each of so many prompt (at least one) and output tokens.
    `max_running`: sequences that a replica decodes at once, None where memory alone bounds them. `kv_cache_bytes`: what
    a target is loaded with, of all layers, where there is room for it (0: not known). `drafts_read_all`: draft models
    read whole prompts, as they do at a fixed depth."""

    target: ModelFacts
    drafters: tuple[DrafterFacts, ...] = ()
    concurrency: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 256
    exactness: Exactness = Exactness.BIT
    depth_bound: int = 12
    max_running: int | None = None
    kv_cache_bytes: int = 0
    drafts_read_all: bool = False

    def bound_running(self, requests: int) -> int:
        """Return how many of so many requests run at once on a replica that has room for all."""
        return requests if self.max_running is None else min(requests, self.max_running)


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the operator demands. Device and host names may both stand where `pin`, `exclude` and `apart` name places.

    `pin_target`, `pin_draft`: only these may host that role. `exclude`: these host nothing. `apart`: draft and target
    share no `device`, `host` or `zone`. `zones`: only these (empty: all). `sharding`: `when_needed` cuts the target
    into layer shards only where no device can hold it. `shards`: so many exactly, 0 leaves it to the plan, at most
    `max_shards`. `one_host`: the shards of a target are on one. `shard_runtimes`: these alone run shards (empty: all).
    `max_replicas`: how many targets may be placed; all on the same terms. `min_replicas`: how many are, where there is
    room, though fewer would be as good. `alike`: all are of one group of equal bits. `standby`: name a standby for the
    target. `keep_free`: the share of memory that stays free.
    """

    pin_target: tuple[str, ...] = ()
    pin_draft: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    apart: Literal["", "device", "host", "zone"] = ""
    replicas_apart: Literal["device", "host", "zone"] = "device"
    zones: tuple[str, ...] = ()
    sharding: Literal["when_needed", "allowed", "never"] = "when_needed"
    shards: int = 0
    # Bounds time (ADR 0025).
    max_shards: int = 16
    one_host: bool = False
    shard_runtimes: tuple[str, ...] = ()
    max_replicas: int = 1
    min_replicas: int = 1
    alike: bool = False
    standby: bool = True
    # As KEPT_FREE of policies.models.device_layers.
    keep_free: float = 0.05


@dataclass(frozen=True, slots=True)
class TermWeights:
    """What each term of the score weighs; only their ratios count.

    `indifference`: the share of what the objective counts that may be given up for a better score; 0: the score
    decides between plans that are predicted to be equally good.
    """

    compute_headroom: float = 1.0
    bandwidth_headroom: float = 1.0
    memory_fit: float = 1.0
    link_cost: float = 1.0
    health: float = 1.0
    idle_share: float = 1.0
    queue_depth: float = 1.0
    efficiency: float = 0.5
    indifference: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanGoal:
    """All of it. `currency`: the word for the units of all prices. `client_host`: where requests come in and tokens are
    streamed from, "" where that is not known."""

    workload: Workload
    constraints: Constraints = field(default_factory=Constraints)
    weights: TermWeights = field(default_factory=TermWeights)
    objective: Objective = Objective.THROUGHPUT
    currency: str = "USD"
    client_host: str = ""
