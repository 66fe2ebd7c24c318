"""What control keeps of all replicas is what a look at each would find, and the few that it looks at are enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.events import ClusterOpened, StreamOpened, WorkerSaid, WorkersChosen, WorkerStarted
from orchestrator.daemon.control.replicas import fleet as fleet_module
from orchestrator.daemon.control.replicas.replicas import Rank, Replica
from orchestrator.daemon.control.routing.affinity import PrefixHolders, SeenPrefixes, block_keys
from orchestrator.daemon.control.routing.route_choice import choose_route
from orchestrator.daemon.control.routing.router import Router
from orchestrator.daemon.control.step import step
from orchestrator.daemon.control.streams.request_history import format_route
from orchestrator.daemon.control.streams.streams import Sender, Stream
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Gauges, RoundReport
from policies.serving.narrowing import IDLE_KINDS, KINDS, PER_KIND, PRICED_ALL
from policies.serving.replica_load import (
    PairPaces,
    SeenRound,
    add_paces,
    predict_prefill_ms,
)
from policies.serving.routing import FULL, Route
from tests.api.support import READY
from tests.control.test_step import ControlMachine, spec
from tests.support.paces import predict_saved_ms, predict_tpot_ms
from tests.support.ready import change_ready

SLOW, FAST = 30.0, 10.0
_OFTEN = settings(max_examples=60, stateful_step_count=50, deadline=None, phases=[Phase.generate])
_WATCHED = (Rank.STANDBY, Rank.JOINING, Rank.SERVING, Rank.RETIRING)


def check_counts(state: State) -> None:
    """Compare what is kept with what a look at every replica finds."""
    fleet, counts = state.fleet, state.streams.counts
    serving = [one for one in state.replicas.serving if one.serving]
    watched = state.replicas.list_ranked(*_WATCHED)
    assert fleet.count_places() == (sum(counts[one.name] for one in serving), sum(one.places for one in serving))
    assert fleet.count_free() == sum(max(0, one.places - counts[one.name]) for one in serving)
    assert fleet.list_crowded() == [one for one in serving if counts[one.name] > one.places]
    assert fleet.list_loading() == [one for one in watched if one.life.running and not one.state.serving]
    assert fleet.list_busy() == [one for one in watched if one.serving and counts[one.name]]
    assert fleet.is_plain is not any(one.rank is Rank.RETIRING or one.standby for one in state.replicas.with_streams)
    for part in {part for one in watched for part in one.parts}:
        assert fleet.list_on(part) == [one for one in state.replicas.with_streams if part in one.parts]
    assert state.streams.held == len([one for one in state.streams.live() if not one.at])
    for one in state.replicas.list_all():
        assert len(state.streams.at(one.name)) == counts[one.name] == one.standing.live
    paces = [one.paces.plain for one in state.replicas.with_streams]
    for sequences in (1, 3):
        assert fleet.paces.plain.tpot_ms(sequences) == pytest.approx(add_paces(paces).tpot_ms(sequences))


class CountedMachine(ControlMachine):
    """Whatever happens to workers, streams and operators."""

    @invariant()
    def what_is_kept_is_what_a_look_would_find(self) -> None:
        if hasattr(self, "world"):
            check_counts(self.world.state)


@pytest.fixture
def narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow the choice however few there are, and compare it with the choice among all."""
    monkeypatch.setattr(fleet_module, "PRICED_ALL", 0)
    choose = Router._choose_route

    def choose_and_compare(self: Router, stream: Stream, prefix: Sequence[int], now_s: float) -> Route:
        found = choose(self, stream, prefix, now_s)
        candidates, self._fleet.candidates = self._fleet.candidates, None
        every = choose(self, stream, prefix, now_s)
        self._fleet.candidates = candidates
        assert (found.replica is None) is (every.replica is None)
        if found.replica is not None:
            prices = {one.name: one.price_ms for one in every.rated}
            assert prices[found.replica] <= 1.2 * every.rated[0].price_ms + 1e-6
        return found

    monkeypatch.setattr(Router, "_choose_route", choose_and_compare)


def test_what_is_kept_of_the_fleet_is_true_whatever_happens() -> None:
    run_state_machine_as_test(CountedMachine, settings=_OFTEN)


def test_few_of_very_many_are_enough_whatever_happens(narrowed: None) -> None:
    run_state_machine_as_test(CountedMachine, settings=_OFTEN)


def build_fleet(count: int) -> State:
    """So many replicas, all ready."""
    state = State(max_restarts=3)
    step(state, WorkersChosen([spec(f"r{number:03}", device="") for number in range(count)], []), 0.0)
    step(state, ClusterOpened(), 0.0)
    for worker in range(count):
        step(state, WorkerStarted(worker, "here"), 0.0)
        step(state, WorkerSaid(worker, READY), 0.0)
    return state


def fill(state: State, replica: Replica, streams: int) -> None:
    for number in range(streams):
        stream = state.streams.open(Submit(f"{replica.name}-{number}", [1, 2], 9))
        state.streams.send(stream, replica.name, Sender(replica.group, ""))


def pace(tpot_ms: float, draft_ms: float = 0.0) -> PairPaces:
    """What a replica shows that took so long for a token, and with its draft so much less."""
    paces = PairPaces()
    for sequences in (1, 2, 4) * 12:
        plain_ms = tpot_ms * (1.0 + 0.1 * sequences)
        paces = paces.observe(SeenRound(sequences, sequences, 2 * sequences, 0, plain_ms))
        if draft_ms:
            seen = SeenRound(sequences, 3 * sequences, 4 * sequences, 2 * sequences, 3 * draft_ms, 0.0, "small")
            paces = paces.observe(seen)
    return paces


figures = st.fixed_dictionaries(
    {
        "live": st.integers(0, 7),
        "slots": st.integers(1, 5),
        "blocks": st.integers(0, 40),
        "free": st.integers(0, 40),
        "tpot_ms": st.sampled_from([0.0, 9.0, 10.0, 11.0, 40.0]),
        "draft_ms": st.sampled_from([0.0, 4.0, 30.0]),
        "remembered": st.integers(0, 6),
        "serves": st.sampled_from([True, True, True, False]),
    }
)


def price(one: Replica, every: Sequence[Replica], live: int, prompt: int, output: int, cached: int) -> float:
    """What the head of policies.serving.routing says that a request costs, term by term."""
    ready, gauges, paces = one.state.ready, one.state.gauges, [other.paces for other in every]
    assert ready is not None
    assert gauges is not None
    running = min(live, one.places)
    sequences = min(running + 1, one.places)
    plain = output * predict_tpot_ms(one.paces.plain, [other.plain for other in paces], sequences)
    saved = output * predict_saved_ms(one.paces, paces, one.draft, sequences) if one.draft else 0.0
    prefill = (prompt - cached) * predict_prefill_ms([other.plain for other in paces])
    service = plain - saved + prefill
    waiting = live - running
    queue = (waiting + 1) * service / one.places if waiting or running >= one.places else 0.0
    tokens = ready.kv.blocks * ready.kv.block_tokens
    taken = tokens - gauges.free_blocks * ready.kv.block_tokens + prompt + output - cached
    filled = taken / tokens if tokens else 0.0
    return queue + service * max(0.0, filled - FULL) / (1.0 - FULL) + prefill + plain - saved


@given(st.lists(figures, min_size=1, max_size=PRICED_ALL), st.integers(1, 120), st.integers(1, 500))
@settings(deadline=None, max_examples=60)
def test_the_choice_is_that_of_pricing_each_replica_as_it_is_documented(
    wanted: list[dict[str, Any]], prompt: int, output: int
) -> None:
    state = build_fleet(len(wanted))
    tokens, expected = list(range(prompt)), []
    for replica, told in zip(state.replicas.serving, wanted, strict=True):
        small = ["small"] if told["draft_ms"] else []
        ready = change_ready(READY, slots=told["slots"], kv_blocks=told["blocks"], drafters=small)
        step(state, WorkerSaid(replica.worker, ready), 1.0)
        drafters = [DrafterState("small", "model", "ok")] if told["draft_ms"] else []
        gauges = Gauges(0, 0, min(told["free"], told["blocks"]), 40, 0, 0, 0, 0, drafters=drafters)
        step(state, WorkerSaid(replica.worker, gauges), 1.0)
    for replica, told in zip(state.replicas.serving, wanted, strict=True):
        if told["tpot_ms"]:
            replica.paces = pace(told["tpot_ms"], told["draft_ms"])
        replica.prefixes.note(block_keys(tokens[: 16 * told["remembered"]]))
        fill(state, replica, told["live"])
        replica.state.serving = told["serves"]
        replica.on_change()
    every = state.replicas.serving
    for replica, told in zip(every, wanted, strict=True):
        if told["serves"]:
            cached = replica.prefixes.count_cached_tokens(block_keys(tokens))
            left = min(output, state.streams.latency.output_tokens)
            expected.append((price(replica, every, told["live"], prompt, left, cached), told["live"], replica.name))
    stream = state.streams.open(Submit("new", tokens, output), now_s=1.0)
    found = state.router._choose_route(stream, block_keys(tokens), 1.0)
    if not expected:
        assert found.replica is None
        return
    prices = {one.name: one.price_ms for one in found.rated}
    assert {name: prices[name] for _, _, name in expected} == {name: pytest.approx(cost) for cost, _, name in expected}
    assert found.replica == min((prices[name], load, name) for _, load, name in expected)[2]


@given(
    st.lists(st.tuples(st.sampled_from([FAST, SLOW]), st.integers(0, 6)), min_size=40, max_size=70),
    st.integers(1, 200),
    st.sets(st.integers(0, 39), max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_the_narrowed_choice_is_that_among_all_where_replicas_of_a_kind_are_alike(
    wanted: list[tuple[float, int]], output: int, lost: set[int]
) -> None:
    state = build_fleet(len(wanted))
    for replica, (tpot_ms, live) in zip(state.replicas.serving, wanted, strict=True):
        replica.paces = pace(tpot_ms)
        fill(state, replica, live)
        if replica.engine in lost:
            replica.state.mark_worker_lost("gone")
    stream = state.streams.open(Submit("new", [1] * 40, output), now_s=1.0)
    prefix = block_keys(stream.submit.prompt)
    found = state.router._choose_route(stream, prefix, 1.0)
    every = state.replicas.serving
    among_all = choose_route(stream, prefix, every, state.streams, {})
    assert found.replica == among_all.replica
    assert found.unseen == len(every) - (len(found) - 1)
    assert 0 < len(found) <= PER_KIND * KINDS + IDLE_KINDS + 1


def test_who_remembers_a_prompt_is_looked_at_whatever_it_has_to_do() -> None:
    state = build_fleet(PRICED_ALL + 20)
    for replica in state.replicas.serving:
        replica.paces = pace(FAST)
    prompt = list(range(100))
    warm = state.replicas.serving[45]
    warm.prefixes = SeenPrefixes(1000)
    warm.on_change()
    fill(state, warm, 2)
    step(state, StreamOpened(Submit("first", [7], 4)), 1.0)
    warm.prefixes.note(block_keys(prompt))
    step(state, StreamOpened(Submit("second", prompt, 4)), 1.0)
    stream = state.streams.find_live("second")
    assert stream is not None
    assert stream.at == warm.name
    (told,) = state.router.book.find_routes("second", 1.0)
    assert told.rated[-1].name == f"{PRICED_ALL + 20 - len(told.rated) + 1} more"
    assert "not priced" in told.rated[-1].why_not
    assert warm.taken_by is not None
    assert "more: not priced" in format_route(warm.taken_by)


def test_a_replica_that_begins_anew_remembers_nothing() -> None:
    holders, seen = PrefixHolders(), SeenPrefixes(64)
    keys = block_keys(list(range(200)))
    seen.tell(holders, "a", 100)
    seen.note(keys)
    assert holders.find_holders(keys) == ["a"]
    assert seen.count_cached_tokens(keys) == 64
    other = SeenPrefixes(64)
    other.tell(holders, "b", 2)
    other.note(keys)
    assert sorted(holders.find_holders(keys[:2])) == ["a", "b"]
    seen.tell(None, "", 100)
    assert holders.find_holders(keys) == ["b"]


def test_rounds_of_a_large_fleet_are_learnt_as_those_of_a_small_one() -> None:
    state = build_fleet(PRICED_ALL + 20)
    for number, replica in enumerate(state.replicas.serving):
        for sequences in (1, 3):
            round_ms = 10.0 + number % 3 + sequences
            done = RoundReport([], sequences, 2 * sequences, 0, 0, 0, [], round_ms, round_ms, 0.0)
            step(state, WorkerSaid(replica.worker, msgspec.structs.replace(done, round_tokens=sequences)), 2.0)
    paces = [one.paces.plain for one in state.replicas.serving]
    assert state.fleet.paces.plain.tpot_ms(2) == pytest.approx(predict_tpot_ms(paces[1], paces, 2))
