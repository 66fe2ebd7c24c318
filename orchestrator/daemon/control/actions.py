"""The actions that control decides on: plain values, which the controller carries out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Command, PageLink
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Progress
from orchestrator.protocol.rounds import Delta, Gauges, RoundReport
from orchestrator.protocol.trace_messages import ResumedStream
from policies.serving.residency import ModelStage


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process after a while. `worker` is its place's number, `title` names it in the log."""

    worker: int
    spec: WorkerSpec
    title: str
    after_s: float


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker, also where it is only due; WorkerEnded follows."""

    worker: int
    grace_s: float


@dataclass(slots=True)
class Send:
    """Pass a command on to a worker, if there is one."""

    worker: int
    command: Command


@dataclass(frozen=True, slots=True)
class AskPages:
    """Make shared memory, of `most_bytes` at most, and have a worker move a stream out to it. `key` names it here,
    `sent_id` the stream there. With a `link` its pages go there instead, and no memory is made."""

    worker: int
    key: str
    sent_id: str
    most_bytes: int
    link: PageLink | None = None


@dataclass(frozen=True, slots=True)
class DropPages:
    """Keep shared memory no longer."""

    key: str


@dataclass(slots=True)
class Deliver:
    """Hand a delta to a stream's reader. The last one has `finish`."""

    stream: str
    delta: Delta


@dataclass(slots=True)
class EndStream:
    """Hand an error to a stream's reader; nothing follows."""

    stream: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class WakeAfter:
    """Come back with the event Woke: something may be possible then."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Settle:
    """A replica serves for the first time, or all have failed for good: nobody needs to wait for the first any more."""


@dataclass(frozen=True, slots=True)
class FinishRollout:
    """Answer who asked for the rollout: `engines`, or an error that left everything as it was."""

    engines: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class FinishRetune:
    """Every replica has answered. `error`: why one stays as it was ("": none does)."""

    error: str = ""


@dataclass(slots=True)
class LogLine:
    """Write a line to the log, its `values` filled in."""

    level: Literal["debug", "info", "warning", "error"]
    text: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TellGauges:
    """Write to the log what has changed in a replica's gauges."""

    replica: str
    before: Gauges | None
    now: Gauges


@dataclass(frozen=True, slots=True)
class TellHealth:
    """The health of parts has changed; these are not healthy."""

    unwell: dict[Part, PartHealth]


@dataclass(frozen=True, slots=True)
class TellLoads:
    """Devices were sampled: the newest sample of each, and its moving mean."""

    newest: Mapping[str, DeviceLoad]
    means: Mapping[str, DeviceLoad]


@dataclass(frozen=True, slots=True)
class TellLacking:
    """A worker of this spec cannot run on its host: a library is not installed there, and `why` says which."""

    spec: WorkerSpec
    why: str


@dataclass(frozen=True, slots=True)
class TellRefused:
    """No worker of this spec will ever serve where it is placed, and `why` says what stands against it there."""

    spec: WorkerSpec
    why: str


@dataclass(frozen=True, slots=True)
class TellStarved:
    """A worker of this spec found no memory where it is, even with the smallest KV cache, and is started again."""

    spec: WorkerSpec


@dataclass(frozen=True, slots=True)
class TellUseless:
    """The draft worker of this spec helps no replica, and rests for that, as the others of its draft do."""

    spec: WorkerSpec
    why: str


@dataclass(frozen=True, slots=True)
class TellStage:
    """The target's model is loaded, or leaves, or is gone; `why` it is not there."""

    stage: ModelStage
    why: str


@dataclass(slots=True)
class Notify:
    """Pass an event on to the observers."""

    event: RoundReport | Progress | ResumedStream


Action = (
    StartWorker
    | StopWorker
    | Send
    | AskPages
    | DropPages
    | Deliver
    | EndStream
    | WakeAfter
    | Settle
    | FinishRollout
    | FinishRetune
    | LogLine
    | TellGauges
    | TellHealth
    | TellLoads
    | TellLacking
    | TellRefused
    | TellStarved
    | TellUseless
    | TellStage
    | Notify
)
