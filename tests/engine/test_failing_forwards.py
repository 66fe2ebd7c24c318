"""Garbage in one sequence's rows ends that one, and no memory makes forwards smaller: nobody else loses a token."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import OutOfMemory
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Refused
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.port import NO_HINTS
from orchestrator.worker.measuring.known_text import Hours
from policies.serving.batch_bound import FIRST_HOLD_S
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import TYPICAL, start_cost_model
from tests.engine.test_loop import WildDrafter
from tests.support.failing import FailingModel
from tests.support.loops import alone, loop_over, requests, suffix, toy


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return alone(requests(10))


def decode(loop, submits):
    """What each request got, and what was refused; every round's refusals are asked for once, as the engine does."""
    out: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    refused: list[Refused] = []
    for submit in submits:
        assert loop.submit(submit) is None
    while not loop.idle:
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        refused += loop.failures()
    return out, refused


def holding(token, at):
    """Chooses segments that hold a token at or behind a position."""
    return lambda segment: any(one == token and segment.start + index >= at for index, one in enumerate(segment.tokens))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad", ["r2", "r3"])  # greedy, sampled
@pytest.mark.parametrize("drafting", [False, True])
def test_one_bad_row_ends_one_request_and_no_other_token_changes(expected, garbage, bad, drafting):
    submits = requests(10)
    victim = next(one for one in submits if one.request_id == bad)
    inner = toy()
    slots: dict[int, int] = {}

    def spoils(segment):
        if segment.start == 0:
            slots[segment.slot] = segment.tokens[0]
        mine = slots[segment.slot] == victim.prompt[0]
        return mine and segment.start + len(segment.tokens) > len(victim.prompt) + 9

    model = FailingModel(inner, spoils=spoils, garbage=garbage)
    loop = loop_over(model, suffix() if drafting else None, running=6, prefix_reuse=False)
    out, refused = decode(loop, submits)
    assert [(one.request_id, one.kind) for one in refused] == [(bad, "not_finite")]
    assert "SIM" in refused[0].message
    got = out.pop(bad)
    assert 0 < len(got) <= 10
    assert got == expected[bad][: len(got)]
    assert out == {key: tokens for key, tokens in expected.items() if key != bad}
    assert inner.free_blocks() == inner.capabilities.total_blocks
    assert loop.gauges(0).not_finite == 1
    assert loop.failures() == []


def test_every_row_of_a_round_is_judged_by_itself(expected):
    submits = requests(8)
    rounds = itertools.count(1)
    current = [0]

    def spoils(segment):
        return current[0] == 12 and segment.slot % 2 == 0

    class Counting(FailingModel):
        def forward(self, batch):
            current[0] = next(rounds)
            return super().forward(batch)

    out, refused = decode(loop_over(Counting(toy(), spoils=spoils), suffix(), running=8), submits)
    gone = {one.request_id for one in refused}
    assert len(gone) == len(refused) == 4
    for submit in submits:
        whole, got = expected[submit.request_id], out[submit.request_id]
        assert got == (whole[: len(got)] if submit.request_id in gone else whole)


def test_nobody_begins_with_what_a_bad_request_computed():
    """The bad token is in the prompt, so that blocks of it are remembered before its first row shows."""
    script = "garbage=7"
    system = [60, 32, 101] * 40
    model = toy(script=script)
    first = Submit("good", [*system, 65], 8, stop_tokens=[])
    bad = Submit("bad", [*system, 7, *system], 8, stop_tokens=[])
    loop = loop_over(model, None, running=1)
    expected = alone([first])["good"]
    out, refused = decode(loop, [first, bad])
    assert out == {"good": expected, "bad": []}
    assert [one.request_id for one in refused] == ["bad"]
    assert model.attach(0, [*bad.prompt, 1]) == 0
    again, refused = decode(loop_over(model, None, running=1), [first])
    assert (again["good"], refused) == (expected, [])


def test_rows_of_a_scored_prompt_are_looked_at():
    submit = Submit("r", [60, 32, 101] * 10, 8, logprobs=0, prompt_logprobs=True)
    model = FailingModel(toy(), spoils=lambda segment: segment.rows[1] - segment.rows[0] > 5)
    out, refused = decode(loop_over(model, None), [submit])
    assert out == {"r": []}
    assert [one.kind for one in refused] == ["not_finite"]


@pytest.mark.parametrize("most_rows", [1, 2, 9, 30])
@pytest.mark.parametrize("drafting", [False, True])
def test_no_memory_for_many_rows_makes_forwards_smaller_and_changes_no_token(expected, most_rows, drafting):
    inner = toy()
    model = FailingModel(inner)
    model.most_rows = most_rows
    loop = loop_over(model, suffix() if drafting else None, running=6)
    out, refused = decode(loop, requests(10))
    assert out == expected
    assert refused == []
    assert max(rows for _, rows in model.forwards) <= most_rows
    assert len(model.failed) <= 9, "a bound is kept, and is not found anew every round"
    gauges = loop.gauges(0)
    assert gauges.out_of_memory == len(model.failed)
    assert gauges.memory_bound is not None
    assert gauges.memory_bound.rows <= most_rows
    assert gauges.memory_bound.most_rows == 256
    assert "no memory for" in gauges.memory_bound.last
    if most_rows < 5:
        assert gauges.preemptions > 0
    assert inner.free_blocks() == inner.capabilities.total_blocks


def test_memory_that_is_gone_in_mid_stream_sends_the_youngest_back_and_they_go_on(expected):
    model = FailingModel(toy())
    loop = loop_over(model, suffix(), running=6)
    out: dict[str, list[int]] = {submit.request_id: [] for submit in requests(10)}
    for submit in requests(10):
        loop.submit(submit)
    for number in itertools.count():
        if loop.idle:
            break
        model.most_rows = 3 if number == 25 else model.most_rows
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        if number == 25:
            assert loop.gauges(0).running <= 3
            assert loop.gauges(0).preemptions > 0
    assert out == expected


def test_a_row_that_has_no_room_alone_is_out_of_memory():
    class Nothing(FailingModel):
        def forward(self, batch):
            raise OutOfMemory("no memory for a single row", can_go_on=True)

    loop = loop_over(Nothing(toy()), None)
    for submit in requests(4):
        loop.submit(submit)
    with pytest.raises(OutOfMemory, match="single row"):
        loop.run_round()


def test_a_model_that_died_of_it_is_not_tried_again():
    calls = []

    class Dead(FailingModel):
        def forward(self, batch):
            calls.append(len(batch))
            raise OutOfMemory("no memory, and no model any more")

    loop = loop_over(Dead(toy()), None)
    for submit in requests(4):
        loop.submit(submit)
    with pytest.raises(OutOfMemory):
        loop.run_round()
    assert len(calls) == 1


def test_a_bound_is_loosened_when_it_has_stood_for_a_while(expected):
    clock = Hours()
    model = FailingModel(toy())
    model.most_rows = 4
    loop = loop_over(model, None, running=6, clock=clock)
    for submit in requests(10, max_tokens=400):
        loop.submit(submit)
    loop.run_round()
    assert loop.gauges(0).memory_bound is not None
    model.most_rows = 0
    for _ in range(8):
        clock.now_s += FIRST_HOLD_S + 1.0
        loop.run_round()
    assert loop.gauges(0).memory_bound is None
    assert loop.gauges(0).running == 6


class Raising(WildDrafter):
    """Raises what no drafter should, in the method and at the call that the test chooses."""

    name = "raising"

    def __init__(self, where, at):
        super().__init__([(1, 2)])
        self._where, self._left = where, at

    def _count(self, where):
        if where == self._where:
            self._left -= 1
            if self._left < 0:
                raise IndexError("a mistake\nof ours")

    def begin(self, key, tokens, sampling, hints=NO_HINTS):
        self._count("begin")

    def extend(self, key, tokens):
        self._count("extend")

    def end(self, key, *, keep):
        self._count("end")

    def propose(self, asks):
        self._count("propose")
        return super().propose(asks)[: -1 if self._where == "short" else None]

    def close(self):
        self._count("close")


@pytest.mark.parametrize("where", ["begin", "extend", "end", "propose", "short"])
@pytest.mark.parametrize("at", [0, 7])
def test_whatever_a_drafter_raises_costs_its_drafts_only(expected, where, at):
    loop = loop_over(toy(), ChainDrafter([Raising(where, at), suffix()]), running=4)
    out, refused = decode(loop, requests(10))
    assert out == expected
    assert refused == []
    states = {state.name: state for state in loop.gauges(0).drafters}
    assert states["raising"].state == "failed"
    assert "\n" not in states["raising"].reason
    assert states["suffix"].state == "ok"
    assert states["suffix"].accepted > 0


@given(st.integers(1, 40), st.integers(1, 6), st.integers(14, 80), st.integers(0, 30))
@settings(max_examples=30)
def test_identity_under_any_shortage(expected, most_rows, running, blocks, from_round):
    model = FailingModel(toy(kv_blocks=blocks))
    loop = loop_over(model, suffix(), running=running)
    out: dict[str, list[int]] = {submit.request_id: [] for submit in requests(6)}
    for submit in requests(6):
        if loop.submit(submit) is not None:
            del out[submit.request_id]
    for number in itertools.count():
        if loop.idle:
            break
        model.most_rows = most_rows if number >= from_round else 0
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
    assert out == {key: expected[key] for key in out}


class EndingPolicy(Adaptive):
    """Notes which sequences it was told of the end of."""

    def __init__(self) -> None:
        super().__init__(start_cost_model(TYPICAL))
        self.ended: list[str] = []

    def end(self, key: str) -> None:
        super().end(key)
        self.ended.append(key)


def test_a_policy_hears_of_who_was_cancelled_while_a_forward_ran_out_of_memory():
    """In flights a cancel comes while the forward runs."""
    policy, submits = EndingPolicy(), requests(4, depth=3)

    class Failing(FailingModel):
        def forward(self, batch):
            if len(self.forwards) == 3 and not self.failed:
                self.failed.append((len(batch), 0))
                loop.cancel("r1")
                raise OutOfMemory("no memory for so many rows", can_go_on=True)
            return super().forward(batch)

    loop = loop_over(Failing(toy()), suffix(), running=4, policy=policy)
    for submit in submits:
        assert loop.submit(submit) is None
    while not loop.idle:
        loop.run_round()
    assert loop.gauges(0).out_of_memory == 1
    assert set(policy.ended) == {submit.request_id for submit in submits}
