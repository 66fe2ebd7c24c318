"""A draft worker behind a link of 12 ms: the output is the target's, also where the link is cut or frozen."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from outrider_lab.bench.draft_process import start_draft_process
from outrider_lab.bench.overlap.measure import OverlapPair
from outrider_lab.replay.fixed import FixedDepth

from orchestrator.worker.drafting.remote.drafter import RemoteDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from tests.drafting.test_remote import REQUESTS, remote, remote_of, until
from tests.drafting.test_remote import expected as expected
from tests.support.loops import loop_over, toy
from tests.support.slow_link import DelayingRelay

RTT_MS = 12.0
SOURCE = {"source": "simulated:toy", "adapter": "simulated"}
DRAFT = {"source": "simulated:toy?base_ms=1&agree=0.8", "adapter": "simulated"}
TARGET = "base_ms=6"
PAYLOAD = bytes(range(256)) * 4096


@contextmanager
def slow_draft(overlap: str = "always", **limits: float) -> Iterator[tuple[RemoteDrafter, DelayingRelay]]:
    """A real draft worker, and a target's drafter that reaches it through a delaying relay alone."""
    _, options = OverlapPair(SOURCE, DRAFT).configure(overlap)
    with start_draft_process(options, (), "127.0.0.1") as draft:
        (address,) = (one for one in draft.addresses if one.startswith("tcp:"))
        with DelayingRelay(("127.0.0.1", int(address.rpartition(":")[2])), RTT_MS) as relay:
            slow = msgspec.structs.replace(draft, addresses=[f"tcp:127.0.0.1:{relay.address[1]}"])
            drafter_limits = {"max_wait_ms": 100.0} | limits
            with remote(slow, **drafter_limits) as (drafter, _):
                until(lambda: drafter.states()[0].state == "ok")
                yield drafter, relay


def decode_with(loop: DecodeLoop, after_rounds: int, happens: Callable[[], object]) -> dict[str, list[int]]:
    """Decode all requests; something happens when so many rounds are over."""
    out: dict[str, list[int]] = {submit.request_id: [] for submit in REQUESTS}
    for submit in REQUESTS:
        assert loop.submit(submit) is None
    rounds = 0
    while not loop.idle:
        for delta in loop.run_round().deltas:
            out[delta.request_id] += delta.tokens
        rounds += 1
        if rounds == after_rounds:
            happens()
    assert rounds > after_rounds
    return out


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_greedy_and_seeded_output_is_the_targets_over_a_slow_link(expected, overlap) -> None:
    with slow_draft(overlap) as (drafter, relay):
        loop = loop_over(toy(script=TARGET), drafter, running=2, policy=FixedDepth(4))
        assert decode_with(loop, 20, lambda: None) == expected
        state = drafter.states()[0]
        assert state.remote is not None
        assert state.remote.rtt_ms >= RTT_MS
        assert state.remote.lead_tokens > 0
        assert 0 < state.remote.sent_bytes < relay.sent_bytes, "encryption adds to it"
        assert 0 < state.remote.received_bytes < relay.returned_bytes
        assert state.remote.in_time + state.remote.late > 0
        assert state.remote.ahead_hits > 0 or overlap == "never"


def test_a_link_that_is_cut_in_mid_stream_costs_no_token(expected) -> None:
    with slow_draft() as (drafter, relay):
        loop = loop_over(toy(script=TARGET), drafter, running=2, policy=FixedDepth(4))
        assert decode_with(loop, 20, relay.cut) == expected
        until(lambda: drafter.states()[0].state == "ok")
        assert remote_of(drafter).connections >= 2


def test_a_relay_that_is_gone_costs_no_token(expected) -> None:
    with slow_draft() as (drafter, relay):
        loop = loop_over(toy(script=TARGET), drafter, running=2, policy=FixedDepth(4))
        assert decode_with(loop, 20, relay.close) == expected
        assert drafter.states()[0].state == "lost"


def test_a_frozen_link_is_waited_for_once(expected) -> None:
    with slow_draft(answer_timeout_s=60.0) as (drafter, relay):
        loop = loop_over(toy(script=TARGET), drafter, running=2, policy=FixedDepth(4))
        asks: list[int] = []

        def freeze() -> None:
            relay.freeze()
            asks.append(remote_of(drafter).asks)

        assert decode_with(loop, 20, freeze) == expected
        assert remote_of(drafter).asks <= asks[0] + 2, "what is asked for is not asked for again before its answer"
        assert drafter.states()[0].state == "ok"
        relay.thaw()


def test_a_relay_delays_both_ways_and_keeps_the_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as upstream, DelayingRelay(upstream.getsockname(), RTT_MS) as relay:
        with socket.create_connection(relay.address) as near:
            far, _ = upstream.accept()
            with far:
                started_s = time.monotonic()
                near.sendall(b"there")
                assert far.recv(16) == b"there"
                assert time.monotonic() - started_s >= RTT_MS / 2000.0
                far.sendall(b"back")
                assert near.recv(16) == b"back"
                assert time.monotonic() - started_s >= RTT_MS / 1000.0
                near.sendall(PAYLOAD)
                near.shutdown(socket.SHUT_WR)
                assert b"".join(iter(lambda: far.recv(65536), b"")) == PAYLOAD
        assert (relay.sent_bytes, relay.returned_bytes) == (5 + len(PAYLOAD), 4)


def test_a_relay_of_a_declared_bandwidth_takes_the_time_of_its_bytes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as upstream,
        DelayingRelay(upstream.getsockname(), 0.0, bytes_per_s=4 * len(PAYLOAD)) as relay,
        socket.create_connection(relay.address) as near,
    ):
        far, _ = upstream.accept()
        with far:
            started_s = time.monotonic()
            near.sendall(PAYLOAD)
            near.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: far.recv(65536), b"")) == PAYLOAD
            assert time.monotonic() - started_s >= 0.25
