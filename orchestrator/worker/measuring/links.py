"""Measures the path between two workers: the transport that drafts use, to an endpoint that one of them opens.

The round trip is that of a draft request with one ask and its answer, less what the other side says it took. Bandwidth
is that of one large request, one way.
"""

from __future__ import annotations

import os
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from adapters.contract import DeviceLost
from adapters.framing import ProtocolError
from device_profiles.link import LinkProfile
from device_profiles.units import MIB, MS_PER_S
from orchestrator.protocol.commands import Command, Stop
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.events import EndpointOpened, Event, Failed
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import GREETING_S, EndpointServer, LinkLost, host_id, knock
from orchestrator.protocol.measuring import Finding, ProbeOptions
from orchestrator.worker.drafting import protocol as wire
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.measuring.engine import MeasuringEngine

# The median counts. Not tuned.
_ROUND_TRIPS = 100
# Before each, as a message comes once in a round: both sides sleep by then, and to wake up takes most of the time
# between two processes of a host (ADR 0137).
_APART_S = 0.01
_WARM_UP = 20  # not counted: the first find cold code and buffers
_LARGE_BYTES = 8 * MIB  # for the rate: far above what buffers of a socket hold
_LARGE_TURNS = 5  # the median counts. Not tuned.
_ANSWER_S = 20.0  # of a link that is slower nothing is known. Not tuned.
_POLL_S = 0.2  # not tuned


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
                            self._answer(wire.Link(admitted))
        finally:
            server.close()

    def _answer(self, link: wire.Link) -> None:
        try:
            link.hello(GREETING_S)
            link.send(wire.Welcome(wire.VERSION, DrafterState("echo", "echo"), 0, ""))
            while not self._stopped.is_set():
                link.wait(_POLL_S)
                while (turn := link.turn()) is not None:
                    started = time.perf_counter()
                    guesses = [wire.WireDraft() for _ in turn.asks]
                    took_ms = (time.perf_counter() - started) * MS_PER_S
                    link.send(wire.DraftResponse(turn.number, guesses, took_ms))
        finally:
            link.close()


def measure_link(endpoint: LinkEndpoint, left: str, right: str) -> Iterator[LinkProfile]:
    """Connect to an endpoint of `right` and measure the path. Raises LinkLost, ProtocolError."""
    link = wire.Link(knock(endpoint))
    try:
        link.send(wire.Hello(wire.VERSION, host_id(), ""))
        link.welcome(GREETING_S)
        for number in range(_WARM_UP):
            _turn_ms(link, number, "")
        rtt_ms = statistics.median(_rare_turn_ms(link, number) for number in range(_ROUND_TRIPS))
        text = "x" * _LARGE_BYTES
        large = statistics.median(_turn_ms(link, number, text) for number in range(_LARGE_TURNS))
        yield LinkProfile(left, right, rtt_ms, _LARGE_BYTES / max(large - rtt_ms, 1e-3) * MS_PER_S)
    finally:
        link.close()


def _rare_turn_ms(link: wire.Link, number: int) -> float:
    """Return what a round trip takes that nothing went before for a while."""
    time.sleep(_APART_S)
    return _turn_ms(link, number, "")


def _turn_ms(link: wire.Link, number: int, text: str) -> float:
    started = time.perf_counter()
    link.send(wire.DraftRequest(number, [wire.Extend(text, [])] if text else [], [Ask("a", 1)]))
    answer = link.answer(_ANSWER_S)
    while answer is not None and answer.number != number:
        answer = link.answer(_ANSWER_S)
    if answer is None:
        raise LinkLost(f"no answer within {_ANSWER_S:g} s")
    return (time.perf_counter() - started) * MS_PER_S - answer.took_ms


def build_echo(options: dict[str, Any]) -> EchoEngine:
    """Return the engine that answers. Called inside the worker process."""
    return EchoEngine(os.environ.get(NODE_ADDRESS, "") if options["across"] else "")


def build_probe(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine that measures. Called inside the worker process."""
    wanted = msgspec.convert(options, ProbeOptions)
    return MeasuringEngine(lambda _progress: _probe(wanted))


def _probe(wanted: ProbeOptions) -> Iterator[Finding]:
    try:
        yield from measure_link(wanted.endpoint, wanted.left, wanted.right)
    except (LinkLost, ProtocolError) as error:
        raise DeviceLost(f"the way from {wanted.left} to {wanted.right}: {error}") from error
