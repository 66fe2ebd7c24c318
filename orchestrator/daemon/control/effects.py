"""Carries out what control.step decides, in order: on worker processes, on streams' readers, on whoever waits or hears.

It decides nothing. It has what `step` must not have: processes, tasks, memory that is shared, the log. Readers and
their deadlines are here, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.clock import Clock
from orchestrator.daemon.control import actions
from orchestrator.daemon.control.event_log import log_changes
from orchestrator.daemon.control.events import ControlEvent, Woke
from orchestrator.daemon.control.replicas.replicas import has_lost_model
from orchestrator.daemon.control.replicas.supervisor import Supervisor
from orchestrator.daemon.control.state import FAILED
from orchestrator.daemon.control.step import State
from orchestrator.daemon.control.streams.streams import Stream
from orchestrator.errors import RequestError, WorkerError
from orchestrator.protocol.commands import MoveOut, Retune, SharedMemory, Submit
from orchestrator.protocol.contract import Cluster
from orchestrator.protocol.rounds import DEADLINE, Delta
from orchestrator.protocol.shared_memory import SharedMemories

_log = logging.getLogger(__name__)
_LEVELS = logging.getLevelNamesMapping()
_T = TypeVar("_T")


def deadline_s(submit: Submit, request_timeout_s: float, clock: Clock) -> float:
    """Return when the request's time is over, by the clock. `request_timeout_s`: the longest for any, 0 is no limit."""
    bounds = [bound for bound in (submit.timeout_s, request_timeout_s) if bound > 0.0]
    return clock.monotonic_s() + min(bounds, default=math.inf)


@dataclass(slots=True, eq=False)
class Reader:
    """Who reads a stream. `items` holds what was not read yet: never more than `max_tokens` deltas."""

    stream: Stream
    items: asyncio.Queue[Delta | RequestError] = field(default_factory=asyncio.Queue)


async def next_item(reader: Reader, end_s: float, clock: Clock) -> Delta | RequestError:
    """Return what comes next; at the deadline the end of what there is, or an error where there is nothing."""
    if end_s == math.inf:
        return await reader.items.get()
    try:
        async with asyncio.timeout(end_s - clock.monotonic_s()):
            return await reader.items.get()
    except TimeoutError:
        if reader.stream.committed:
            return Delta(reader.stream.key, [], DEADLINE, reader.stream.last_stats)
        message = "the request's time was over before its first token came; give it longer, or try again later"
        return RequestError(message, status=504, code="deadline_exceeded", param="timeout_s")


class Observers:
    """Who hears of what happens, by its kind. All are called in the event loop, and what they raise is logged."""

    def __init__(self) -> None:
        self._by_kind: dict[type, list[Callable[[Any], object]]] = {}

    def follow(self, kind: type[_T], observer: Callable[[_T], object]) -> None:
        self._by_kind.setdefault(kind, []).append(observer)

    def leave(self, kind: type[_T], observer: Callable[[_T], object]) -> None:
        self._by_kind[kind].remove(observer)

    def notify(self, event: object) -> None:
        for observer in self._by_kind.get(type(event), ()):
            try:
                observer(event)
            except Exception:  # what one does with it is no reason for the others, or for control, to stop
                _log.exception("an observer failed")


class Effects:
    """Of the actions on `state`, which it reads. `post` hears of what comes of them. `readers` are those of live
    streams, by the request's id. `settled`: nobody needs to wait for the first worker any more; `failed`: none can ever
    serve. `changed` and `retuned` are answered once the rollout, or the retune, has ended."""

    def __init__(
        self,
        state: State,
        cluster: Cluster,
        sleep: Callable[[float], Awaitable[None]],
        post: Callable[[ControlEvent], None],
    ) -> None:
        self.observers = Observers()
        self.readers: dict[str, Reader] = {}
        self.settled = asyncio.Event()
        self.failed = asyncio.Event()
        self.changed: asyncio.Future[list[int]] | None = None
        self.retuned: asyncio.Future[None] | None = None
        self.memories = SharedMemories()
        self._state = state
        self._post = post
        self.supervisor = Supervisor(cluster, sleep, post, state.identities.pin)

    async def wait_ended(self) -> None:
        """Wait until no worker is left, and give back what they shared."""
        await self.supervisor.wait_ended()
        self.memories.close()

    def carry_out(self, decided: Sequence[actions.Action]) -> None:
        for action in decided:
            self._do(action)

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.Send(worker, Retune(options)):
                self.supervisor.send(worker, Retune(self._state.identities.pin_options(options)))
            case actions.Send(worker, command):
                self.supervisor.send(worker, command)
            case actions.AskPages(worker, key, sent_id, most_bytes, link):
                memory = self.memories.create(key, most_bytes) if link is None else SharedMemory("", key, 0)
                self.supervisor.send(worker, MoveOut(sent_id, memory, link))
            case actions.DropPages(key):
                self.memories.remove(key)
            case actions.Deliver(key, delta):
                self._hand_over(key, delta, ends=bool(delta.finish))
            case actions.EndStream(key, error):
                self._hand_over(key, error, ends=True)
            case actions.StartWorker():
                self.supervisor.start(action)
            case actions.StopWorker():
                self.supervisor.stop(action)
            case actions.LogLine(level, text, values):
                _log.log(_LEVELS[level.upper()], text, *values)
            case _:
                self._tell(action)

    def _tell(self, action: actions.Action) -> None:
        match action:
            case actions.Settle():
                self._settle()
            case actions.WakeAfter(after_s):
                asyncio.get_running_loop().call_later(after_s, self._post, Woke())
            case actions.FinishRollout(engines, error):
                _answer(self.changed, list(engines), error)
            case actions.FinishRetune(error):
                _answer(self.retuned, None, error)
            case actions.TellGauges(replica, before, now):
                log_changes(replica, before, now)
            case actions.Notify(event):
                self.observers.notify(event)
            case _:
                self.observers.notify(action)

    def _settle(self) -> None:
        self.settled.set()
        serving = self._state.replicas.serving
        if all(replica.state.phase == FAILED for replica in serving) and not any(map(has_lost_model, serving)):
            self.failed.set()
        else:
            self.failed.clear()

    def _hand_over(self, key: str, item: Delta | RequestError, *, ends: bool) -> None:
        self.readers[key].items.put_nowait(item)
        if ends:
            del self.readers[key]


def _answer(waiting: asyncio.Future[_T] | None, result: _T, error: str) -> None:
    if waiting is None or waiting.done():
        return
    if error:
        waiting.set_exception(WorkerError(error))
    else:
        waiting.set_result(result)
