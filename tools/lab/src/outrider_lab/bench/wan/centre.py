"""The centre of `outrider bench wan`: a process with the target, which decodes for whoever connects.

A line of JSON asks for a prompt, and a line comes back for each round: token ids, both ways. Whoever is connected over
a slow link sees tokens when a client there would.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.errors import OutriderError
from orchestrator.machine.cores import pin_to_cores
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.recommend.run import encode_prompts, warm_up
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.loading.prepared import silent
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.overlap.measure import OverlapPair, connect_drafter

PLAIN = "plain"
_SETTLES_S = 0.3  # a draft worker drafts on for the last prompt of a way: that is not the next one's


@dataclass(frozen=True, slots=True)
class Answer:
    """What was seen of one request from where it was asked: times in seconds from then on."""

    tokens: tuple[int, ...]
    first_s: float
    last_s: float
    drafted: int
    accepted: int


class Client:
    """Asks the centre for answers, from wherever its socket reaches it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")

    def ask(self, way: str, request: dict[str, Any]) -> Answer:
        """Return the answer to a request that is decoded in this way. Raises OutriderError."""
        started_s = time.perf_counter()
        self._socket.sendall(json.dumps({"way": way, **request}).encode() + b"\n")
        tokens: list[int] = []
        first_s = last_s = 0.0
        while line := self._lines.readline():
            last_s = time.perf_counter() - started_s
            told = json.loads(line)
            if "error" in told:
                raise OutriderError(told["error"])
            first_s = first_s or last_s
            tokens += told["tokens"]
            if "drafted" in told:
                return Answer(tuple(tokens), first_s, last_s, told["drafted"], told["accepted"])
        raise OutriderError("the target's process ended in mid-answer")

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self._socket.close()


def run_centre(
    pair: OverlapPair, endpoints: dict[str, LinkEndpoint], texts: Sequence[PromptText], told: Connection[Any, Any]
) -> None:
    """Load the target, connect to the drafts, tell port and prompts, and serve until the process is killed. Tells a
    text instead where that fails."""
    try:
        pin_to_cores(pair.target_cores)
        options, _ = pair.configure("never")
        target = load_target(options, silent)
        drafters = {name: connect_drafter(target, options, endpoint) for name, endpoint in endpoints.items()}
        loops = {PLAIN: build_loop(target, options, None)}
        for name, drafter in drafters.items():
            chain = ChainDrafter([drafter])
            warm_up(target, options, chain)
            loops[name] = build_loop(target, options, chain)
        prompts = encode_prompts(texts, target)
    except OutriderError as error:
        told.send(str(error))
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        requests = [{"prompt": list(one.tokens), "stop": list(one.stop_tokens)} for one in prompts]
        told.send((listening.getsockname()[1], requests))
        _Desk(loops, drafters, told).serve(listening)


@dataclass(frozen=True, slots=True)
class _Desk:
    """Takes requests of all connections, one after the other, and tells after each how its drafter's link is."""

    loops: dict[str, DecodeLoop]
    drafters: dict[str, RemoteDrafter]
    told: Connection[Any, Any]

    def serve(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as known:
            known.register(listening, selectors.EVENT_READ)
            while True:
                for key, _ in known.select():
                    if key.data is None:
                        connected, _ = listening.accept()
                        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        known.register(connected, selectors.EVENT_READ, (connected, connected.makefile("rb")))
                        continue
                    connected, lines = key.data
                    if line := lines.readline():
                        self._answer(connected, json.loads(line))
                    else:
                        known.unregister(connected)
                        connected.close()

    def _answer(self, connected: socket.socket, asked: dict[str, Any]) -> None:
        way = asked["way"]
        loop = self.loops[way]
        refused = loop.submit(Submit(way, asked["prompt"], asked["max_tokens"], stop_tokens=asked["stop"]))
        if refused is not None:
            connected.sendall(json.dumps({"error": refused.message}).encode() + b"\n")
            return
        while not loop.idle:
            for delta in loop.run_round_strictly().deltas:
                line: dict[str, Any] = {"tokens": list(delta.tokens)}
                if delta.finish and delta.stats is not None:
                    line |= {"drafted": delta.stats.drafted, "accepted": delta.stats.accepted}
                connected.sendall(json.dumps(line).encode() + b"\n")
        if (drafter := self.drafters.get(way)) is not None:
            time.sleep(_SETTLES_S)
            self.told.send(drafter.states()[0].remote)
