"""Rejection is exact: what comes out is distributed as the target says, whatever the draft's distribution is."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sampling import DraftDistribution, NotFinite, Sampling, choose, distribution, noise, propose, verify_draft
from policies.sampling.verify import judge, residual

VOCABULARY = 5
Output = tuple[int, ...]


def rows_of(seed: int, count: int, vocabulary: int = VOCABULARY, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (count, vocabulary)).astype(np.float32)


def rejection(temperature: float = 1.0, **filters) -> Sampling:
    return Sampling(temperature, acceptance="rejection", **filters)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    acceptance=st.just("rejection"),
)


def dense(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The target's distribution over the whole vocabulary, where no filter draws."""
    ids, p = distribution(row, sampling, 0)
    whole = np.zeros(len(row))
    whole[ids] = p
    return whole


def measure(outcome, low: float = 0.0, high: float = 1.0) -> dict[Any, float]:
    """How much of (low, high) each outcome has, of a function in which an outcome's part is one interval."""
    first, last = outcome(low + 1e-16), outcome(high - 1e-16)
    if first == last:
        return {first: high - low}
    if high - low < 1e-13:
        return {first: (high - low) / 2, last: (high - low) / 2}
    middle = (low + high) / 2
    chances = measure(outcome, low, middle)
    for key, share in measure(outcome, middle, high).items():
        chances[key] = chances.get(key, 0.0) + share
    return chances


def at(**numbers: float):
    """Random numbers that are given, by purpose."""
    return lambda seed, position, purpose: numbers[purpose.name]


def draws(row: np.ndarray, sampling: Sampling, width: int) -> list[tuple[int, float, DraftDistribution | None]]:
    """Every draft that a row may give, its chance, and its proposal."""
    _, proposal = propose(row, sampling, 0, 0, width)
    chances = measure(lambda u: propose(row, sampling, 0, 0, width, uniform=at(DRAFT=u))[0])
    return [(token, chance, proposal) for token, chance in chances.items()]


def comes_out(
    row: np.ndarray, draft: int, proposal: DraftDistribution | None, sampling: Sampling
) -> dict[tuple[bool, int], float]:
    """The chance of each (accepted, token), over the rule's own random numbers."""
    chances: dict[tuple[bool, int], float] = {}

    def judge_at(accept: float, left: float = 0.5):
        return judge(row, draft, proposal, sampling, 0, uniform=at(ACCEPT=accept, RESIDUAL=left))

    for accepted, chance in measure(lambda u: judge_at(u).accepted).items():
        if accepted:
            chances[True, draft] = chance
            continue
        for token, share in measure(lambda u: judge_at(1 - 1e-16, u).token).items():
            chances[False, token] = chance * share
    return chances


def outputs(target, drafter, sampling: Sampling, width: int, depth: int, taken: Output = ()) -> dict[Output, float]:
    """The chance of each output of `depth` positions, drafted and judged one after the other."""
    if len(taken) == depth:
        return {(): 1.0}
    chances: dict[Output, float] = {}
    drafted = draws(drafter[taken], sampling, width) if drafter is not None else [(0, 1.0, None)]
    for draft, chance, proposal in drafted:
        for (_, token), share in comes_out(target[taken], draft, proposal, sampling).items():
            for rest, more in outputs(target, drafter, sampling, width, depth, (*taken, token)).items():
                key = (token, *rest)
                chances[key] = chances.get(key, 0.0) + chance * share * more
    return chances


@pytest.mark.parametrize("width", [1, 2, VOCABULARY])
@pytest.mark.parametrize(
    "sampling",
    [rejection(0.7, top_p=0.9), rejection(1.4, top_k=3), rejection(1.0, min_p=0.1), rejection(1.0, typical_p=0.6)],
    ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.min_p}-{s.typical_p}",
)
@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "point mass"])
def test_every_output_of_two_positions_has_the_targets_probability(sampling, width, drafted):
    """Over all random numbers, by finding where each outcome begins and ends: not by counting."""
    contexts = [(), *((token,) for token in range(VOCABULARY))]
    target = dict(zip(contexts, rows_of(1, len(contexts)), strict=True))
    drafter = dict(zip(contexts, rows_of(2, len(contexts)), strict=True)) if drafted else None
    chances = outputs(target, drafter, sampling, width, 2)
    for output in itertools.product(range(VOCABULARY), repeat=2):
        expected = dense(target[()], sampling)[output[0]] * dense(target[output[:1]], sampling)[output[1]]
        assert chances.get(output, 0.0) == pytest.approx(expected, abs=1e-9)


def test_three_positions_of_three_tokens():
    contexts = [c for length in range(3) for c in itertools.product(range(3), repeat=length)]
    target = dict(zip(contexts, rows_of(5, len(contexts), 3), strict=True))
    drafter = dict(zip(contexts, rows_of(6, len(contexts), 3), strict=True))
    sampling = rejection(0.9)
    chances = outputs(target, drafter, sampling, 2, 3)
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-9)
    for output in itertools.product(range(3), repeat=3):
        expected = np.prod([dense(target[output[:i]], sampling)[output[i]] for i in range(3)])
        assert chances[output] == pytest.approx(expected, abs=1e-9)


@given(SAMPLINGS, st.integers(0, 2**32), st.integers(1, VOCABULARY))
@settings(max_examples=50)
def test_the_chance_of_acceptance_is_the_overlap(sampling, table, width):
    """sum over x of min(p(x), q(x))."""
    target, drafter = rows_of(table, 2)
    accepted = overlap = 0.0
    for draft, chance, proposal in draws(drafter, sampling, width):
        accepted += chance * comes_out(target, draft, proposal, sampling).get((True, draft), 0.0)
        assert proposal is not None
        q = proposal.probabilities(VOCABULARY)
        assert q is not None
        overlap += min(dense(target, sampling)[draft], float(q[proposal.tokens == draft].sum()))
    assert accepted == pytest.approx(overlap, abs=1e-9)


@given(SAMPLINGS, st.integers(0, 2**32), st.integers(0, 1000))
@settings(max_examples=100)
def test_a_draft_from_the_targets_own_row_is_accepted(sampling, table, position):
    """As near to always as float32 shares allow."""
    row = rows_of(table, 1)[0]
    drafted, proposal = propose(row, sampling, position, position)
    assert judge(row, drafted, proposal, sampling, position, uniform=at(ACCEPT=1 - 1e-6, RESIDUAL=0.5)).accepted


@given(SAMPLINGS, st.integers(0, 2**32), st.integers(0, 500), st.integers(0, 6), st.booleans())
@settings(max_examples=200)
def test_no_token_without_probability_ever_comes_out(sampling, table, start, depth, drawn):
    targets, drafters = rows_of(table, depth + 1), rows_of(table + 1, max(1, depth))
    drafted = [propose(row, sampling, start + index, start, 2) for index, row in enumerate(drafters[:depth])]
    draft = [token for token, _ in drafted] if drawn else [index % VOCABULARY for index in range(depth)]
    proposals = [proposal for _, proposal in drafted] if drawn else ()
    judged = verify_draft(targets, draft, sampling, start, proposals=proposals)
    assert len(judged.tokens) == judged.accepted + 1
    assert list(judged.tokens[:-1]) == draft[: judged.accepted]
    for row, token in zip(targets, judged.tokens, strict=False):
        assert dense(row, sampling)[token] > 0


@given(SAMPLINGS, st.integers(0, 2**32), st.integers(0, 500))
@settings(max_examples=100)
def test_without_drafts_it_is_plain_sampling(sampling, table, position):
    rows = rows_of(table, 1)
    assert verify_draft(rows, [], sampling, position).tokens == (choose(rows[0], sampling, position),)


@given(st.integers(0, 2**32), st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
def test_greedy_requests_stay_greedy(table, draft):
    rows = rows_of(table, len(draft) + 1)
    rejection = verify_draft(rows, draft, Sampling(0.0, acceptance="rejection"), 3)
    assert rejection == verify_draft(rows, draft, Sampling(0.0), 3)


def shares(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    "broken",
    [
        DraftDistribution(np.array([0, 1], np.uint32), shares(np.nan, 1.0)),
        DraftDistribution(np.array([0, 1], np.uint32), shares(np.inf, 1.0)),
        DraftDistribution(np.array([0, 1], np.uint32), shares(0.2, 0.2)),
        DraftDistribution(np.array([0, 1], np.uint32), shares(1.5, -0.5)),
        DraftDistribution(np.array([0, 0], np.uint32), shares(0.5, 0.5)),
        DraftDistribution(np.array([1, 2], np.uint32), shares(0.5, 0.5)),
        DraftDistribution(np.array([0, 1], np.uint32), shares(0.0, 1.0)),
        DraftDistribution(np.array([0, VOCABULARY], np.uint32), shares(0.5, 0.5)),
        DraftDistribution(np.array([0], np.uint32), shares(0.5, 0.5)),
        DraftDistribution(np.array([], np.uint32), shares()),
    ],
)
@pytest.mark.parametrize("rule", ["rejection", "tolerance"])
def test_a_proposal_that_is_none_is_a_draft_that_failed(broken, rule):
    """Token 0 was drafted."""
    rows = rows_of(4, 2)
    for position in range(20):
        sampling = Sampling(1.0, acceptance=rule)
        judged = verify_draft(rows, [0], sampling, position, proposals=[broken], delta=50.0)
        assert judged.accepted == 0
        assert judged.tokens == (choose(rows[0], sampling, position),)
        assert judged.gaps == ()


def test_where_nothing_is_left_the_target_chooses():
    ids, p = np.array([3, 1], np.uint32), np.array([0.5, 0.5])
    assert residual(ids, p, ids, p).tolist() == [0.5, 0.5]
    assert residual(ids, p, np.array([1], np.uint32), np.ones(1)).tolist() == [0.5, 0.0]
    assert residual(ids, p, np.array([4, 0], np.uint32), np.full(2, 0.5)).tolist() == [0.5, 0.5]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_random_numbers_of_different_purposes_differ(seed, position):
    numbers = {noise.single(seed, position, purpose) for purpose in noise.Purpose}
    numbers.add(float(noise.uniform(seed, position, np.zeros(1, np.uint32))[0]))
    assert len(numbers) == len(noise.Purpose) + 1
    assert all(0.0 < number < 1.0 for number in numbers)


def test_purposes_are_independent_and_uniform():
    drawn = np.array([[noise.single(7, i, purpose) for purpose in noise.Purpose] for i in range(4000)])
    assert np.abs(np.corrcoef(drawn.T) - np.eye(len(noise.Purpose))).max() < 0.05
    assert np.abs(np.quantile(drawn, [0.25, 0.5, 0.75], axis=0) - [[0.25], [0.5], [0.75]]).max() < 0.03


def test_garbage_is_refused():
    rows = rows_of(1, 2)
    rows[0, 3] = np.nan
    with pytest.raises(NotFinite):
        verify_draft(rows, [1], rejection(), 0)
