"""The virtual world: a clock, workers and links around control's own step.

Every decision is control's: `step` folds what happens into the same State as the daemon's, and the world carries out
the actions that come back, as `control.controller` does, in virtual time. Requests are taken in by the daemon's own
admission. Nothing here chooses a replica, a depth, a restart or a standby.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import simpy

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.actions import (
    AskPages,
    Deliver,
    EndStream,
    LogLine,
    Send,
    StartWorker,
    StopWorker,
    WakeAfter,
)
from orchestrator.daemon.control.events import ClusterOpened, ControlEvent, StreamOpened, Woke, WorkersChosen
from orchestrator.daemon.control.health.watch import TICK_S
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.state import find_group, whole
from orchestrator.daemon.control.step import State, step
from orchestrator.daemon.control.streams.admission import ControlLimits, check_room
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from outrider_lab.simulation.courses import CourseBook
from outrider_lab.simulation.fault_injector import FaultInjector
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.figures import Outcomes, TargetUse
from outrider_lab.simulation.fleet import Fleet, build_ready
from outrider_lab.simulation.processes import USUAL_TIMING, Processes, Timing
from outrider_lab.simulation.target_worker import name_bits
from outrider_lab.simulation.trace import TracedRequest

_HEARD_EVERY_S = 1.0
_MOST_LINES = 200
_STALLED_S = 3600.0
_WARM_REQUEST_TOKENS = 1 << 14
"""What a request may have at most, as its client asks for it: control does not know how long an output will be."""


@dataclass(slots=True)
class _Live:
    """A request under way. `number` of its course; `lost_s`: since when it waits behind a loss. `bits`: of the group
    that its last token came from, as target_worker.name_bits has them (0: none came)."""

    traced: TracedRequest
    course: int
    user_class: int
    sent_s: float
    first_s: float = -1.0
    tokens: int = 0
    lost_s: float = -1.0
    bits: int = 0


@dataclass(slots=True)
class WorldLog:
    """What control wrote to its log, the first lines, and how many there were by level."""

    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, now_s: float, line: LogLine) -> None:
        self.counts[line.level] += 1
        if line.level in ("warning", "error") and len(self.lines) < _MOST_LINES:
            self.lines.append(f"{now_s:.3f} s: {line.level}: {line.text % line.values}")


class World:
    """See the module. `limits`: as the daemon's. `ended` hears of every request that ends, with its key. `in_order`:
    each request goes on like the recorded one of its own number."""

    def __init__(
        self,
        fleet: Fleet,
        limits: ControlLimits,
        timing: Timing = USUAL_TIMING,
        *,
        ended: Callable[[str], None] | None = None,
        in_order: bool = False,
    ) -> None:
        self.fleet, self.limits, self.timing = fleet, limits, timing
        self.env = simpy.Environment()
        self.outcomes = Outcomes()
        self.log = WorldLog()
        self.zero_s = 0.0  # when requests begin to come
        self._over = self.env.event()
        self._all_sent = False
        self._ended = ended
        around = limits.surround()
        pools = dict(fleet.draft_pools)
        self.state = State(limits.max_restarts, limits.least_depth, limits.quarantine_s, around, pools)
        self.state.router.moves.enabled = False
        kinds = {one.kind.group: one for one in fleet.replicas}
        self.groups = {name_bits(group): find_group(build_ready(one)) for group, one in kinds.items()}
        self._live: dict[str, _Live] = {}
        self._processes = Processes(self)
        self._faults = FaultInjector(self._processes, self._note_lost)
        self._frozen, self._ticks = False, 0
        self._count = 0
        self._courses = _CourseNumbers(fleet, in_order=in_order)
        self._do: dict[type, Callable[[Any], None]] = {
            Deliver: self._deliver,
            Send: self._processes.send,
            StartWorker: self._processes.start,
            StopWorker: self._processes.stop,
            WakeAfter: self._wake_after,
            LogLine: self._note,
            EndStream: self._end_stream,
            AskPages: self._processes.forget_pages,
        }

    @property
    def uses(self) -> dict[str, TargetUse]:
        return self._processes.uses

    @property
    def now_s(self) -> float:
        return self.env._now

    def after(self, delay_s: float, call: Callable[[Any], None], argument: Any) -> None:
        event = self.env.timeout(delay_s, argument)
        event.callbacks.append(lambda done: call(done.value))

    def open(self) -> None:
        """Start all workers, and let them be ready."""
        targets, drafts, standbys = self._processes.list_specs()
        self.post(WorkersChosen(targets, drafts, standbys, self.limits.failover))
        self.post(ClusterOpened())

    def start(self, within_s: float) -> None:
        """Let time pass until every worker serves, or so long. What comes afterwards counts from then."""
        while self.env.peek() < within_s and self._processes.are_loading():
            self.env.step()
        self.zero_s = self.now_s

    def play(
        self, requests: Iterable[TracedRequest], faults: Iterable[Fault] = (), *, until_s: float | None = None
    ) -> None:
        """Send requests as they arrive, and go on until the last of them has ended, or until a time. Faults behind the
        end do not happen. Requests that nobody will ever serve are left unfinished: where nothing has run for an hour,
        it is over."""
        self._arrivals, self._all_sent = iter(requests), False
        for fault in faults:
            self.after(max(0.0, self.zero_s + fault.at_s - self.now_s), self._faults.happen, fault)
        self._next_arrival()
        if until_s is not None:
            self.env.run(until=until_s)
            return
        self.after(_STALLED_S, self._look_for_stall, -1)
        self.env.run(until=self._over)

    def _look_for_stall(self, before: int) -> None:
        """End where nothing has happened since the look before this."""
        done = self._processes.count_rounds() + self.outcomes.asked + self.outcomes.count_ended()
        if done == before and not self._over.triggered:
            self._over.succeed()
        else:
            self.after(_STALLED_S, self._look_for_stall, done)

    def send(self, traced: TracedRequest) -> str:
        key = f"q{self._count}"
        self._count += 1
        user_class = self.outcomes.ask(traced.user_class)
        self._live[key] = _Live(traced, self._courses.choose(traced.category, self._count), user_class, self.now_s)
        self.after(self.timing.intake_ms / MS_PER_S, self._open_stream, key)
        return key

    def find_output(self, key: str) -> tuple[int, int, str, int]:
        """Return how many tokens a request's output has, its course's number, and what its prompt begins with: a name
        and a number of tokens."""
        live = self._live[key]
        return live.traced.output_tokens, live.course, live.traced.prefix, live.traced.prefix_tokens

    def _next_arrival(self) -> None:
        traced = next(self._arrivals, None)
        if traced is not None:
            self.after(max(0.0, self.zero_s + traced.arrival_s - self.now_s), self._arrive, traced)
        else:
            self._all_sent = True
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._all_sent and not self._live and not self._over.triggered:
            self._over.succeed()

    def _arrive(self, traced: TracedRequest) -> None:
        self.send(traced)
        self._next_arrival()

    def _open_stream(self, key: str) -> None:
        live = self._live[key]
        try:
            check_room(self.state, self.limits, self._view, self.now_s)
            self.post(StreamOpened(build_submit(key, live.traced)))
        except RequestError as error:
            self._finish(key, error.code or "error")

    def _view(self) -> StateView:
        state, now_s = self.state, self.now_s
        views = [
            one.state.view(one.engine, state.streams.counts[one.name], 0.0, now_s) for one in state.replicas.serving
        ]
        return whole(views, "local", streams=len(state.streams), uptime_s=now_s, draining=state.draining)

    def post(self, event: ControlEvent) -> None:
        """Let control decide on an event, and carry its actions out."""
        for action in step(self.state, event, self.env.now):
            do = self._do.get(type(action))
            if do is not None:
                do(action)

    def _deliver(self, action: Deliver) -> None:
        key, delta = action.stream, action.delta
        live = self._live.get(key)
        if live is None:
            return
        if delta.tokens:
            if live.first_s < 0.0:
                live.first_s = self.now_s
            if live.lost_s >= 0.0:
                self.outcomes.pauses_ms.append((self.now_s - live.lost_s) * MS_PER_S)
                live.lost_s = -1.0
            self._check_tokens(live, delta)
            live.tokens += len(delta.tokens)
        if delta.finish:
            self._finish(key, "")

    def _check_tokens(self, live: _Live, delta: Delta) -> None:
        """Count a stream that has other bits from here on, and whether control says so: what tokens are says who
        computed them, and which are next."""
        bits = delta.tokens[0] - live.tokens
        if bits == live.bits:
            return
        self.outcomes.misplaced_tokens += bits not in self.groups
        self.outcomes.changed_group += live.bits != 0
        self.outcomes.unmarked_changes += delta.group != self.groups.get(bits)
        live.bits = bits

    def _end_stream(self, action: EndStream) -> None:
        self._finish(action.stream, action.error.code or "error")

    def _finish(self, key: str, error: str) -> None:
        live = self._live.pop(key, None)
        if live is None:
            return
        traced = live.traced
        if error:
            self.outcomes.errors[error] += 1
        else:
            way_s = self.timing.deliver_ms / MS_PER_S
            times = (live.sent_s, live.first_s + way_s, self.now_s + way_s)
            self.outcomes.add(*times, live.tokens, traced.prompt_tokens, live.user_class)
        if self._ended is not None:
            self._ended(key)
        self._end_if_over()

    def _wake_after(self, action: WakeAfter) -> None:
        if action.after_s != TICK_S:
            self.after(action.after_s, self._look, None)
        else:
            # Where nobody stands still, there is nothing to be seen so often. A tick that was asked for before is void:
            # control does not look before it is due, and would not ask again.
            self._ticks += 1
            self.after(TICK_S if self._frozen else _HEARD_EVERY_S, self._tick, self._ticks)

    def _tick(self, number: int) -> None:
        if number == self._ticks:
            self._look(None)

    def _look(self, _: None) -> None:
        """Look for what is due, and for workers that hang. Between changes of a batch nobody tells each round, so that
        those that run have said so until now."""
        heard, self._frozen = self._processes.listen()
        self.post(Woke(heard))

    def _note_lost(self, keys: list[str]) -> None:
        for key in keys:
            live = self._live.get(key)
            if live is not None and live.lost_s < 0.0:
                live.lost_s = self.now_s
        self._look(None)
        self.after(TICK_S, self._look, None)  # one that stands still is to be seen soon

    def _note(self, action: LogLine) -> None:
        self.log.add(self.now_s, action)


def build_submit(key: str, traced: TracedRequest) -> Submit:
    """Return what control gets of a request: tokens that are its own, behind those of its prefix."""
    shared = min(traced.prefix_tokens, traced.prompt_tokens) if traced.prefix else 0
    own = [int(key[1:])] * (traced.prompt_tokens - shared)
    prompt = [crc32(traced.prefix.encode()), *[1] * (shared - 1), *own] if shared else own
    return Submit(key, prompt, max(_WARM_REQUEST_TOKENS, traced.output_tokens))


class _CourseNumbers:
    """Which recorded request a request goes on like: of its category, in turn."""

    def __init__(self, fleet: Fleet, *, in_order: bool) -> None:
        self._in_order = in_order
        longest: CourseBook | None = max((one.kind.book for one in fleet.replicas), key=len, default=None)
        self._by_category: dict[str, list[int]] = {}
        for number, category in enumerate(longest.categories if longest is not None else []):
            self._by_category.setdefault(category, []).append(number)
        self._all = list(range(len(longest) if longest is not None else 1))

    def choose(self, category: str, number: int) -> int:
        if self._in_order:
            return (number - 1) % len(self._all)
        known = self._by_category.get(category) or self._all
        return known[number * 7919 % len(known)]
