"""One pair of target and draft over one link: all ways of drafting in turns, timed from where the client is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.protocol.draft_messages import RemoteState
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.draft_process import start_draft_process
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.overlap.measure import OVERLAP, OverlapPair
from outrider_lab.bench.wan.centre import PLAIN, Answer, Client, run_centre
from outrider_lab.bench.wan.relay import DelayingRelay

OVERLAPPED, SEQUENTIAL = "overlapped", "sequential"


@dataclass(slots=True)
class _Way:
    """One way of decoding, and what was seen of it. `loop` names what the centre does, `far`: the client is not where
    the target is."""

    loop: str
    far: bool
    answers: list[Answer] = field(default_factory=list)
    link_bytes: int = 0
    waited_ms: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of whole answers: the way of the request, the prompt and the way of the last token are in it."""
        return self.tokens / sum(answer.last_s for answer in self.answers)


def list_ways() -> dict[str, _Way]:
    """Return the ways that take turns: what the client at the edge sees of a target at the centre, with its draft at
    the edge; and the reverse, the target at the edge with its draft at the centre."""
    return {
        "plain": _Way(PLAIN, far=True),
        "sequential": _Way(SEQUENTIAL, far=True),
        "overlapped": _Way(OVERLAPPED, far=True),
        "reverse_plain": _Way(PLAIN, far=False),
        "reverse": _Way(OVERLAPPED, far=False),
    }


def measure_link(pair: OverlapPair, rtt_ms: float, texts: Sequence[PromptText], max_tokens: int) -> dict[str, Any]:
    """Return a row of the result. Raises BenchError where something cannot be loaded, AdapterError and ConfigError."""
    with ExitStack() as stack:
        links = {name: stack.enter_context(_slow_draft(pair, overlap, rtt_ms)) for name, overlap in OVERLAP.items()}
        endpoints = {name: endpoint for name, (_, endpoint) in links.items()}
        told, port, requests = stack.enter_context(_start_centre(pair, endpoints, texts))
        hop = stack.enter_context(DelayingRelay(("127.0.0.1", port), rtt_ms))
        near, far = Client(("127.0.0.1", port)), Client(hop.address)
        for client in (near, far):
            stack.callback(client.close)
        ways, states = list_ways(), dict[str, RemoteState]()
        for number, request in enumerate(requests):
            turn = number % len(ways)
            for name in [*ways][turn:] + [*ways][:turn]:
                way = ways[name]
                relay = links[way.loop][0] if way.loop in links else hop
                before = relay.sent_bytes + relay.returned_bytes
                way.answers.append((far if way.far else near).ask(way.loop, request | {"max_tokens": max_tokens}))
                if way.loop in links:
                    state: RemoteState = told.recv()
                    way.waited_ms += state.wait_ms - states.get(way.loop, RemoteState()).wait_ms
                    states[way.loop] = state
                way.link_bytes += relay.sent_bytes + relay.returned_bytes - before
    return dict(pair.stated) | {"rtt_ms": rtt_ms} | _describe(ways, states)


@contextmanager
def _slow_draft(pair: OverlapPair, overlap: str, rtt_ms: float) -> Iterator[tuple[DelayingRelay, LinkEndpoint]]:
    """Start a draft worker that the target reaches over a slow link alone."""
    _, worker = pair.configure(overlap)
    with start_draft_process(worker, pair.draft_cores, "127.0.0.1") as draft:
        (address,) = (one for one in draft.endpoint.addresses if one.startswith("tcp:"))
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        with DelayingRelay((host, int(port)), rtt_ms) as relay:
            slow = f"tcp:{relay.address[0]}:{relay.address[1]}"
            yield relay, msgspec.structs.replace(draft.endpoint, addresses=[slow])


@contextmanager
def _start_centre(
    pair: OverlapPair, endpoints: dict[str, LinkEndpoint], texts: Sequence[PromptText]
) -> Iterator[tuple[Connection[Any, Any], int, list[dict[str, Any]]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_centre, args=(pair, endpoints, list(texts), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            found = ours.recv()
        except EOFError:
            raise BenchError("the target's process ended before it could be asked") from None
        if isinstance(found, str):
            raise BenchError(f"the target: {found}")
        yield ours, *found
    finally:
        process.kill()
        process.join()


def _describe(ways: dict[str, _Way], states: dict[str, RemoteState]) -> dict[str, Any]:
    row: dict[str, Any] = {f"{name}_tokens_per_s": way.tokens_per_s for name, way in ways.items()}
    over = ways["overlapped"]
    firsts = {name: sum(one.first_s for one in way.answers) / len(way.answers) for name, way in ways.items()}
    state = states[OVERLAPPED]
    tried = state.ahead_hits + state.ahead_misses
    answers = [[answer.tokens for answer in way.answers] for way in ways.values()]
    drafted = sum(answer.drafted for answer in over.answers)
    return row | {
        "tokens": over.tokens,
        "acceptance_rate": sum(answer.accepted for answer in over.answers) / drafted if drafted else 0.0,
        "drafted_per_token": drafted / over.tokens,
        "first_token_ms": firsts["overlapped"] * MS_PER_S,
        "wait_ms_per_token": over.waited_ms / over.tokens,
        "sequential_wait_ms_per_token": ways["sequential"].waited_ms / ways["sequential"].tokens,
        "measured_rtt_ms": state.rtt_ms,
        "lead_tokens": state.lead_tokens,
        "ready_share": state.ahead_hits / tried if tried else 0.0,
        "vs_plain_from_edge": over.tokens_per_s / ways["plain"].tokens_per_s,
        "vs_sequential": over.tokens_per_s / ways["sequential"].tokens_per_s,
        "sequential_vs_plain": ways["sequential"].tokens_per_s / ways["plain"].tokens_per_s,
        "reverse_vs_plain": ways["reverse"].tokens_per_s / ways["reverse_plain"].tokens_per_s,
        "bytes_per_token": over.link_bytes / over.tokens,
        "plain_bytes_per_token": ways["plain"].link_bytes / ways["plain"].tokens,
        "identical": all(one == answers[0] for one in answers),
    }
