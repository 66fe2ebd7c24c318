"""Control's events, from its workers and its callers: plain values, which control.step folds into the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.streams.overrides import NO_OVERRIDES, ActiveOverrides
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Event
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.blame import LossKind
from policies.serving.failover.health import Health
from policies.serving.failover.standby import NO_RULES, FailoverRules, Readiness


@dataclass(frozen=True, slots=True)
class StandbySpec:
    """A standby that is wanted. `prepare`: what prepares its model beforehand, where it is warm."""

    spec: WorkerSpec
    readiness: Readiness
    prepare: WorkerSpec | None = None


@dataclass(frozen=True, slots=True)
class WorkersChosen:
    """It is known which replicas are to be started, which draft workers beside them, and what stands by."""

    targets: Sequence[WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec] = ()
    failover: FailoverRules = NO_RULES


@dataclass(frozen=True, slots=True)
class ClusterOpened:
    """Workers can be started."""


@dataclass(frozen=True, slots=True)
class ClusterFailed:
    """Workers can never be started."""

    cause: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A process is there; it is not ready yet. Of a worker with parts it is told again once its own one is, too."""

    worker: int
    where: str


@dataclass(slots=True)
class WorkerSaid:
    """A worker said something."""

    worker: int
    event: Event


@dataclass(frozen=True, slots=True)
class WorkerEnding:
    """A worker says nothing more; the last of its process is being cleared away. `cause`: as seen from outside."""

    worker: int
    cause: str
    kind: LossKind


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """No process is left, and none is being started. `cause`: as seen from outside."""

    worker: int
    cause: str
    kind: LossKind = "crashed"


WorkerEvent = WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded


@dataclass(slots=True)
class StreamOpened:
    """A request was taken in, under these overrides."""

    submit: Submit
    overrides: ActiveOverrides = NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The reader of a live stream is gone."""

    stream: str


@dataclass(frozen=True, slots=True)
class RolloutAsked:
    """These are to be the replicas and the draft workers. No other rollout is under way. `standbys` and `draft_pools`
    None: as before."""

    targets: Sequence[WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec] | None = None
    draft_pools: Mapping[str, PoolSize] | None = None


@dataclass(frozen=True, slots=True)
class RolloutDropped:
    """Nobody waits for the rollout any more."""


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """Requests are routed, bounded and refused by other rules from now on. `surroundings` has their figures alone."""

    surroundings: Surroundings
    least_depth: int
    quarantine_s: float
    failover: FailoverRules


@dataclass(frozen=True, slots=True)
class RetuneAsked:
    """Replicas are to decode by other options, by their numbers; these are to be the draft workers beside them, as many
    as `draft_pools` says. `standbys`: as from now on."""

    targets: Mapping[int, WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec]
    draft_pools: Mapping[str, PoolSize]


@dataclass(frozen=True, slots=True)
class ModelLoadAsked:
    """The model is to be in memory: somebody waits for it, or it is to be there from the start."""


@dataclass(frozen=True, slots=True)
class ModelLeaveAsked:
    """The model is to leave the memory once its requests are over. `gone_for`: the model that its room is for; "": it
    was not used."""

    gone_for: str = ""


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """New requests are refused; live streams have this long to end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class DrainOver:
    """Streams that are still live are cut off."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class ControlClosed:
    """Every stream and every worker is to end."""


@dataclass(frozen=True, slots=True)
class QuarantineReleased:
    """The operator lets these requests run again."""

    digests: Sequence[str]


@dataclass(frozen=True, slots=True)
class PartHeld:
    """An operator keeps work away from a part (DRAINING, CORDONED), or lets it work again (None)."""

    part: Part
    state: Health | None


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """An operator ends these live streams."""

    streams: Sequence[str]


@dataclass(frozen=True, slots=True)
class FailoverAsked:
    """An operator wants another replica, or a standby, to go on with a worker's streams."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class FailoverUndone:
    """An operator wants a worker to have its streams again."""

    source: str


@dataclass(frozen=True, slots=True)
class DraftersChosen:
    """An operator lets only these drafters propose, on these replicas; `names` None: all that are configured."""

    engines: Sequence[int]
    names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """An operator refuses a request, by what it asks for, until the time `until_s` by the clock."""

    digest: str
    request_id: str
    prompt_tokens: int
    until_s: float


@dataclass(frozen=True, slots=True)
class LoadObserved:
    """Devices were sampled, by "HOST/DEVICE"."""

    samples: Mapping[str, DeviceLoad]


@dataclass(frozen=True, slots=True)
class Woke:
    """The time of a WakeAfter has come. `heard`: workers that have said until now that they live, where nobody tells
    that one by one."""

    heard: Sequence[int] = ()


SteeringEvent = RequestCancelled | FailoverAsked | FailoverUndone | DraftersChosen | RequestQuarantined
ResidencyEvent = ModelLoadAsked | ModelLeaveAsked
ChangeEvent = RolloutAsked | RolloutDropped | RetuneAsked | RulesChanged | ResidencyEvent
PhaseEvent = WorkersChosen | ClusterOpened | ClusterFailed | DrainBegun | DrainOver | ControlClosed
StreamEvent = StreamOpened | StreamClosed
PartEvent = QuarantineReleased | PartHeld | LoadObserved | Woke
ControlEvent = WorkerEvent | StreamEvent | ChangeEvent | PhaseEvent | PartEvent | SteeringEvent
