"""Control's events, from its workers and its callers: plain values, which control.step folds into the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

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


class _Told(msgspec.Struct, frozen=True):
    """A plain value."""


class StandbySpec(_Told, frozen=True):
    """A standby that is wanted. `prepare`: what prepares its model beforehand, where it is warm."""

    spec: WorkerSpec
    readiness: Readiness
    prepare: WorkerSpec | None = None


class WorkersChosen(_Told, frozen=True):
    """It is known which replicas are to be started, which draft workers beside them, and what stands by."""

    targets: Sequence[WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec] = ()
    failover: FailoverRules = NO_RULES


class ClusterOpened(_Told, frozen=True):
    """Workers can be started."""


class ClusterFailed(_Told, frozen=True):
    """Workers can never be started."""

    cause: str


class WorkerStarted(_Told, frozen=True):
    """A process is there; it is not ready yet. Of a worker with parts it is told again once its own one is, too."""

    worker: int
    where: str


class WorkerSaid(_Told, frozen=True):
    """A worker said something."""

    worker: int
    event: Event


class WorkerEnding(_Told, frozen=True):
    """A worker says nothing more; the last of its process is being cleared away. `cause`: as seen from outside."""

    worker: int
    cause: str
    kind: LossKind


class WorkerEnded(_Told, frozen=True):
    """No process is left, and none is being started. `cause`: as seen from outside."""

    worker: int
    cause: str
    kind: LossKind = "crashed"


WorkerEvent = WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded


class StreamOpened(_Told, frozen=True):
    """A request was taken in, under these overrides."""

    submit: Submit
    overrides: ActiveOverrides = NO_OVERRIDES


class StreamClosed(_Told, frozen=True):
    """The reader of a live stream is gone."""

    stream: str


class RolloutAsked(_Told, frozen=True):
    """These are to be the replicas and draft workers. `standbys` and `draft_pools` None: as before."""

    targets: Sequence[WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec] | None = None
    draft_pools: Mapping[str, PoolSize] | None = None


class RolloutDropped(_Told, frozen=True):
    """Nobody waits for the rollout any more."""


class RulesChanged(_Told, frozen=True):
    """Requests are routed, bounded and refused by other rules from now on. `surroundings` has their figures alone."""

    surroundings: Surroundings
    least_depth: int
    quarantine_s: float
    failover: FailoverRules


class RetuneAsked(_Told, frozen=True):
    """Replicas are to decode by other options, by their numbers; these are to be the draft workers beside them, as many
    as `draft_pools` says. `standbys`: as from now on."""

    targets: Mapping[int, WorkerSpec]
    drafts: Sequence[WorkerSpec]
    standbys: Sequence[StandbySpec]
    draft_pools: Mapping[str, PoolSize]


class ModelLoadAsked(_Told, frozen=True):
    """The model is to be in memory: somebody waits for it, or it is to be there from the start."""


class ModelLeaveAsked(_Told, frozen=True):
    """The model is to leave the memory once its requests are over. `gone_for`: whose room that is; "": it is idle."""

    gone_for: str = ""


class DrainBegun(_Told, frozen=True):
    """New requests are refused; live streams have this long to end."""

    timeout_s: float


class DrainOver(_Told, frozen=True):
    """Streams that are still live are cut off."""

    timeout_s: float


class ControlClosed(_Told, frozen=True):
    """Every stream and every worker is to end."""


class QuarantineReleased(_Told, frozen=True):
    """The operator lets these requests run again."""

    digests: Sequence[str]


class PartHeld(_Told, frozen=True):
    """An operator keeps work away from a part (DRAINING, CORDONED), or lets it work again (None)."""

    part: Part
    state: Health | None


class RequestCancelled(_Told, frozen=True):
    """An operator ends these live streams."""

    streams: Sequence[str]


class FailoverAsked(_Told, frozen=True):
    """An operator wants another replica, or a standby, to go on with a worker's streams."""

    source: str
    target: str


class FailoverUndone(_Told, frozen=True):
    """An operator wants a worker to have its streams again."""

    source: str


class DraftersChosen(_Told, frozen=True):
    """An operator lets only these drafters propose, on these replicas; `names` None: all that are configured."""

    engines: Sequence[int]
    names: tuple[str, ...] | None


class RequestQuarantined(_Told, frozen=True):
    """An operator refuses a request, by what it asks for, until the time `until_s` by the clock."""

    digest: str
    request_id: str
    prompt_tokens: int
    until_s: float


class LoadObserved(_Told, frozen=True):
    """Devices were sampled, by "HOST/DEVICE"."""

    samples: Mapping[str, DeviceLoad]


class Woke(_Told, frozen=True):
    """The time of a WakeAfter has come. `heard`: workers that have said that they live, and nobody told one by one."""

    heard: Sequence[int] = ()


SteeringEvent = RequestCancelled | FailoverAsked | FailoverUndone | DraftersChosen | RequestQuarantined
ResidencyEvent = ModelLoadAsked | ModelLeaveAsked
ChangeEvent = RolloutAsked | RolloutDropped | RetuneAsked | RulesChanged | ResidencyEvent
PhaseEvent = WorkersChosen | ClusterOpened | ClusterFailed | DrainBegun | DrainOver | ControlClosed
StreamEvent = StreamOpened | StreamClosed
PartEvent = QuarantineReleased | PartHeld | LoadObserved | Woke
ControlEvent = WorkerEvent | StreamEvent | ChangeEvent | PhaseEvent | PartEvent | SteeringEvent
