"""The actions that control decides on: plain values, which the controller carries out in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Command, PageLink
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Progress
from orchestrator.protocol.rounds import Delta, Gauges, RoundReport
from orchestrator.protocol.trace_messages import ResumedStream
from policies.serving.residency import ModelStage


class Action(msgspec.Struct, frozen=True):
    """Something that is to be done."""


class StartWorker(Action, frozen=True):
    """Start a process after a while. `worker` is its place's number, `title` names it in the log."""

    worker: int
    spec: WorkerSpec
    title: str
    after_s: float


class StopWorker(Action, frozen=True):
    """End a worker, also where it is only due; WorkerEnded follows."""

    worker: int
    grace_s: float


class Send(Action, frozen=True):
    """Pass a command on to a worker, if there is one."""

    worker: int
    command: Command


class AskPages(Action, frozen=True):
    """Make shared memory, of `most_bytes` at most, and have a worker move a stream out to it. `key` names it here,
    `sent_id` the stream there. With a `link` its pages go there instead, and no memory is made."""

    worker: int
    key: str
    sent_id: str
    most_bytes: int
    link: PageLink | None = None


class DropPages(Action, frozen=True):
    """Keep shared memory no longer."""

    key: str


class Deliver(Action, frozen=True):
    """Hand a delta to a stream's reader. The last one has `finish`."""

    stream: str
    delta: Delta


class EndStream(Action, frozen=True):
    """Hand an error to a stream's reader; nothing follows."""

    stream: str
    error: RequestError


class WakeAfter(Action, frozen=True):
    """Come back with the event Woke: something may be possible then."""

    after_s: float


class Settle(Action, frozen=True):
    """A replica serves for the first time, or all have failed for good: nobody needs to wait for the first any more."""


class FinishRollout(Action, frozen=True):
    """Answer who asked for the rollout: `engines`, or an error that left everything as it was."""

    engines: tuple[int, ...]
    error: str = ""


class FinishRetune(Action, frozen=True):
    """Every replica has answered. `error`: why one stays as it was ("": none does)."""

    error: str = ""


class LogLine(Action, frozen=True):
    """Write a line to the log, its `values` filled in."""

    level: Literal["debug", "info", "warning", "error"]
    text: str
    values: tuple[Any, ...] = ()


class TellGauges(Action, frozen=True):
    """Write to the log what has changed in a replica's gauges."""

    replica: str
    before: Gauges | None
    now: Gauges


class TellHealth(Action, frozen=True):
    """The health of parts has changed; these are not healthy."""

    unwell: dict[Part, PartHealth]


class TellLoads(Action, frozen=True):
    """Devices were sampled: the newest sample of each, and its moving mean."""

    newest: Mapping[str, DeviceLoad]
    means: Mapping[str, DeviceLoad]


class TellLacking(Action, frozen=True):
    """A worker of this spec cannot run on its host: a library is not installed there, and `why` says which."""

    spec: WorkerSpec
    why: str


class TellRefused(Action, frozen=True):
    """No worker of this spec will ever serve where it is placed, and `why` says what stands against it there."""

    spec: WorkerSpec
    why: str


class TellStarved(Action, frozen=True):
    """A worker of this spec found no memory where it is, even with the smallest KV cache, and is started again."""

    spec: WorkerSpec


class TellUseless(Action, frozen=True):
    """The draft worker of this spec helps no replica, and rests for that, as the others of its draft do."""

    spec: WorkerSpec
    why: str


class TellStage(Action, frozen=True):
    """The target's model is loaded, or leaves, or is gone; `why` it is not there."""

    stage: ModelStage
    why: str


class Notify(Action, frozen=True):
    """Pass an event on to the observers."""

    event: RoundReport | Progress | ResumedStream
