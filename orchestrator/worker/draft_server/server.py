"""The draft worker: a drafter in a process of its own, perhaps on another host, behind an endpoint.

It serves every target that connects; what they ask for shares the passes of the drafter (`draft_server/shared`). One
thread reads, drafts and answers. It waits for no target: whoever is slow, silent or gone holds up nobody. What it
drafts is never needed: a target that gets no answer goes on without, so nothing here is saved or retried.
"""

from __future__ import annotations

import math
import os
import queue
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from adapters.contract import AdapterError
from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.machine.process_memory import peak_rss_bytes
from orchestrator.protocol.commands import Command, Stop
from orchestrator.protocol.contract import Step
from orchestrator.protocol.draft_messages import DrafterState, DraftReady
from orchestrator.protocol.events import Event, Failed
from orchestrator.protocol.failures import describe_failure, describe_loading_failure
from orchestrator.protocol.links.endpoint import GREETING_S, EndpointServer, LinkLost, host_id
from orchestrator.protocol.links.reception import Bell, Reception
from orchestrator.worker.draft_server.lookahead import LookaheadSequence
from orchestrator.worker.draft_server.shared import EVERY_S, DraftSession, SharedAnswer, SharedDrafter
from orchestrator.worker.drafting import protocol as wire
from orchestrator.worker.drafting.port import Drafter
from policies.planning.overlap import ComputePlace, shares_compute

Emit = Callable[[Event], None]
_PEAK_EVERY_S = 1.0  # of reading the peak of memory from /proc. Not tuned.
# That are read of one target before the next. ADR 0056: so that no target holds up others.
_MOST_TURNS = 64
# ADR 0056: a target that reads no answers is hung up on. Far above any answer (74 bytes for four tokens).
_MOST_UNSENT_BYTES = 8 * 1024 * 1024
RunsAhead = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class HostedDrafter:
    """A loaded drafter (one, no chain). `host` is the address that other machines reach this one at, "" where none is
    to. `runs_ahead`: see protocol.draft_messages.DraftReady."""

    drafter: Drafter
    vocabulary_size: int
    vocabulary_fingerprint: str
    host: str = ""
    runs_ahead: RunsAhead = "auto"
    load_s: float = 0.0

    @property
    def state(self) -> DrafterState:
        return self.drafter.states()[0]


class DraftEngine:
    """Implements protocol.contract.Engine. `load` prepares and loads the drafter, reporting progress by `emit`."""

    def __init__(self, load: Callable[[Emit], HostedDrafter], clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._bell = Bell()
        self._stopped = False
        self._step: Step | None = Step("load", -1.0)

    def submit(self, command: Command) -> None:
        """A draft worker knows one command, Stop."""
        if isinstance(command, Stop):
            self._stopped = True
            self._bell.ring()

    def describe_step(self) -> Step | None:
        """Once it drafts, its targets watch it."""
        return self._step

    def run(self, emit: Emit) -> None:
        """What an adapter raises becomes a Failed event with one line."""
        try:
            self._host(emit)
        finally:
            self._bell.close()

    def _host(self, emit: Emit) -> None:
        try:
            hosted = self._load(emit)
        except AdapterError as error:
            emit(describe_loading_failure(error))
            return
        self._step = None
        try:
            self._open(hosted, emit)
        except AdapterError as error:
            emit(describe_failure(error))
        finally:
            hosted.drafter.close()

    def _open(self, hosted: HostedDrafter, emit: Emit) -> None:
        server = EndpointServer(hosted.host)
        counter = _Counter(hosted, self._bell, self._clock)
        reception = Reception(server, _meet_target, counter.arrive)
        reception.open()
        try:
            emit(_ready(hosted, server))
            while not self._stopped and hosted.state.state != "failed":
                counter.serve(emit)
            if hosted.state.state == "failed":
                emit(Failed(hosted.state.reason, restartable=True))
        finally:
            self._stopped = True
            reception.close()
            server.close()
            counter.close()


@dataclass(frozen=True, slots=True)
class _Greeted:
    link: wire.Link
    hello: wire.Hello

    def close(self) -> None:
        self.link.close()


def _meet_target(admitted: socket.socket) -> _Greeted:
    link = wire.Link(admitted)
    try:
        return _Greeted(link, link.hello(GREETING_S))
    except BaseException:
        link.close()
        raise


@dataclass(slots=True, eq=False)
class _Served:
    """A target that is connected. `name` is its own for itself ("": it has none), `here`: it is on this host. `came_s`:
    when the request came that is not answered yet, `read_s`: when it was read. `rest`: it may have sent more
    than was read."""

    link: wire.Link
    session: DraftSession
    name: str
    here: bool
    came_s: float = 0.0
    read_s: float = 0.0
    rest: bool = False
    awaits_room: bool = False


class _Counter:
    """Where targets are served, all in one thread. `arrive` may be called from any; then the bell rings."""

    def __init__(self, hosted: HostedDrafter, bell: Bell, clock: Clock) -> None:
        self._hosted = hosted
        self._bell = bell
        self._clock = clock
        self._shared = SharedDrafter(hosted.drafter, clock)
        self._arrived: queue.SimpleQueue[_Greeted] = queue.SimpleQueue()
        self._served: dict[int, _Served] = {}
        self._poll = select.poll()
        self._poll.register(bell.heard, select.POLLIN)
        self._busy = False
        self._looked_s = clock.monotonic_s()
        self._peak, self._peak_s = 0, -math.inf

    def arrive(self, greeted: _Greeted) -> None:
        self._arrived.put(greeted)
        self._bell.ring()

    def serve(self, emit: Emit) -> None:
        """Take in what is there, answer what is due, and run a pass; wait where there is nothing of all that."""
        for served in self._wait():
            self._guard(served, self._obey)
        self._looked_s = self._clock.monotonic_s()
        self._let_in()
        self._answer()
        self._busy = self._shared.run_pass()
        if self._busy:
            self._answer()
            self._send_lines()
        load = self._shared.meter.take_report(
            len(self._served), sum(len(served.session.sequences) for served in self._served.values())
        )
        if load is not None:
            emit(load)

    def close(self) -> None:
        for served in list(self._served.values()):
            self._hang_up(served)
        while not self._arrived.empty():
            self._arrived.get().close()

    def _wait(self) -> list[_Served]:
        """Wait until there is something to do; return the targets that have sent something, or have room again."""
        rest = [served for served in self._served.values() if served.rest]
        timeout_ms = 0.0 if self._busy or rest else EVERY_S * MS_PER_S
        ready = {served.link.fileno(): served for served in rest}
        for number, _ in self._poll.poll(timeout_ms):
            if number == self._bell.heard.fileno():
                self._bell.hush()
            elif number in self._served:
                ready[number] = self._served[number]
        return list(ready.values())

    def _let_in(self) -> None:
        while not self._arrived.empty():
            greeted = self._arrived.get()
            link, hello = greeted.link, greeted.hello
            for older in [served for served in self._served.values() if hello.target and served.name == hello.target]:
                self._hang_up(older)
            apart = _is_apart(self._hosted, hello)
            other = ""
            if hello.version != wire.VERSION:
                other = f"this draft worker speaks version {wire.VERSION}, not {hello.version}"
            try:
                link.send(self._welcome(apart, other))
            except LinkLost:
                link.close()
                continue
            if other:
                link.close()
                continue
            served = _Served(link, self._shared.join(runs_ahead=apart), hello.target, link.on_one_host, rest=True)
            self._served[link.fileno()] = served
            self._poll.register(link, select.POLLIN)

    def _welcome(self, apart: bool, refusal: str) -> wire.Welcome:
        hosted = self._hosted
        vocabulary = (hosted.vocabulary_size, hosted.vocabulary_fingerprint)
        return wire.Welcome(wire.VERSION, hosted.state, *vocabulary, apart, apart, refusal)

    def _guard(self, served: _Served, serve: Callable[[_Served], None]) -> None:
        """Serve one target; hang up where its connection is over, or makes no sense."""
        try:
            serve(served)
        except (LinkLost, ProtocolError) as error:
            print(f"a target's connection ended: {error}", flush=True)  # noqa: T201 -- the daemon logs it
            self._hang_up(served)

    def _obey(self, served: _Served) -> None:
        """Carry out the requests of one target that are there. Raises LinkLost, ProtocolError."""
        self._flush(served)
        served.rest = True
        for _ in range(_MOST_TURNS):
            turn = served.link.turn()
            if turn is None:
                served.rest = False
                break
            for update in turn.updates:
                self._shared.update(served.session, update)
            if turn.asks:
                served.came_s, served.read_s = self._date(turn, here=served.here), self._clock.monotonic_s()
                left_s = turn.within_ms / MS_PER_S - (served.read_s - served.came_s)
                served.session.lead = turn.lead
                self._shared.ask(served.session, turn.number, turn.asks, left_s, turn.round_ms / MS_PER_S)

    def _date(self, turn: wire.DraftRequest, *, here: bool) -> float:
        """Return when a request came that has just been read: it may have lain there since somebody last looked. Where
        its target's clock is another one, it is taken to have."""
        now_s = self._clock.monotonic_s()
        return min(now_s, max(self._looked_s, turn.sent_s)) if here and turn.sent_s else self._looked_s

    def _answer(self) -> None:
        by_session = {id(served.session): served for served in self._served.values()}
        for answer in self._shared.take_answers():
            self._guard(by_session[id(answer.session)], partial(self._send, answer))

    def _send(self, answer: SharedAnswer, served: _Served) -> None:
        drafts = [wire.WireDraft.of(draft) for draft in answer.drafts]
        took_ms, held_ms = (
            (self._clock.monotonic_s() - then_s) * MS_PER_S for then_s in (served.came_s, served.read_s)
        )
        session = served.session
        counts = (self._shared.drafter.memory_bytes(), session.hits, session.misses, self._peak_bytes())
        served.link.send(wire.DraftResponse(answer.number, drafts, took_ms, *counts, answer.offsets, held_ms))
        self._flush(served)

    def _send_lines(self) -> None:
        """Send what was drafted ahead to whoever reads what it is sent: the next lines tell what these leave out. Drawn
        tokens bring whole rows with them, and are sent where they are asked for."""
        by_session = {id(served.session): served for served in self._served.values()}
        for lines in self._shared.list_lines():
            served = by_session[id(lines.session)]
            connected = served.link.fileno() in self._served
            if connected and not served.link.unsent and not lines.sequence.guess.is_drawn(0):
                self._guard(served, partial(self._send_line, lines.sequence))

    def _send_line(self, sequence: LookaheadSequence, served: _Served) -> None:
        branches = [
            wire.WireBranch.of(branch.outcome.accepted, branch.outcome.token, branch.outcome.chance, branch.line.guess)
            for branch in sequence.take_news()
        ]
        line = wire.WireDraft.of(sequence.guess)
        served.link.send(wire.DraftLines(sequence.number, sequence.committed, line, branches))
        self._flush(served)

    def _flush(self, served: _Served) -> None:
        """Send what goes of what is left. Raises LinkLost, also where a target does not read what it asks for."""
        served.link.flush()
        if served.link.unsent > _MOST_UNSENT_BYTES:
            raise LinkLost("it does not read its answers")
        if served.awaits_room != bool(served.link.unsent):
            served.awaits_room = bool(served.link.unsent)
            self._poll.modify(served.link, select.POLLIN | (select.POLLOUT if served.awaits_room else 0))

    def _hang_up(self, served: _Served) -> None:
        del self._served[served.link.fileno()]
        self._poll.unregister(served.link)
        served.link.close()
        self._shared.leave(served.session)

    def _peak_bytes(self) -> int:
        """Return the most that this process held; asked of the system now and then, as asking takes its time."""
        now_s = self._clock.monotonic_s()
        if now_s - self._peak_s >= _PEAK_EVERY_S:
            self._peak_s, self._peak = now_s, peak_rss_bytes()
        return self._peak


def _is_apart(hosted: HostedDrafter, hello: wire.Hello) -> bool:
    """Return whether drafting while the target verifies takes nothing away from it, or is wanted all the same."""
    if hosted.runs_ahead != "auto":
        return hosted.runs_ahead == "always"
    ours = ComputePlace.of(host_id(), hosted.state.device, hosted.state.cores)
    return not shares_compute(ours, ComputePlace.of(hello.host, hello.device, hello.cores))


def _ready(hosted: HostedDrafter, server: EndpointServer) -> DraftReady:
    return DraftReady(
        name=hosted.state.name,
        endpoint=server.endpoint,
        drafter=hosted.state,
        vocabulary_size=hosted.vocabulary_size,
        vocabulary_fingerprint=hosted.vocabulary_fingerprint,
        runs_ahead=hosted.runs_ahead,
        pid=os.getpid(),
        load_s=hosted.load_s,
        host=host_id(),
    )
