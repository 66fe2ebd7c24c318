"""A drafter behind a link: the same output whatever the other side does, and drafts again when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState, DraftLink, RemoteState
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import EndpointServer, LinkLost
from orchestrator.worker.drafting.port import Ask, Draft
from orchestrator.worker.drafting.protocol import (
    VERSION,
    DraftRequest,
    DraftResponse,
    Link,
    SparseRow,
    Welcome,
    WireDraft,
    pack_proposal,
)
from orchestrator.worker.drafting.remote.connection import WorkerGreeter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from policies.sampling import DraftDistribution, Sampling
from tests.support.drafters import FINGERPRINT, VOCABULARY, KnowingDrafter, in_a_thread, texts_of
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, loop_over, toy


def requests(count: int, *, max_tokens: int = 48) -> list[Submit]:
    return [
        Submit(
            request_id=f"r{index}",
            prompt=[60 + index, 32, 101] * (1 + index * 3),
            max_tokens=max_tokens,
            sampling=Sampling(0.9 if index % 2 else 0.0, seed=index),
        )
        for index in range(count)
    ]


REQUESTS = requests(6)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in REQUESTS}


@pytest.fixture(scope="module")
def texts(expected) -> list[list[int]]:
    return texts_of(REQUESTS, expected)


def until(happened: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def remote(door: LinkEndpoint | None = None, **limits: float) -> Iterator[tuple[RemoteDrafter, list[DraftLink]]]:
    """A remote drafter, connected where there is a door, and what it reports."""
    reports: list[DraftLink] = []
    drafter = RemoteDrafter(
        "knowing",
        greet=WorkerGreeter(FINGERPRINT, "SIM"),
        limits=RemoteLimits(**limits),
        clock=SystemClock(),
        report=reports.append,
    )
    try:
        if door is not None:
            drafter.attach(door)
            until(lambda: reports)
        yield drafter, reports
    finally:
        drafter.close()


@pytest.mark.parametrize("wrong_every", [0, 3, 7])
@pytest.mark.parametrize("running", [1, 6])
def test_the_output_is_the_targets_and_drafts_are_accepted(expected, texts, wrong_every, running):
    inner = KnowingDrafter(texts, wrong_every=wrong_every)
    # Where the machine is busy, an answer takes longer than a round is worth: here rounds wait for it.
    with in_a_thread(inner) as door, remote(door, max_wait_ms=1000.0) as (drafter, _):
        out, rounds = decode(
            loop_over(toy(script="base_ms=3"), drafter, running=running, policy=FixedDepth(12)), REQUESTS
        )
        assert out == expected
        assert sum(done.accepted for done in rounds) > 100
        (state,) = drafter.states()
        assert (state.state, state.adapter, state.name) == ("ok", "scripted", "knowing")
        assert state.remote is not None
        assert 0 <= state.remote.asks - state.remote.in_time - state.remote.late <= 1  # the last may be open
        assert state.remote.ahead_hits > 0 or wrong_every
        assert drafter.memory_bytes() == 4096


def remote_of(drafter: RemoteDrafter) -> RemoteState:
    remote = drafter.states()[0].remote
    assert remote is not None
    return remote


def test_without_a_process_every_round_goes_on_at_once(expected):
    with remote() as (drafter, _):
        out, rounds = decode(loop_over(toy(), drafter, policy=FixedDepth(12)), REQUESTS)
        assert out == expected
        assert sum(done.drafted for done in rounds) == 0
        assert drafter.states()[0].state == "starting"


@contextmanager
def answering(answer: Callable[[DraftRequest, Link], None], **welcome: Any) -> Iterator[LinkEndpoint]:
    """The other side, played by a thread: `answer` gets each turn that has wishes."""
    door = EndpointServer()

    def play() -> None:
        with suppress(OSError, LinkLost):
            while (admitted := door.admit(door.listening[0])) is not None:
                link = Link(admitted)
                try:
                    link.hello(5.0)
                    link.send(Welcome(VERSION, DrafterState("played", "scripted"), VOCABULARY, FINGERPRINT))
                    while True:
                        link.wait(0.05)
                        while (turn := link.turn()) is not None:
                            if turn.asks:
                                answer(turn, link)
                except LinkLost:
                    continue
                finally:
                    link.close()

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    try:
        yield door.endpoint
    finally:
        door.listening[0].shutdown(2)
        thread.join(60.0)
        door.close()
    door.close()


def drafts(*tokens: int, confidence: float = 0.9) -> list[WireDraft]:
    return [WireDraft(tokens, bytes((round(confidence * 255),)) * len(tokens))]


def build_drawn_guess(
    tokens: Sequence[int], shares: Sequence[float], *, count: int = 1, cut: int = 0
) -> list[WireDraft]:
    """A draft of token 32, said to be drawn from a row."""
    row = pack_proposal(DraftDistribution(np.array(tokens, np.uint32), np.array(shares, np.float32)))
    assert row is not None
    return [WireDraft((32,), bytes((230,)), (SparseRow(row.tokens, row.shares[: len(row.shares) - cut]),) * count)]


GARBAGE: dict[str, Callable[[DraftRequest], DraftResponse | bytes]] = {
    "a token outside the vocabulary": lambda turn: DraftResponse(turn.number, drafts(VOCABULARY)),
    "a negative token": lambda turn: DraftResponse(turn.number, drafts(-1)),
    "more tokens than asked for": lambda turn: DraftResponse(turn.number, drafts(*[32] * 65)),
    "another number of drafts": lambda turn: DraftResponse(turn.number, drafts(32) * 3),
    "more confidences": lambda turn: DraftResponse(turn.number, [WireDraft((32,), bytes((128, 128)))]),
    "fewer confidences": lambda turn: DraftResponse(turn.number, [WireDraft((32, 33), bytes((128,)))]),
    "an offset behind all tokens": lambda turn: DraftResponse(turn.number, drafts(32), offsets=[1000]),
    "a negative offset": lambda turn: DraftResponse(turn.number, drafts(32), offsets=[-1]),
    "another number of offsets": lambda turn: DraftResponse(turn.number, drafts(32), offsets=[0, 0]),
    "an answer to nothing": lambda turn: DraftResponse(turn.number + 7, drafts(32)),
    "a row that is no distribution": lambda turn: DraftResponse(turn.number, build_drawn_guess([32, 33], [0.5, 0.7])),
    "a row with a share that is none": lambda turn: DraftResponse(
        turn.number, build_drawn_guess([32, 33], [1.0, float("nan")])
    ),
    "a row without its token": lambda turn: DraftResponse(turn.number, build_drawn_guess([31, 33], [0.5, 0.5])),
    "a row with a token twice": lambda turn: DraftResponse(turn.number, build_drawn_guess([32, 32], [0.5, 0.5])),
    "a row outside the vocabulary": lambda turn: DraftResponse(
        turn.number, build_drawn_guess([32, VOCABULARY], [0.5, 0.5])
    ),
    "a row that is too wide": lambda turn: DraftResponse(turn.number, build_drawn_guess(range(160), [1 / 160] * 160)),
    "an empty row": lambda turn: DraftResponse(turn.number, build_drawn_guess([], [])),
    "half a share": lambda turn: DraftResponse(turn.number, build_drawn_guess([32, 33], [0.5, 0.5], cut=2)),
    "more rows than tokens": lambda turn: DraftResponse(turn.number, build_drawn_guess([32], [1.0], count=2)),
    "no frame": lambda turn: b"\0\0\0\4abcd",
    "a frame without end": lambda turn: b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_given_up_and_costs_no_token(expected, kind):
    def answer(turn: DraftRequest, link: Link) -> None:
        sent = GARBAGE[kind](turn)
        if isinstance(sent, bytes):
            link._socket.sendall(sent)
        else:
            link.send(sent)

    with answering(answer) as door, remote(door) as (drafter, reports):
        out, _ = decode(loop_over(toy(script="base_ms=1"), drafter, running=1), REQUESTS[:2])
        assert out == {key: expected[key] for key in out}
        assert reports[-1].state == "garbage"
        assert reports[-1].reason
        assert [report.state for report in reports] == ["connected", "garbage"]  # it is not tried again
        assert drafter.states()[0].state == "garbage"


def test_a_link_that_is_cut_is_made_again_and_told_everything(expected, texts):
    turns = 0

    def answer(turn: DraftRequest, link: Link) -> None:
        nonlocal turns
        turns += 1
        if turns % 5 == 0:
            raise LinkLost("cut")
        asked = turn.asks[0]
        held.setdefault(asked.key, [])
        link.send(DraftResponse(turn.number, [WireDraft() for _ in turn.asks]))

    held: dict[str, list[int]] = {}
    with answering(answer) as door, remote(door) as (drafter, reports):
        out, _ = decode(loop_over(toy(script="base_ms=4"), drafter, policy=FixedDepth(4)), REQUESTS)
        assert out == expected
        assert remote_of(drafter).connections > 2
        assert {"connected", "lost"} == {report.state for report in reports}


def test_a_process_that_never_answers_is_given_up_and_a_new_one_drafts(expected, texts):
    with answering(lambda turn, link: None) as mute, remote(mute, answer_timeout_s=0.1) as (drafter, reports):
        loop = loop_over(toy(script="base_ms=3"), drafter, policy=FixedDepth(12))
        out, rounds = decode(loop, REQUESTS)
        assert out == expected
        assert sum(done.drafted for done in rounds) == 0
        assert reports[-1].state == "hung"
        with in_a_thread(KnowingDrafter(texts)) as door:
            drafter.attach(door)
            until(lambda: reports[-1].state == "connected")
            out, rounds = decode(loop, REQUESTS)
            assert out == expected
            assert sum(done.accepted for done in rounds) > 100


def test_a_slow_drafter_is_soon_not_waited_for(expected, texts):
    with in_a_thread(KnowingDrafter(texts, token_ms=10.0)) as door, remote(door) as (drafter, _):
        out, rounds = decode(loop_over(toy(script="base_ms=2"), drafter, running=1), REQUESTS)
        assert out == expected
        waited = sum(done.draft_ms for done in rounds)
        assert waited < 0.5 * sum(done.round_ms - done.draft_ms for done in rounds)
        assert remote_of(drafter).late > remote_of(drafter).in_time


def test_a_late_answer_is_used_where_the_target_chose_the_same(texts):
    prompt, text = REQUESTS[0].prompt, texts[0]
    behind = len(prompt)
    release = threading.Event()

    def answer(turn: DraftRequest, link: Link) -> None:
        release.wait(10.0)
        if turn.number == 1:
            link.send(DraftResponse(1, drafts(*text[behind : behind + 4])))

    with answering(answer) as door, remote(door, max_wait_ms=0.0) as (drafter, _):
        drafter.begin("a", prompt, Sampling())
        assert drafter.propose([Ask("a", 4)]) == [Draft()]
        drafter.extend("a", text[behind : behind + 1])
        release.set()
        until(lambda: drafter.propose([Ask("a", 4)])[0].tokens == tuple(text[behind + 1 : behind + 4]))
        assert remote_of(drafter).late == 1
        drafter.extend("a", [text[behind + 1], 33])  # not what the target chose
        assert drafter.propose([Ask("a", 4)])[0].tokens == ()


def test_another_vocabulary_is_refused(expected):
    with in_a_thread(KnowingDrafter([]), vocabulary_fingerprint="other") as door, remote(door) as (drafter, reports):
        assert reports[-1].state == "refused"
        assert "vocabulary" in reports[-1].reason
        out, _ = decode(loop_over(toy(), drafter), REQUESTS[:1])
        assert out["r0"] == expected["r0"]


def test_without_the_key_nobody_is_let_in(texts):
    with (
        in_a_thread(KnowingDrafter(texts)) as door,
        remote(LinkEndpoint(door.addresses, b"guessed")) as (drafter, reports),
    ):
        until(lambda: reports)
        assert reports[0].state == "lost"
        assert "greeting" in reports[0].reason
        drafter.attach(door)
        until(lambda: reports[-1].state == "connected")


def test_it_is_reached_over_tcp_where_the_unix_socket_is_not(expected, texts):
    with in_a_thread(KnowingDrafter(texts), host="127.0.0.1") as door:
        far = LinkEndpoint([door.addresses[0] + "x", door.addresses[1]], door.key, door.certificate)
        with remote(far) as (drafter, _):
            out, rounds = decode(loop_over(toy(script="base_ms=3"), drafter, policy=FixedDepth(12)), REQUESTS)
            assert out == expected
            assert sum(done.accepted for done in rounds) > 100


def test_on_the_targets_device_it_is_not_asked_where_nobody_waits(expected, texts):
    slow = KnowingDrafter(texts, token_ms=10.0)
    with in_a_thread(slow, runs_ahead="never") as door, remote(door) as (drafter, _):
        out, rounds = decode(loop_over(toy(script="base_ms=2"), drafter, running=1), REQUESTS)
        assert out == expected
        assert remote_of(drafter).asks < 0.3 * len(rounds)
        assert not remote_of(drafter).runs_ahead
