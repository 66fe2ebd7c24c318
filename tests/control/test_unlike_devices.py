"""Where requests go in a fleet of unlike devices: what is known of one device is known of all that are alike."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.events import (
    ClusterOpened,
    StreamClosed,
    StreamOpened,
    WorkerSaid,
    WorkersChosen,
    WorkerStarted,
)
from orchestrator.daemon.control.routing.affinity import block_keys
from orchestrator.daemon.control.routing.working import WorkingSet
from orchestrator.daemon.control.step import step
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.ready import ExpectedRounds, Ready
from orchestrator.protocol.rounds import Gauges, RoundReport
from policies.serving.narrowing import PRICED_ALL
from policies.serving.replica_load import PairPaces, SeenRound, SharedPaces
from tests.api.support import READY
from tests.control.test_step import spec
from tests.support.ready import change_ready

DRAFT = "small"
MS = st.floats(1.0, 100.0)


def device(name: str, alone_ms: float = 0.0) -> Ready:
    """A worker on a device of this name; its profile says so long of a token, or nothing."""
    expected = ExpectedRounds(alone_ms, 2.0 * alone_ms, 0.1 * alone_ms) if alone_ms else None
    return change_ready(READY, device_name=name, slots=4, drafters=[DRAFT], expected_rounds=expected)


def build_fleet(devices: Sequence[Ready]) -> State:
    """A replica for each device, ready, with its draft at work."""
    state = State(max_restarts=3)
    step(state, WorkersChosen([spec(f"r{number:03}", device="") for number in range(len(devices))], []), 0.0)
    step(state, ClusterOpened(), 0.0)
    gauges = Gauges(0, 0, READY.kv.blocks, READY.kv.blocks, 0, 0, 0, 0, drafters=[DrafterState(DRAFT, "model", "ok")])
    for worker, ready in enumerate(devices):
        step(state, WorkerStarted(worker, "here"), 0.0)
        step(state, WorkerSaid(worker, ready), 0.0)
        step(state, WorkerSaid(worker, gauges), 0.0)
    return state


def run_rounds(
    state: State, worker: int, round_ms: float, *, count: int = 20, made: float = 1.0, waits_ms: float = 0.0
) -> None:
    """Let a worker run rounds of one sequence, which gets so many tokens in each; drafts took `waits_ms` of it."""
    drafted = 4 if made > 1.0 or waits_ms else 0
    done = RoundReport([], 1, 1 + drafted, drafted and 1, drafted, round(made) - 1, [], round_ms, round_ms, waits_ms)
    for _ in range(count):
        step(state, WorkerSaid(worker, msgspec.structs.replace(done, round_tokens=made)), 1.0)


def send(state: State, key: str, tokens: int = 64) -> str:
    """Return the replica that a request goes to. No two keys' prompts are alike."""
    step(state, StreamOpened(Submit(key, [*key.encode(), 2, 3], tokens)), 2.0)
    stream = state.streams.find_live(key)
    assert stream is not None
    return stream.at


@pytest.mark.parametrize("others", [1, PRICED_ALL + 8])
def test_the_first_request_goes_to_the_device_that_is_fast_by_its_profile(others: int) -> None:
    state = build_fleet([*[device("slow", 40.0)] * others, device("fast", 4.0)])
    assert send(state, "first") == f"r{others:03}"


@pytest.mark.parametrize("others", [2, PRICED_ALL + 8])
def test_an_idle_replica_is_known_by_those_on_devices_like_its_own(others: int) -> None:
    """Only one of the fast ones has run anything: the next request goes beside it, not behind it."""
    state = build_fleet([*[device("slow")] * others, device("fast"), device("fast")])
    for worker in range(others):
        run_rounds(state, worker, 40.0)
    run_rounds(state, others, 4.0)
    assert {send(state, "one"), send(state, "two")} == {f"r{others:03}", f"r{others + 1:03}"}


@pytest.mark.parametrize(("untried_ms", "then"), [(4.0, "r002"), (90.0, "r001")])
def test_a_lone_request_tries_a_device_of_which_nothing_is_known_and_the_next_goes_to_the_fastest(
    untried_ms: float, then: str
) -> None:
    state = build_fleet([device("slow"), device("fast"), device("untried")])
    run_rounds(state, 0, 40.0)
    run_rounds(state, 1, 8.0)
    first = send(state, "first")
    assert first == "r002"
    step(state, StreamClosed("first"), 3.0)
    run_rounds(state, 2, untried_ms)
    assert send(state, "next") == then


@pytest.mark.parametrize(("made", "then"), [(4.0, "r001"), (1.2, "r000")])
def test_a_lone_request_tries_a_draft_of_which_nothing_is_known_and_the_next_goes_to_the_faster_pair(
    made: float, then: str
) -> None:
    """Without drafts the second takes twice as long. What its own draft saves is known once it has drafted."""
    state = build_fleet([change_ready(device("fast", 20.0), drafters=[]), device("slow", 40.0)])
    run_rounds(state, 0, 20.0)
    assert send(state, "first") == "r001"
    step(state, StreamClosed("first"), 3.0)
    run_rounds(state, 1, 44.0, made=made, waits_ms=4.0)
    assert send(state, "next") == then


@given(MS, st.integers(0, 60), st.floats(1.0, 4.0))
@settings(deadline=None)
def test_a_draft_that_was_hardly_tried_is_taken_for_a_good_one_and_one_that_was_for_what_it_showed(
    round_ms: float, rounds: int, made: float
) -> None:
    paces, drafted = SharedPaces(), PairPaces()
    for _ in range(rounds):
        drafted = drafted.observe(SeenRound(1, made, 5.0, 3.0, round_ms, 0.0, DRAFT))
    paces.set_paces(0, drafted, ("gpu",))
    saved_ms = paces.predict_saved_ms(paces.find_group(("gpu",)), drafted, DRAFT, round_ms, 1)
    if rounds < 15:
        assert 0.5 * round_ms < saved_ms < round_ms, "whatever the first rounds show"
    elif rounds > 20:
        assert round_ms - saved_ms == pytest.approx(round_ms / made)


@given(st.lists(st.floats(1.0, 4.0), min_size=2, max_size=6), st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_texts_that_are_easy_to_draft_for_draw_no_requests(made: list[float], tokens: int) -> None:
    """Replicas that are alike cost the same, whatever texts they had."""
    state = build_fleet([device("gpu")] * len(made))
    for worker, one in enumerate(made):
        run_rounds(state, worker, 12.0, made=one)
    found = state.router._choose_route(
        state.streams.open(Submit("q", [1, 2, 3], tokens), now_s=1.0), block_keys([1, 2, 3]), 1.0
    )
    prices = [one.price_ms for one in found.rated]
    assert prices == pytest.approx([prices[0]] * len(made))


@pytest.mark.parametrize("others", [1, PRICED_ALL + 8])
def test_a_replica_that_waits_long_for_its_draft_is_avoided(others: int) -> None:
    """All are on devices that are alike; the draft of all but the last two is far away."""
    state = build_fleet([device("gpu")] * (others + 2))
    for worker in range(others + 2):
        far = worker < others
        run_rounds(state, worker, 42.0 if far else 12.0, made=3.0, waits_ms=32.0 if far else 2.0)
    assert {send(state, "one"), send(state, "two")} == {f"r{others:03}", f"r{others + 1:03}"}


def test_one_of_several_that_are_alike_may_be_slow() -> None:
    """A device that has grown slow is known by its own rounds."""
    state = build_fleet([device("gpu", 10.0)] * 3)
    for worker, round_ms in enumerate((30.0, 10.0, 10.0)):
        run_rounds(state, worker, round_ms)
    assert {send(state, "one"), send(state, "two")} == {"r001", "r002"}


@pytest.mark.parametrize(("slower", "resting"), [(1.0, False), (1.3, True)])
def test_a_member_that_costs_the_others_more_than_it_makes_rests_and_says_why(slower: float, resting: bool) -> None:
    """The second ends one request sooner; the first makes most of many, where it is left alone."""
    state = build_fleet([change_ready(device(*of), slots=16, drafters=[]) for of in (("many", 10.2), ("few", 9.0))])
    for replica, more_ms in zip(state.replicas.list_all(), (1.15, 9.0), strict=True):
        paces, lone_ms = PairPaces(), replica.standing.expected_pace.tpot_ms(1)
        for sequences in (1, 16):
            for _ in range(40):
                tpot_ms = lone_ms + more_ms * (sequences - 1)
                paces = paces.observe(SeenRound(sequences, sequences, 2 * sequences, 0, tpot_ms))
        for _ in range(40):
            paces = paces.observe(SeenRound(1, 1, 2, 0, slower * lone_ms, beside=True))
        replica.paces = paces
    assert send(state, "alone") == "r001", "whoever ends it sooner"
    places = [send(state, f"key{number}") for number in range(15)]
    assert (places.count("r001") == 0) is resting
    (noted,) = state.router.book.find_routes("key14", 2.0)
    assert any("rests: for 16 requests the others make" in rated.why_not for rated in noted.rated) is resting


class TwoThatSlowEachOther:
    """A member for many requests and one for few: beside each other both take 1.3 times as long."""

    def __init__(self) -> None:
        of = (("many", 10.2), ("few", 9.0))
        self.state = build_fleet([change_ready(device(*one), slots=16, drafters=[]) for one in of])
        self.many, self.few = self.members = self.state.replicas.list_all()
        for replica, more_ms in zip(self.members, (1.15, 9.0), strict=True):
            paces, lone_ms = PairPaces(company=1.3), replica.standing.expected_pace.tpot_ms(1)
            for sequences in (1, 16):
                tpot_ms = lone_ms + more_ms * (sequences - 1)
                paces = paces.observe(SeenRound(sequences, sequences, 2 * sequences, 0, tpot_ms))
            replica.paces = paces
        self.state.fleet.refresh()
        self.working = WorkingSet()

    def list_resting(self, live: int, now_s: float, prefix: Sequence[int] = ()) -> set[str]:
        """Return who rests while the first has so many requests."""
        self.many.standing.live = live
        return set(self.working.find_resting(self.members, self.state.fleet.paces, now_s, prefix))


def test_a_member_goes_on_resting_while_those_that_began_together_end_together() -> None:
    """Many end at once and as many follow: the moment between them is no lower load."""
    list_resting = TwoThatSlowEachOther().list_resting
    alone = list_resting(0, 5.0)
    assert alone != {"r001"}
    assert list_resting(15, 10.0) == {"r001"}
    assert list_resting(0, 10.2) == list_resting(0, 11.9) == {"r001"}, "those that ended are followed by others"
    assert list_resting(0, 13.1) == alone, "nobody followed"
    assert list_resting(15, 14.0) == {"r001"}


def test_who_rests_takes_a_prompt_whose_beginning_it_remembers_best() -> None:
    two, keys = TwoThatSlowEachOther(), block_keys(list(range(200)))
    for holder, resting in ((None, {"r001"}), (two.few, set()), (two.many, {"r001"})):
        if holder is not None:
            holder.prefixes.note(keys)
        assert two.list_resting(15, 10.0, keys) == resting


def test_a_rest_ends_also_where_nobody_has_a_reason_to_rest_between_batches() -> None:
    two = TwoThatSlowEachOther()
    for batch in range(8):
        now_s = 10.0 + 8.0 * batch
        assert two.list_resting(0, now_s) == set(), "one request costs nobody anything"
        if not two.list_resting(15, now_s + 0.1):
            break
    assert 3 <= batch <= 5


def test_a_rest_goes_on_where_requests_that_name_its_bits_measured_who_rests() -> None:
    two = TwoThatSlowEachOther()
    for second in range(60):
        two.few.standing.live = 4 if second % 20 > 15 else 0
        assert two.list_resting(15, 10.0 + second) == {"r001"}


def test_a_rest_ends_by_itself_as_nobody_measures_who_rests() -> None:
    """What others cost is learnt anew then: so a factor that one busy moment made too large does not stay."""
    two = TwoThatSlowEachOther()
    rested = [bool(two.list_resting(15, 10.0 + second)) for second in range(60)]
    assert rested[0]
    ends = rested.index(False)
    assert 20 < ends < 40
    assert not any(rested[ends:]), "nothing is slowed any more"
    for replica, sequences in ((two.many, 15), (two.few, 1)) * 40:
        slowed_ms = 1.3 * replica.paces.plain.tpot_ms(sequences)
        replica.paces = replica.paces.observe(SeenRound(sequences, sequences, 2 * sequences, 0, slowed_ms, beside=True))
    assert two.list_resting(15, 80.0), "the figures say so again"
