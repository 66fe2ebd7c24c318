"""The values of a plan: what it chooses from, what it is for, and what came out.

Glossary:
    option     one way to run one model on a kind of device: runtime, number format, threads, and what it costs
    candidate  a way to place the target (and its draft) that was looked at
    shard      a contiguous range of a model's layers on one device
    replica    one whole target, in one or more shards, with its draft
    standby    where a replica goes when its target is lost
"""

from policies.planning.plan.diff import PlanDiff as PlanDiff
from policies.planning.plan.diff import diff as diff
from policies.planning.plan.hardware import DefaultLinks as DefaultLinks
from policies.planning.plan.hardware import Device as Device
from policies.planning.plan.hardware import EndBytes as EndBytes
from policies.planning.plan.hardware import Host as Host
from policies.planning.plan.hardware import Inventory as Inventory
from policies.planning.plan.hardware import Option as Option
from policies.planning.plan.hardware import Role as Role
from policies.planning.plan.hardware import Source as Source
from policies.planning.plan.result import DraftPlacement as DraftPlacement
from policies.planning.plan.result import Memory as Memory
from policies.planning.plan.result import NoPlan as NoPlan
from policies.planning.plan.result import Plan as Plan
from policies.planning.plan.result import Prediction as Prediction
from policies.planning.plan.result import RejectedCandidate as RejectedCandidate
from policies.planning.plan.result import ReplicaPlacement as ReplicaPlacement
from policies.planning.plan.result import Score as Score
from policies.planning.plan.result import Shard as Shard
from policies.planning.plan.result import Standby as Standby
from policies.planning.plan.result import Term as Term
from policies.planning.plan.wanted import Constraints as Constraints
from policies.planning.plan.wanted import DrafterFacts as DrafterFacts
from policies.planning.plan.wanted import ModelFacts as ModelFacts
from policies.planning.plan.wanted import Objective as Objective
from policies.planning.plan.wanted import PlanGoal as PlanGoal
from policies.planning.plan.wanted import TermWeights as TermWeights
from policies.planning.plan.wanted import Workload as Workload
