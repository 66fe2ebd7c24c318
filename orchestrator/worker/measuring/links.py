"""Measures the path between two workers: the transport that drafts use, to an endpoint that one of them opens.

The round trip is that of a draft request with one ask and its answer, less what the other side says it took. Bandwidth
is that of one large request, one way.
"""

from __future__ import annotations

import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from adapters.framing import ProtocolError
from device_profiles.link import LinkProfile
from device_profiles.units import MIB, MS_PER_S
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import GREETING_S, EndpointServer, LinkLost, host_id, knock
from orchestrator.protocol.messages import Command, EndpointOpened, Event, Failed, Stop
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.drafting.protocol import (
    VERSION,
    DraftRequest,
    DraftResponse,
    Extend,
    Hello,
    Link,
    Welcome,
    WireDraft,
)

_ROUND_TRIPS = 200
_WARM_UP = 20
_LARGE_BYTES = 8 * MIB
_LARGE_TURNS = 5
_ANSWER_S = 20.0
_POLL_S = 0.2


class EchoEngine:
    """Implements protocol.contract.Engine: a worker that opens an endpoint and answers every request with nothing,
    until stopped. `host`: the address at which other machines reach it ("": it serves its own only)."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stopped = threading.Event()

    def submit(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopped.set()

    def describe_step(self) -> None:
        """Whoever asked for it watches it."""

    def run(self, emit: Callable[[Event], None]) -> None:
        try:
            server = EndpointServer(self._host)
        except OSError as error:
            emit(Failed(f"no endpoint can be opened at {self._host}: {error.strerror or error}", restartable=False))
            return
        emit(EndpointOpened(server.endpoint))
        try:
            while not self._stopped.is_set():
                ready, _, _ = select.select(server.listening, [], [], _POLL_S)
                for listening in ready:
                    admitted = server.admit(listening)
                    if admitted is not None:
                        with suppress(LinkLost, ProtocolError):
                            self._answer(Link(admitted))
        finally:
            server.close()

    def _answer(self, link: Link) -> None:
        try:
            link.hello(GREETING_S)
            link.send(Welcome(VERSION, DrafterState("echo", "echo"), 0, ""))
            while not self._stopped.is_set():
                link.wait(_POLL_S)
                while (turn := link.turn()) is not None:
                    started = time.perf_counter()
                    guesses = [WireDraft() for _ in turn.asks]
                    took_ms = (time.perf_counter() - started) * MS_PER_S
                    link.send(DraftResponse(turn.number, guesses, took_ms))
        finally:
            link.close()


def measure_link(endpoint: LinkEndpoint, left: str, right: str) -> Iterator[LinkProfile]:
    """Connect to an endpoint of `right` and measure the path. Raises LinkLost, ProtocolError."""
    link = Link(knock(endpoint))
    try:
        link.send(Hello(VERSION, host_id(), ""))
        link.welcome(GREETING_S)
        trips = [_turn_ms(link, number, "") for number in range(_ROUND_TRIPS + _WARM_UP)][_WARM_UP:]
        rtt_ms = statistics.median(trips)
        text = "x" * _LARGE_BYTES
        large = statistics.median(_turn_ms(link, number, text) for number in range(_LARGE_TURNS))
        yield LinkProfile(left, right, rtt_ms, _LARGE_BYTES / max(large - rtt_ms, 1e-3) * MS_PER_S)
    finally:
        link.close()


def _turn_ms(link: Link, number: int, text: str) -> float:
    started = time.perf_counter()
    link.send(DraftRequest(number, [Extend(text, [])] if text else [], [Ask("a", 1)]))
    answer = link.answer(_ANSWER_S)
    while answer is not None and answer.number != number:
        answer = link.answer(_ANSWER_S)
    if answer is None:
        raise LinkLost(f"no answer within {_ANSWER_S:g} s")
    return (time.perf_counter() - started) * MS_PER_S - answer.took_ms
