"""Policies side by side on recorded rounds: the bars that hold without noise."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_lab.replay.fixed import FixedDepth, hindsight, replay_fixed_depths
from outrider_lab.replay.recorded import Costs, RecordedDraft, RecordedRequest
from outrider_lab.replay.run import replay

from device_profiles.cost import StepCost, estimate_round_tokens
from policies.speculation.adaptive import Adaptive
from policies.speculation.calibration import Calibration, observe_draft_outcome
from policies.speculation.calibration import chance as calibrate
from policies.speculation.cost_model import start_cost_model

# Step costs measured on 2 cores (one sequence and 4 to 16; bf16), as one curve.
FIT = StepCost((1.0, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0, 128.0), (7.3, 7.7, 8.2, 9.2, 10.9, 16.1, 27.0, 95.0), 0.25)
MOST = 12
TOKENS = 128
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=6)


def record_request(key, seed, chance_at, *, confidence=0.5, tokens=TOKENS):
    """A request whose drafts' tokens are right with the chance of their place in the output."""
    draw = random.Random(f"{seed}-{key}")
    drafts = []
    for place in range(tokens):
        right = 0
        while right < MOST and draw.random() < chance_at(place + right):
            right += 1
        drafts.append(RecordedDraft(MOST, (confidence,) * MOST, right))
    return RecordedRequest(key, tuple(drafts), prompt_tokens=100)


def as_in_a_chain(requests):
    """The same with calibrated confidences, one request after the other: a worker's chain sees to that."""
    known, found = Calibration(), []
    for request in requests:
        drafts = []
        for draft in request.drafts:
            sure = tuple(calibrate(known, confidence) for confidence in draft.confidences)
            outcome = [1] * draft.accepted + [0]
            known = observe_draft_outcome(known, [1] * draft.tokens, draft.confidences, outcome)
            drafts.append(replace(draft, confidences=sure))
        found.append(replace(request, drafts=tuple(drafts)))
    return found


def record_matches(key, seed, *, tokens=TOKENS):
    """A request with drafts as from matches in the text: some long and sure, some short, some none, all honest."""
    draw = random.Random(f"{seed}-{key}")
    drafts = []
    for _ in range(tokens):
        length = draw.choice([0, 0, 0, 1, 2, 4, 8, 11])
        sure = tuple(min(0.96, 0.5 + 0.08 * (length + place)) for place in range(length + 1)) if length else ()
        right = next((place for place, chance in enumerate(sure) if draw.random() > chance), len(sure))
        drafts.append(RecordedDraft(len(sure), sure, right))
    return RecordedRequest(key, tuple(drafts), prompt_tokens=100)


def good(place):
    return 0.9


def bad(place):
    return 0.0


def alternating(place):
    return 0.9 if place // 50 % 2 == 0 else 0.0


def mix_requests(seed, requests):
    """What an endpoint may see: sure and unsure drafts, some honest, some not."""
    kinds = [
        lambda key: record_request(key, seed, good),
        lambda key: record_request(key, seed, lambda _: 0.6, confidence=0.9),
        lambda key: record_matches(key, seed),
        lambda key: record_request(key, seed, lambda _: 0.3),
        lambda key: record_request(key, seed, alternating, confidence=0.8),
        lambda key: record_request(key, seed, bad, confidence=0.9),
    ]
    return [kinds[number % len(kinds)](str(number)) for number in range(requests)]


def adaptive():
    return Adaptive(start_cost_model(FIT))


@FEW
@given(
    SEEDS,
    st.sampled_from([good, bad, alternating]),
    st.sampled_from([0.2, 0.6, 0.95]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([Costs(FIT), Costs(FIT, paid_rows=2), Costs(FIT, 0.3, 0.2)]),
)
def test_never_slower_than_plain_decoding(seed, chance_at, confidence, concurrency, costs):
    requests = as_in_a_chain(
        record_request(str(number), seed, chance_at, confidence=confidence) for number in range(2 * concurrency + 6)
    )
    plain = replay(requests, FixedDepth(0), costs, concurrency=concurrency, most=1)
    ours = replay(requests, adaptive(), costs, concurrency=concurrency, most=MOST)
    assert ours.tokens == plain.tokens == TOKENS * len(requests)
    assert ours.tokens_per_s >= 0.97 * plain.tokens_per_s


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16, ((0, 1), (1500, 16), (3500, 4))])
def test_over_a_mix_it_is_near_hindsight(concurrency):
    requests, costs = mix_requests(7, 48), Costs(FIT)
    tried = replay_fixed_depths(requests, costs, concurrency=concurrency)
    best = hindsight(requests, costs, tried, concurrency=concurrency)
    ours = replay(requests, adaptive(), costs, concurrency=concurrency, most=MOST)
    assert ours.tokens_per_s >= 0.95 * best.tokens_per_s
    assert ours.tokens_per_s >= 0.97 * tried[0].tokens_per_s
    assert best.tokens_per_s >= max(found.tokens_per_s for found in tried.values())


class Disturbed(Adaptive):
    """Sees times that other programs made longer: stretches of rounds, and single ones."""

    def __init__(self, seed):
        super().__init__(start_cost_model(FIT))
        self.draw, self.left, self.factor = random.Random(seed), 0, 1.0

    def observe_round(self, now, done):
        """See the port."""
        if self.left <= 0:
            self.left, self.factor = self.draw.randint(20, 120), self.draw.choice([1.0, 1.0, 1.4, 2.2])
        self.left -= 1
        single = 1.0 + (self.draw.expovariate(1.2) if self.draw.random() < 0.3 else 0.0)
        forward_ms = done.times.forward_ms * self.factor * single
        super().observe_round(now, done._replace(times=done.times._replace(forward_ms=forward_ms)))


def steady_rate(played, concurrency):
    """Tokens per ms while all places are taken: behind that the slowest request decides how long it takes."""
    steps = [step for step in played.steps if step.sequences == concurrency]
    return sum(step.tokens for step in steps) / sum(step.round_ms for step in steps)


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_depths_stay_right_where_times_are_disturbed(concurrency):
    requests, costs = mix_requests(7, 48), Costs(FIT, change_ms=4.0)
    plain = replay(requests, FixedDepth(0), costs, concurrency=concurrency, most=1)
    calm = replay(requests, adaptive(), costs, concurrency=concurrency, most=MOST)
    for seed in range(3):
        ours = replay(requests, Disturbed(seed), costs, concurrency=concurrency, most=MOST)
        assert steady_rate(ours, concurrency) >= 0.97 * steady_rate(plain, concurrency)
        assert steady_rate(ours, concurrency) >= 0.93 * steady_rate(calm, concurrency)


def evenly(chances):
    """A request without chance: of the tokens in a row that are compared, as many are right as their chance says."""
    drafts, credit = [], 0.0
    for chance in chances:
        right = 0
        while right < MOST:
            credit += chance
            if credit < 1.0:
                break
            credit -= 1.0
            right += 1
        drafts.append(RecordedDraft(MOST, (0.5,) * MOST, right))
    return RecordedRequest("0", tuple(drafts))


class Watched(Adaptive):
    """Remembers the depth of every round, and how many tokens were committed before it."""

    def __init__(self):
        super().__init__(start_cost_model(FIT))
        self.depths, self.places, self.committed = [], [], 0

    def observe_round(self, now, done):
        """See the port."""
        super().observe_round(now, done)
        self.depths.append(done.depths[0])
        self.places.append(self.committed)
        self.committed += done.tokens


def optimum(chance, most):
    cost = start_cost_model(FIT)
    rates = [estimate_round_tokens((chance,), depth) / cost.ms(depth + 1, 1, 0.0) for depth in range(most + 1)]
    return rates.index(max(rates))


@given(st.integers(60, 200), st.sampled_from([4, 6, 8]))
@settings(max_examples=20)
def test_depth_is_near_its_best_ten_rounds_after_the_text_turns(before, most):
    policy = Watched()
    replay([evenly([0.1] * before + [0.9] * 400)], policy, Costs(FIT), concurrency=1, most=most)
    turned = next(index for index, place in enumerate(policy.places) if place >= before)
    assert policy.depths[turned - 1] <= 1
    assert abs(policy.depths[turned + 10] - optimum(0.9, most)) <= 1


@given(st.sampled_from([0.2, 0.5, 0.75, 0.9, 0.95]), st.sampled_from([4, 6, 8]))
@settings(max_examples=15)
def test_depth_does_not_swing_where_the_text_is_steady(chance, most):
    policy = Watched()
    replay([evenly([chance] * 1500)], policy, Costs(FIT), concurrency=1, most=most)
    steady = policy.depths[len(policy.depths) // 2 : -most]
    assert max(steady) - min(steady) <= 1


@FEW
@given(SEEDS, st.floats(0.4, 2.5), st.integers(1, 8))
def test_a_fit_that_is_off_is_corrected(seed, factor, concurrency):
    """Costs from another machine: what rounds take sets them right, and little is lost."""
    requests, costs = mix_requests(seed, 18), Costs(FIT)
    known = replay(requests, adaptive(), costs, concurrency=concurrency, most=MOST)
    off = Adaptive(start_cost_model(FIT.scale_by(factor)))
    found = replay(requests, off, costs, concurrency=concurrency, most=MOST)
    assert found.tokens_per_s >= 0.97 * known.tokens_per_s


@FEW
@given(SEEDS, st.integers(0, 8), st.integers(1, 8))
def test_a_replay_is_the_same_again_and_makes_every_token(seed, depth, concurrency):
    requests, costs = mix_requests(seed, 9), Costs(FIT, 0.1, 0.05, paid_rows=2)
    for policy in (lambda: FixedDepth(depth), adaptive):
        first = replay(requests, policy(), costs, concurrency=concurrency, most=MOST)
        again = replay(requests, policy(), costs, concurrency=concurrency, most=MOST)
        assert first == again
        assert first.tokens == TOKENS * len(requests) == sum(step.tokens for step in first.steps)
        assert first.ms == pytest.approx(sum(step.round_ms for step in first.steps))
        assert set(first.request_ms) == {request.key for request in requests}
        assert max(step.sequences for step in first.steps) <= concurrency
