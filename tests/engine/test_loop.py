"""The decode loop over the simulated model: same tokens whatever happens, and nothing left behind."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import DeviceLost
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.drafting.port import NO_HINTS, Draft
from policies.sampling import Sampling
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import END, alone, decode, loop_over, requests, suffix, toy


class WildDrafter:
    """Proposes arbitrary tokens: from right to nonsense, at any length."""

    def __init__(self, guesses):
        self._guesses = itertools.cycle(guesses or [()])

    def begin(self, key, tokens, sampling, hints=NO_HINTS): ...

    def extend(self, key, tokens): ...

    def end(self, key, *, keep): ...

    def memory_bytes(self):
        return 0

    def states(self):
        return []

    def close(self): ...

    def propose(self, asks):
        guesses = [tuple(next(self._guesses))[: ask.limit] for ask in asks]
        return [Draft(tokens, tuple(1.0 for _ in tokens)) for tokens in guesses]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return alone(requests(10))


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 4, 16])
@pytest.mark.parametrize("rows", [16, 256])
def test_identity_with_target_only_decoding(expected, running, depth, rows):
    model = toy(rows=rows)
    loop = loop_over(model, suffix(), running=running, depth=depth, policy=FixedDepth(depth))
    out, rounds = decode(loop, requests(10))
    assert out == expected
    assert model.free_blocks() == model.capabilities.total_blocks
    assert all(done.rows <= rows for done in rounds)
    if depth:
        assert sum(done.accepted for done in rounds) > 0
    else:
        assert sum(done.drafted for done in rounds) == 0


class RestsAfterEach(FixedDepth):
    """Drafts in a round, and does without the next three."""

    def __init__(self, depth):
        super().__init__(depth)
        self.heard, self.without = [], []

    def observe_round(self, now, done):
        self.heard.append(len(now.places))

    def decide_pause(self):
        return 3

    def observe_pause(self, rounds, rows):
        self.without.append((rounds, rows))


def test_a_policy_that_rests_hears_of_nothing_while_few_sequences_begin_or_end(expected):
    policy = RestsAfterEach(2)
    loop = loop_over(toy(), suffix(), policy=policy, depth=2, running=9)
    waiting = requests(9)
    rounds: list[RoundReport] = []

    def run(count, *more):
        for submit in more:
            loop.submit(submit)
        rounds.extend(loop.run_round() for _ in range(count))

    run(9, *waiting[:2])
    assert policy.heard == [2, 2, 2]
    assert not any(done.drafted for place, done in enumerate(rounds) if place % 4)
    run(3, *waiting[2:4])
    assert policy.heard == [2, 2, 2], "as many came as there were"
    run(1)
    assert policy.heard == [2, 2, 2, 4]
    run(1, *waiting[4:])
    assert len(policy.heard) == 5, "more came than there were"
    assert [rounds for rounds, _ in policy.without] == [3, 3, 3]
    while not loop.idle:
        rounds.append(loop.run_round())
    for submit in waiting:
        deltas = [delta for done in rounds for delta in done.deltas if delta.request_id == submit.request_id]
        assert [token for delta in deltas for token in delta.tokens] == expected[submit.request_id]


@given(
    st.lists(st.lists(st.integers(0, 271), max_size=6), max_size=8),
    st.integers(1, 6),
    st.integers(14, 80),
    st.integers(16, 64),
)
@settings(max_examples=40)
def test_identity_under_wild_drafts_preemption_and_small_batches(expected, guesses, running, blocks, rows):
    model = toy(kv_blocks=blocks, rows=rows)
    out, _ = decode(loop_over(model, WildDrafter(guesses), running=running), requests(6))
    assert out == {key: expected[key] for key in out}
    assert model.free_blocks() == model.capabilities.total_blocks


def test_preemption_happens_and_changes_nothing(expected):
    model = toy(kv_blocks=24)
    loop = loop_over(model, suffix(), running=6)
    out, _ = decode(loop, requests(10))
    assert out == expected
    assert loop.gauges(0).preemptions > 0


def test_replay_from_committed_tokens_goes_on_with_the_very_next_token(expected):
    """What a new worker does after a loss: history is the truth."""
    for cut in (1, 17, 59):
        moved = [
            Submit(s.request_id, s.prompt, s.max_tokens, s.sampling, expected[s.request_id][:cut], s.stop_tokens)
            for s in requests(4)
            if len(expected[s.request_id]) > cut
        ]
        out, _ = decode(loop_over(toy(), suffix()), moved)
        assert moved
        assert all(expected[key][:cut] + tokens == expected[key] for key, tokens in out.items())


def test_a_request_bounds_its_own_depth_and_off_reaches_every_drafter():
    for depth in (0, 1, 3):
        loop = loop_over(toy(), suffix())
        _, rounds = decode(loop, requests(3, depth=depth))
        assert max((done.drafted / max(1, done.drafts) for done in rounds), default=0) <= depth
        if depth == 0:
            assert sum(done.drafted for done in rounds) == 0
            assert loop.gauges(0).drafter_bytes == 0
        _, rounds = decode(loop_over(toy(), suffix()), requests(3, most_depth=depth))
        assert max(len(done.accepted_per_position) for done in rounds) <= depth
    _, rounds = decode(loop_over(toy(), suffix(), depth=2), requests(3, depth=9))
    assert max(len(done.accepted_per_position) for done in rounds) <= 2


def test_counts_add_up():
    out, rounds = decode(loop_over(toy(), suffix()), requests(8))
    finals = [delta for done in rounds for delta in done.deltas if delta.finish]
    ended = [delta.stats for delta in finals if delta.stats is not None]
    assert len(ended) == len(finals) == 8
    assert sum(stats.drafted for stats in ended) == sum(done.drafted for done in rounds)
    assert sum(stats.accepted for stats in ended) == sum(done.accepted for done in rounds)
    assert sum(sum(done.accepted_per_position) for done in rounds) == sum(done.accepted for done in rounds)
    for delta, stats in zip(finals, ended, strict=True):
        assert stats.generated == len(out[delta.request_id])
        # Every step commits what was accepted and one token more; the last may be cut by a stop.
        assert stats.generated <= stats.steps + stats.accepted
        assert delta.finish == ("stop" if out[delta.request_id][-1] == END else "length")


def test_a_cancelled_request_frees_its_place_at_once():
    model = toy()
    loop = loop_over(model, suffix(), running=2)
    for submit in requests(4, max_tokens=200):
        loop.submit(submit)
    loop.run_round()
    loop.cancel("r0")  # running
    loop.cancel("r3")  # waiting
    loop.cancel("unknown")
    seen = set()
    while not loop.idle:
        seen |= {delta.request_id for delta in loop.run_round().deltas}
    assert seen == {"r1", "r2"}
    assert model.free_blocks() == model.capabilities.total_blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [5, 272]}, "vocabulary"),
        ({"prompt": [5, -1]}, "vocabulary"),
        ({"prompt": [5], "max_tokens": -1}, "max_tokens"),
        ({"stop_tokens": [272]}, "vocabulary"),
        ({"sampling": Sampling(logit_bias=((272, 1.0),))}, "vocabulary"),
        ({"sampling": Sampling(repetition_penalty=5e-324)}, "repetition_penalty"),
    ],
)
def test_what_can_never_be_served_is_refused_in_words(fields, message):
    loop = loop_over(toy(kv_blocks=50), suffix())
    refused = loop.submit(Submit(**({"request_id": "x", "prompt": [1], "max_tokens": 5} | fields)))
    assert refused is not None
    assert message in refused.message
    assert loop.idle


@pytest.mark.parametrize(("prompt", "most_tokens"), [([5] * 4000, 800), ([5] * 900, 800)])
def test_what_is_too_long_is_refused_with_what_would_fit(prompt, most_tokens):
    refused = loop_over(toy(kv_blocks=50), suffix()).submit(Submit("x", prompt, max_tokens=200))
    assert refused is not None
    assert (refused.kind, refused.most_tokens) == ("too_long", most_tokens)


@pytest.mark.parametrize("fault", ["device_lost", "out_of_memory", "ecc", "thermal"])
def test_a_lost_device_is_a_typed_failure_and_committed_tokens_stand(expected, fault):
    loop = loop_over(toy(script=f"fault={fault}&at=20"), suffix())
    out: dict[str, list[int]] = {s.request_id: [] for s in requests(4)}
    for submit in requests(4):
        loop.submit(submit)

    def run_until_it_fails() -> None:
        while True:
            for delta in loop.run_round().deltas:
                out[delta.request_id].extend(delta.tokens)

    with pytest.raises(DeviceLost):
        run_until_it_fails()
    assert any(out.values())
    assert all(expected[key][: len(tokens)] == tokens for key, tokens in out.items())
