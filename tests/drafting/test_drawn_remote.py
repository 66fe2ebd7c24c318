"""Drawn tokens and their rows over the link: as a draft model in this process, and distributed as the target says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DraftLink
from orchestrator.worker.draft_server import server
from orchestrator.worker.draft_server.shared import DraftSession, SharedAnswer, SharedDrafter
from orchestrator.worker.drafting.port import Ask, Draft
from orchestrator.worker.drafting.protocol import DraftResponse, WireDraft, check_guess
from orchestrator.worker.drafting.remote.connection import WorkerGreeter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from policies.sampling import PROPOSAL_WIDTH, DraftDistribution, Sampling, propose
from tests.engine.test_drawn_drafts import LENGTH, chances, draft_model, submits, unlike
from tests.support.drafters import FINGERPRINT, in_a_thread
from tests.support.loops import decode, loop_over, toy

BYTES_A_CANDIDATE = 8


class AskedOnce(SharedDrafter):
    """Asks for a whole draft at once and nothing ahead, so that tokens are those of the same asks in this process."""

    def ask(
        self, session: DraftSession, number: int, asks: Sequence[Ask], within_s: float, round_s: float = 0.0
    ) -> None:
        drafts = self.drafter.propose([replace(ask, key=session.key(ask.key)) for ask in asks])
        self._due.append(SharedAnswer(session, number, drafts, []))

    def run_pass(self) -> bool:
        return False


class InStep(RemoteDrafter):
    """Waits for every answer, so that what comes out does not depend on how fast this machine is."""

    rows = True

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        super().propose(asks)
        deadline_s = time.monotonic() + 60.0
        while self._pending is not None:
            assert time.monotonic() < deadline_s
            time.sleep(0.0001)
            super().propose([])
        drafts = [self._offer(ask) for ask in asks]
        return drafts if self.rows else [replace(draft, proposals=()) for draft in drafts]


@contextmanager
def remote() -> Iterator[InStep]:
    """The other model in a draft worker."""
    reports: list[DraftLink] = []
    drafter = InStep(
        "model",
        greet=WorkerGreeter(FINGERPRINT, "SIM"),
        limits=RemoteLimits(),
        clock=SystemClock(),
        report=reports.append,
    )
    with in_a_thread(draft_model(), runs_ahead="always") as door:
        drafter.attach(door)
        while not reports:
            time.sleep(0.001)
        yield drafter
        drafter.close()
    assert [report.state for report in reports] == ["connected"]


@pytest.mark.parametrize("rule", ["rejection", "tolerance"])
def test_tokens_and_acceptance_are_those_of_a_draft_in_this_process(rule, monkeypatch):
    monkeypatch.setattr(server, "SharedDrafter", AskedOnce)
    asked = submits(rule, 12, max_tokens=40, depth=4, top_k=0)
    here, rounds_here = decode(loop_over(toy(), draft_model()), asked)
    with remote() as drafter:
        there, rounds_there = decode(loop_over(toy(), drafter), asked)
    assert there == here
    counted = [(done.drafted, done.accepted) for done in rounds_here if done.drafted]
    assert [(done.drafted, done.accepted) for done in rounds_there if done.drafted] == counted
    assert sum(accepted for _, accepted in counted) > 50


def test_more_is_accepted_with_the_rows_than_without(monkeypatch):
    monkeypatch.setattr(server, "SharedDrafter", AskedOnce)
    asked = submits("rejection", 60, max_tokens=20, depth=1, top_k=0)
    rates = []
    for rows in (False, True):
        with remote() as drafter:
            drafter.rows = rows
            _, rounds = decode(loop_over(toy(), drafter), asked)
        rates.append(sum(done.accepted for done in rounds) / sum(done.drafted for done in rounds))
    assert rates[1] > 1.2 * rates[0] > 0.0


def test_what_is_drafted_ahead_leans_nothing():
    asked = submits("rejection", 2000)
    with remote() as drafter:
        out, rounds = decode(loop_over(toy(), drafter, running=16), asked)
        state = drafter.states()[0].remote
    assert state is not None
    assert state.ahead_hits > 100
    drafted, accepted = sum(done.drafted for done in rounds), sum(done.accepted for done in rounds)
    assert 0.1 * drafted < accepted < 0.95 * drafted
    counts = Counter(tuple(tokens) for tokens in out.values())
    assert unlike(counts, chances(asked[0].sampling, LENGTH)) > 1e-3


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 400),
    count=st.integers(0, 6),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
)
def test_what_was_drawn_arrives_as_it_was(seed: int, width: int, count: int, top_p: float):
    random = np.random.default_rng(seed)
    sampling = Sampling(1.0, top_p=top_p, seed=seed, acceptance="rejection")
    draws = [propose(random.normal(0, 3, width).astype(np.float32), sampling, place, 0) for place in range(count)]
    tokens = tuple(token for token, _ in draws)
    draft = Draft(tokens, (0.5,) * count, "model", proposals=tuple(proposal for _, proposal in draws))
    frame = msgspec.msgpack.encode(DraftResponse(1, [WireDraft.of(draft)]))
    assert len(frame) < 64 + count * (PROPOSAL_WIDTH * BYTES_A_CANDIDATE + 32)
    found = check_guess(msgspec.msgpack.decode(frame, type=DraftResponse).drafts[0], count, width, "model")
    assert found.tokens == draft.tokens
    assert found.confidences == pytest.approx(draft.confidences, abs=1 / 255)
    assert [bits(proposal) for proposal in found.proposals] == [bits(proposal) for proposal in draft.proposals]


def bits(proposal: DraftDistribution | None) -> tuple[bytes, bytes]:
    assert proposal is not None
    return proposal.tokens.tobytes(), proposal.shares.tobytes()


def test_tokens_that_were_not_drawn_have_no_rows():
    coupled = Draft((1, 2), (0.5, 0.5), "model")
    assert WireDraft.of(coupled).rows == ()
    found = check_guess(WireDraft.of(coupled), 2, 10, "model")
    assert (found.tokens, found.drafter, found.proposals) == (coupled.tokens, "model", ())
    assert found.confidences == pytest.approx(coupled.confidences, abs=1 / 255)
