"""Drafts for outcomes of a verification: the same that a drafter would make that knew, there before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.simulated.model import ToyModel
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.links.endpoint import EndpointServer, LinkLost
from orchestrator.worker.draft_server.shared import DraftSession, SharedDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask, Draft
from orchestrator.worker.drafting.protocol import (
    VERSION,
    Begin,
    DraftLines,
    DraftRequest,
    DraftResponse,
    End,
    Extend,
    Link,
    Welcome,
    WireBranch,
    WireDraft,
)
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter
from policies.sampling import Sampling
from tests.drafting.test_draft_cache import fresh, read_cache
from tests.drafting.test_lookahead import Clock
from tests.drafting.test_remote import REQUESTS, remote, remote_of, until
from tests.drafting.test_remote import expected as expected
from tests.support.drafters import FINGERPRINT, VOCABULARY, in_a_thread
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, loop_over, toy

PROMPT = [60, 32, 101] * 3
WEAK = "agree=0.6"


def branching(*, slots: int = 16, script: str = "") -> ModelDrafter:
    model = toy(slots=slots, script=script)
    return ModelDrafter(model, DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=1e6, branches=True)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_branch_that_came_true_drafts_what_a_fresh_drafter_would(rounds, temperature, slots, penalties):
    sampling = Sampling(temperature, seed=3, frequency_penalty=0.5 if penalties else 0.0)
    drafter, held = branching(slots=slots), list(PROMPT)
    drafter.begin("a", PROMPT, sampling)
    for limit, choice, came_true in rounds:
        (draft,) = drafter.propose([Ask("a", limit)])
        outcomes = drafter.list_outcomes("a")
        assert all(0.0 <= one.chance <= 1.0 for one in outcomes)
        outcomes = [one for one in outcomes if one.accepted < len(draft.tokens)]
        assert all(draft.tokens[one.accepted] != one.token for one in outcomes)
        verdict = [*draft.tokens[: choice % (limit + 1)], 5]
        if outcomes:
            outcome = outcomes[choice % len(outcomes)]
            made = drafter.branch("a", "b", outcome)
            assert made == (slots > 1)
            foreseen = drafter.propose([Ask("b", limit)])[0] if made else None
            if came_true:
                verdict = [*draft.tokens[: outcome.accepted], outcome.token]
            drafter.extend("a", verdict)
            if made and came_true:
                drafter.adopt("a", "b")
            drafter.prune("b")
            held += verdict
            if foreseen is not None and came_true:
                new = branching()
                new.begin("x", PROMPT, sampling)
                new.extend("x", held[len(PROMPT) :])
                assert foreseen.tokens == new.propose([Ask("x", limit)])[0].tokens
                assert drafter.propose([Ask("a", limit)])[0].tokens == foreseen.tokens, "it goes on from what was made"
        else:
            drafter.extend("a", verdict)
            held += verdict
        (known,) = drafter._known.values()
        assert known.tokens == held
        assert isinstance(drafter._model, ToyModel)
        assert np.array_equal(read_cache(drafter._model, known.slot, known.held), fresh(known))
    drafter.end("a", keep=False)
    assert drafter.states()[0].state == "ok"
    assert drafter._model.free_blocks() == drafter._model.capabilities.total_blocks


@dataclass
class Alone:
    """A shared drafter with one target that verifies for as many passes as there are to run."""

    shared: SharedDrafter
    session: DraftSession

    def ask(self, limit: int) -> tuple[Draft, int]:
        """Return what is drafted, and how many passes that took."""
        self.shared.ask(self.session, 1, [Ask("a", limit)], 1000.0)
        passes = 0
        while not (found := self.shared.take_answers()):
            assert self.shared.run_pass()
            passes += 1
        return found[0].drafts[0], passes

    def verify(self) -> None:
        for _ in range(200):
            if not self.shared.run_pass():
                return
        raise AssertionError("it drafts ahead for ever")


def test_the_likeliest_outcomes_are_drafted_for_and_answered_without_a_pass() -> None:
    drafter = branching(slots=40)
    clock = Clock(step_s=0.001)  # rows cost nothing
    alone = Alone(shared := SharedDrafter(drafter, clock), session := shared.join(runs_ahead=True))
    shared.update(session, Begin("a", list(PROMPT), Sampling()))
    seen = 0
    for number in range(30):
        draft, passes = alone.ask(4)
        assert draft.tokens
        seen += number > 0 and passes == 0
        alone.verify()
        (sequence,) = session.sequences.values()
        assert 0 < len(sequence.branches) <= 32
        outcomes = {(one.outcome.accepted, one.outcome.token): one for one in sequence.branches}
        assert len(outcomes) == len(sequence.branches), "each has one branch"
        likeliest = max(outcomes.values(), key=lambda one: one.outcome.chance)
        assert likeliest.line.ahead
        verdict = [*draft.tokens[: likeliest.outcome.accepted], likeliest.outcome.token]
        shared.update(session, Extend("a", verdict))
        assert sequence.ahead == likeliest.line.ahead
        assert not sequence.branches
    assert seen == 29
    shared.update(session, End("a", keep=False))
    assert drafter._model.free_blocks() == drafter._model.capabilities.total_blocks
    assert len(drafter._cache._free) == 40


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans(), st.integers(0, 6)), min_size=2, max_size=14
    ),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.9]),
)
@settings(max_examples=60)
def test_no_branch_leaves_a_line_behind_its_end(rounds, lead, temperature) -> None:
    """However few passes there were between two rounds, and whatever the target chose."""
    shared = SharedDrafter(branching(slots=40, script=WEAK), Clock(step_s=0.001))
    session = shared.join(runs_ahead=True)
    shared.update(session, Begin("a", PROMPT, Sampling(temperature, seed=3)))
    session.lead = lead
    sequence = session.sequences["a"]
    for number, (limit, right, foreseen, passes) in enumerate(rounds, 1):
        if limit:
            shared.ask(session, number, [Ask("a", limit)], 0.0)
        for _ in range(passes):
            shared.run_pass()
            shared.take_answers()
            assert all(one.outcome.accepted <= len(sequence.ahead) for one in sequence.branches)
        tokens = [*sequence.ahead[:right], 5]
        if foreseen and sequence.branches:
            outcome = sequence.branches[right % len(sequence.branches)].outcome
            tokens = [*sequence.ahead[: outcome.accepted], outcome.token]
        shared.update(session, Extend("a", tokens))
        assert all(one.outcome.accepted <= len(sequence.ahead) for one in sequence.branches)


def test_a_round_without_drafts_is_foreseen_too() -> None:
    shared = SharedDrafter(branching(slots=40), Clock(step_s=0.001))
    alone = Alone(shared, session := shared.join(runs_ahead=True))
    shared.update(session, Begin("a", list(PROMPT), Sampling()))
    for _ in range(10):
        alone.verify()
        (sequence,) = session.sequences.values()
        likeliest = max(sequence.branches, key=lambda branch: branch.outcome.chance)
        assert {branch.outcome.accepted for branch in sequence.branches} == {0}, "nobody was sent a draft"
        shared.update(session, Extend("a", [likeliest.outcome.token]))
        assert sequence.ahead == likeliest.line.ahead != ()


def test_the_chances_of_rivals_are_those_that_they_had() -> None:
    drafter = branching()
    drafter.begin("a", PROMPT, Sampling())

    def list_chances() -> list[tuple[float, int]]:
        drafter.propose([Ask("a", 1)])
        return [(outcome.chance, outcome.token) for outcome in drafter.list_outcomes("a")]

    (first, _), _, (third, _) = list_chances()
    assert first > third, "the model's own word"
    for _ in range(40):
        drafter.extend("a", [list_chances()[2][1]])
    (first, _), _, (third, _) = list_chances()
    assert first < third


def test_a_target_that_shares_the_cores_is_not_drafted_for_ahead() -> None:
    shared = SharedDrafter(branching(), SystemClock())
    alone = Alone(shared, session := shared.join(runs_ahead=False))
    shared.update(session, Begin("a", list(PROMPT), Sampling()))
    alone.ask(4)
    assert not shared.run_pass()
    assert not session.sequences["a"].branches
    assert not shared.list_lines()


def test_drafts_that_were_there_before_change_no_token(expected) -> None:
    """How many there are is a matter of time: `outrider bench overlap` measures it."""
    drafter = branching(slots=48, script=f"base_ms=1&{WEAK}")
    with in_a_thread(drafter, runs_ahead="always") as door, remote(door, max_wait_ms=1000.0) as (far, _):
        loop = loop_over(toy(script="base_ms=24"), far, running=1, policy=FixedDepth(4))
        assert decode(loop, REQUESTS)[0] == expected
        assert remote_of(far).ahead_hits > 0


def lines(sequence: int, base: int, tokens: tuple[int, ...], *branches: WireBranch) -> DraftLines:
    return DraftLines(sequence, base, WireDraft(tokens, bytes((230,)) * len(tokens)), list(branches))


@contextmanager
def script_workers() -> Iterator[tuple[RemoteDrafter, Link]]:
    """A target, and its draft worker played by hand."""
    server = EndpointServer()
    links: list[Link] = []

    def welcome() -> None:
        with suppress(OSError, LinkLost):
            admitted = server.admit(server.listening[0])
            if admitted is not None:
                link = Link(admitted)
                link.hello(5.0)
                link.send(Welcome(VERSION, DrafterState("knowing", "model"), VOCABULARY, FINGERPRINT, runs_ahead=True))
                links.append(link)

    thread = threading.Thread(target=welcome, daemon=True)
    thread.start()
    try:
        with remote(server.endpoint) as (drafter, _):
            until(lambda: links)
            yield drafter, links[0]
    finally:
        for link in links:
            link.close()
        server.close()
        thread.join(60.0)


def test_lines_serve_the_outcome_that_comes_and_late_ones_serve_none() -> None:
    with script_workers() as (drafter, link):
        drafter.begin("a", [1, 2], Sampling())
        branch = WireBranch(1, 9, 51, WireDraft((10, 11), bytes((128, 128))))
        link.send(lines(1, 2, (3, 4, 5), branch))
        until(lambda: drafter.propose([Ask("a", 4)])[0].tokens)
        assert drafter.propose([Ask("a", 4)])[0].tokens == (3, 4, 5), "what is likeliest, not what is longest"
        drafter.extend("a", [3, 9])
        assert drafter.propose([Ask("a", 4)])[0].tokens == (10, 11)
        drafter.extend("a", [8])
        assert drafter.propose([Ask("a", 4)])[0].tokens == ()
        link.send(lines(1, 4, (8, 12)))
        until(lambda: drafter.propose([Ask("a", 4)])[0].tokens == (12,))
        drafter.end("a", keep=False)
        drafter.begin("a", [1, 2], Sampling())  # of the same name, and the same length
        link.send(lines(1, 2, (3, 4)))  # of the one before
        link.send(lines(2, 2, (6, 7)))
        until(lambda: drafter.propose([Ask("a", 4)])[0].tokens)
        assert drafter.propose([Ask("a", 4)])[0].tokens == (6, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        lines(1, 7, (3,)),
        lines(1, -1, (3,)),
        lines(1, 2, (VOCABULARY,)),
        lines(1, 2, (3,), WireBranch(2, 4, 128, WireDraft())),
        lines(1, 2, (3,), WireBranch(-1, 4, 128, WireDraft())),
        lines(1, 2, (3,), WireBranch(1, VOCABULARY, 128, WireDraft())),
        lines(1, 2, (3,), WireBranch(1, 4, 400, WireDraft())),
        lines(1, 2, tuple([3] * 600)),
    ],
)
def test_lines_that_make_no_sense_end_the_link(wrong: DraftLines) -> None:
    with script_workers() as (drafter, link):
        drafter.begin("a", [1, 2], Sampling())
        link.send(wrong)
        until(lambda: drafter.propose([Ask("a", 2)]) and drafter.states()[0].state == "garbage")


def test_a_token_that_is_waited_for_has_the_price_of_those_that_rounds_make_meanwhile() -> None:
    with script_workers() as (drafter, link):
        drafter.begin("a", [1, 2], Sampling())
        link.send(lines(1, 2, (3, 4)))  # it has read the prompt
        until(lambda: drafter.propose([]) or drafter._sequences["a"].met)
        drafter.extend("a", [9])  # which nobody foresaw
        drafter.propose([Ask("a", 2, round_ms=40.0, gain=4.0, fixed=False)])
        turns = [turn for _ in range(4) if (turn := link.turn()) is not None and turn.asks]
        assert [turn.round_ms for turn in turns] == [10.0]
        assert drafter._pending is not None
        assert drafter._pending.wait_ms == 10.0, "an accepted token a draft is hoped for at first"


def test_an_answer_is_not_lost_among_lines() -> None:
    with script_workers() as (drafter, link):
        drafter.begin("a", [1, 2], Sampling())
        drafter.propose([Ask("a", 2, round_ms=10.0)])
        until(lambda: isinstance(link.turn(), DraftRequest))
        for _ in range(20):
            link.send(lines(1, 2, (3, 4)))
        link.send(DraftResponse(1, [WireDraft((6, 7), bytes((230, 230)))]))
        until(lambda: remote_of(drafter).late + remote_of(drafter).in_time or drafter.propose([]) is None)
        assert drafter.states()[0].state == "ok"
