"""The values of a plan: what it chooses from, what it is for, and what came out.

Glossary:
    option     one way to run one model on a kind of device: runtime, number format, threads, and what it costs
    candidate  a way to place the target (and its draft) that was looked at
    shard      a contiguous range of a model's layers on one device
    replica    one whole target, in one or more shards, with its draft
    standby    where a replica goes when its target is lost
"""

from policies.planning.plan.diff import PlanDiff, diff
from policies.planning.plan.hardware import DefaultLinks, Device, EndBytes, Host, Inventory, Option, Role, Source
from policies.planning.plan.result import (
    DraftPlacement,
    Memory,
    NoPlan,
    Plan,
    Prediction,
    RejectedCandidate,
    ReplicaPlacement,
    Score,
    Shard,
    Standby,
    Term,
)
from policies.planning.plan.wanted import (
    Constraints,
    DrafterFacts,
    ModelFacts,
    Objective,
    PlanGoal,
    TermWeights,
    Workload,
)

__all__ = [
    "Constraints",
    "DefaultLinks",
    "Device",
    "DraftPlacement",
    "DrafterFacts",
    "EndBytes",
    "Host",
    "Inventory",
    "Memory",
    "ModelFacts",
    "NoPlan",
    "Objective",
    "Option",
    "Plan",
    "PlanDiff",
    "PlanGoal",
    "Prediction",
    "RejectedCandidate",
    "ReplicaPlacement",
    "Role",
    "Score",
    "Shard",
    "Source",
    "Standby",
    "Term",
    "TermWeights",
    "Workload",
    "diff",
]
