"""The draft worker: a drafter in a process of its own, perhaps on another host, behind an endpoint.

It serves one target at a time; whoever knocked last is served. What it drafts is never needed: a target that gets no
answer goes on without, so nothing here is saved or retried.
"""

from __future__ import annotations

import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from adapters.contract import AdapterError
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.drafting.endpoint import GREETING_S, EndpointServer, host_id
from orchestrator.drafting.lookahead import LookaheadDrafter
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.protocol import (
    VERSION,
    DraftRequest,
    DraftResponse,
    Hello,
    Link,
    LinkLost,
    ProtocolError,
    Welcome,
    WireDraft,
)
from orchestrator.workers.contract import Step
from orchestrator.workers.draft_messages import DrafterState, DraftReady
from orchestrator.workers.failures import describe_failure, describe_loading_failure
from orchestrator.workers.messages import Command, Event, Failed, Stop
from orchestrator.workers.process_memory import peak_rss_bytes

Emit = Callable[[Event], None]
_PEAK_EVERY_S = 1.0
RunsAhead = Literal["auto", "always", "never"]


class _Bell:
    """Wakes a thread out of poll."""

    def __init__(self) -> None:
        self.heard, self._rope = socket.socketpair()

    def ring(self) -> None:
        """Thread-safe; nothing happens when it is closed."""
        with suppress(OSError):
            self._rope.send(b"!")

    def close(self) -> None:
        self.heard.close()
        self._rope.close()


@dataclass(frozen=True, slots=True)
class HostedDrafter:
    """A loaded drafter (one, no chain). `host` is the address that other machines reach this one at, "" where none is
    to. `runs_ahead`: see workers.draft_messages.DraftReady."""

    drafter: Drafter
    vocabulary_size: int
    vocabulary_fingerprint: str
    host: str = ""
    runs_ahead: RunsAhead = "auto"
    load_s: float = 0.0

    @property
    def state(self) -> DrafterState:
        """The drafter's state as it is now."""
        return self.drafter.states()[0]


class DraftEngine:
    """Implements workers.contract.Engine. `load` prepares and loads the drafter, reporting progress by `emit`."""

    def __init__(self, load: Callable[[Emit], HostedDrafter], clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._bell, self._door_bell = _Bell(), _Bell()
        self._stopped = False
        self._peak, self._peak_s = 0, -math.inf
        self._step: Step | None = Step("load", -1.0)
        self._knocked: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def submit(self, command: Command) -> None:
        """See workers.contract.Engine. A draft worker knows one command, Stop."""
        if isinstance(command, Stop):
            self._stopped = True
            self._bell.ring()

    def describe_step(self) -> Step | None:
        """See workers.contract.Engine. Once it drafts, its target watches it."""
        return self._step

    def run(self, emit: Emit) -> None:
        """See workers.contract.Engine. What an adapter raises becomes a Failed event with one line."""
        try:
            self._host(emit)
        finally:
            self._bell.close()
            self._door_bell.close()

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
        keeper = threading.Thread(target=self._keep, args=(server,), name="endpoint", daemon=True)
        keeper.start()
        try:
            emit(_ready(hosted, server))
            self._serve(hosted)
            if hosted.state.state == "failed":
                emit(Failed(hosted.state.reason, restartable=True))
        finally:
            self._stopped = True
            self._door_bell.ring()
            keeper.join(GREETING_S)
            server.close()
            while not self._knocked.empty():
                self._knocked.get().close()

    def _keep(self, server: EndpointServer) -> None:
        """Let in whoever has the key, in a thread: strangers that say nothing hold up nobody's drafts."""
        poll = select.poll()
        poll.register(self._door_bell.heard, select.POLLIN)
        for listening in server.listening:
            poll.register(listening, select.POLLIN)
        by_number = {listening.fileno(): listening for listening in server.listening}
        while not self._stopped:
            for number, _ in poll.poll():
                with suppress(OSError, KeyError):  # the wake-up socket is no listening socket
                    if (admitted := server.admit(by_number[number])) is not None:
                        self._knocked.put(admitted)
                        self._bell.ring()

    def _serve(self, hosted: HostedDrafter) -> None:
        ahead = LookaheadDrafter(hosted.drafter, self._clock)
        link: Link | None = None
        while not self._stopped and hosted.state.state != "failed":
            busy = link is not None and ahead.step()
            self._wait(link, 0.0 if busy else None)
            try:
                link = self._newest(link, hosted, ahead)
                if link is not None:
                    self._obey(link, ahead)
            except (LinkLost, ProtocolError) as error:
                print(f"the target's connection ended: {error}", flush=True)  # noqa: T201 -- the daemon logs it
                if link is not None:
                    link.close()
                link = None
                ahead.forget_all()
        if link is not None:
            link.close()

    def _wait(self, link: Link | None, timeout_s: float | None) -> None:
        """Wait until there is something to read, or room for what is still to be sent."""
        poll = select.poll()
        poll.register(self._bell.heard, select.POLLIN)
        if link is not None:
            poll.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        for number, _ in poll.poll(None if timeout_s is None else timeout_s * MS_PER_S):
            if number == self._bell.heard.fileno():
                self._bell.heard.recv(64)

    def _newest(self, link: Link | None, hosted: HostedDrafter, ahead: LookaheadDrafter) -> Link | None:
        """Return the link to whoever knocked last. Raises LinkLost, ProtocolError."""
        while True:
            try:
                admitted = self._knocked.get_nowait()
            except queue.Empty:
                return link
            if link is not None:
                link.close()
            ahead.forget_all()
            link = Link(admitted)
            try:
                _welcome(link, hosted, ahead)
            except (LinkLost, ProtocolError):
                link.close()
                link = None

    def _obey(self, link: Link, ahead: LookaheadDrafter) -> None:
        """Carry out all requests that are there; the last that has asks is answered. Raises LinkLost, ProtocolError."""
        link.flush()
        request: DraftRequest | None = None
        came_s = time.perf_counter()
        while (turn := link.turn()) is not None:
            for update in turn.updates:
                ahead.update(update)
            request = turn if turn.asks else request
        if request is not None:
            within_s = request.within_ms / MS_PER_S - (time.perf_counter() - came_s)
            found = ahead.answer(request.asks, within_s, request.round_ms / MS_PER_S)
            drafts = [WireDraft.of(draft) for draft in found]
            took_ms = (time.perf_counter() - came_s) * MS_PER_S
            counts = (ahead.drafter.memory_bytes(), ahead.hits, ahead.misses, self._peak_bytes())
            link.send(DraftResponse(request.number, drafts, took_ms, *counts))

    def _peak_bytes(self) -> int:
        """Return the most that this process held; asked of the system now and then, as asking takes its time."""
        now_s = self._clock.monotonic_s()
        if now_s - self._peak_s >= _PEAK_EVERY_S:
            self._peak_s, self._peak = now_s, peak_rss_bytes()
        return self._peak


def _welcome(link: Link, hosted: HostedDrafter, ahead: LookaheadDrafter) -> None:
    """Answer the target's first word; a target of another version is told so and hung up on."""
    hello = link.hello(GREETING_S)
    other = "" if hello.version == VERSION else f"this draft worker speaks version {VERSION}, not {hello.version}"
    ahead.runs_ahead = apart = _apart(hosted, hello)
    link.send(
        Welcome(
            VERSION,
            hosted.state,
            hosted.vocabulary_size,
            hosted.vocabulary_fingerprint,
            apart,
            apart,
            other,
        )
    )
    if other:
        raise ProtocolError(other)


def _apart(hosted: HostedDrafter, hello: Hello) -> bool:
    """True where drafting while the target verifies takes nothing away from it, or is wanted all the same."""
    if hosted.runs_ahead != "auto":
        return hosted.runs_ahead == "always"
    return hello.host != host_id() or hello.device.casefold() != hosted.state.device.casefold()


def _ready(hosted: HostedDrafter, server: EndpointServer) -> DraftReady:
    return DraftReady(
        name=hosted.state.name,
        door=server.endpoint,
        drafter=hosted.state,
        vocabulary_size=hosted.vocabulary_size,
        vocabulary_fingerprint=hosted.vocabulary_fingerprint,
        runs_ahead=hosted.runs_ahead,
        pid=os.getpid(),
        load_s=hosted.load_s,
    )
