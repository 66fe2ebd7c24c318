"""What filters leave is what their definitions leave, on rows of every shape: ties, masked tokens, extremes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sampling import Sampling, choose, distribution, noise
from policies.sampling.filters import _ESTIMATED, _estimate_mass, _mass, survivors

_SIZES = [1, 2, 63, 64, 500, 8193, 20_000]


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """A row with a finite best logit."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, offset = draw(st.sampled_from([1e-3, 0.5, 3.0, 30.0])), draw(st.sampled_from([0.0, -50.0, 1000.0]))
    row = generator.normal(offset, spread, draw(st.sampled_from(_SIZES))).astype(np.float32)
    match draw(st.sampled_from(["as it is", "ties", "equal", "masked", "peak", "zeros"])):
        case "ties":
            row = np.round(row)
        case "equal":
            row[:] = row[0]
        case "masked":
            row[generator.random(len(row)) < 0.9] = -np.inf
            row[int(generator.integers(len(row)))] = np.float32(offset)
        case "peak":
            row[int(generator.integers(len(row)))] += np.float32(20.0)
        case "zeros":
            row = generator.choice(np.array([0.0, -0.0, -1e30], np.float32), len(row))
    return row


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-6, 0.01, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 50, 300, 10**6]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-5, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def filter_row(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    return survivors(row, sampling, float(row.max()))[0]


def by_definition(row: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """By the definitions, over the whole vocabulary: every id that is kept, best first, and each one's distance, in
    shares of the mass, from where the nucleus ends."""
    order = np.argsort(-row.astype(np.float64), kind="stable")
    nats = (row.astype(np.float64)[order] - float(row.max())) / sampling.temperature
    kept = (nats > -np.inf) & (nats >= np.log(sampling.min_p) if sampling.min_p else True)
    order, p = order[kept], np.exp(nats[kept])
    if sampling.top_k:
        order, p = order[: sampling.top_k], p[: sampling.top_k]
    if sampling.top_p == 1.0:
        return order, np.ones(len(order))
    before = (np.cumsum(p) - p) / p.sum()
    inside = before < sampling.top_p
    inside[0] = True
    return order[inside], np.abs(before - sampling.top_p)


@given(rows(), SAMPLINGS)
@settings(max_examples=300, deadline=None)
def test_filters_leave_what_their_definitions_leave(row, sampling):
    expected, apart = by_definition(row, sampling)
    kept = filter_row(row, sampling)
    low = np.float32(float(row.max()) + np.log(sampling.min_p or 1e-300) * sampling.temperature)
    if sampling.min_p and (np.abs(row - low) <= np.spacing(np.abs(low))).any():
        return  # a token at the threshold of min-p itself: single precision decides
    common = min(len(kept), len(expected))
    assert kept[:common].tolist() == expected[:common].tolist()
    # Rounding decides only about tokens next to the end of the nucleus.
    assert (apart[common : max(len(kept), len(expected))] < 1e-6).all()


@given(rows(), SAMPLINGS, st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_the_choice_is_the_best_of_what_is_left_with_its_noise(row, sampling, position):
    kept, shares = distribution(row, sampling, position)
    assert abs(shares.sum() - 1.0) < 1e-9
    scores = (row.astype(np.float64)[kept] - float(row.max())) / sampling.temperature
    scores += noise.gumbel(sampling.seed, position, kept)
    assert choose(row, sampling, position) == int(kept[scores.argmax()])


@given(st.integers(0, 2**32), st.sampled_from([0.8, 0.95, 0.999]))
@settings(max_examples=25, deadline=None)
def test_a_nucleus_wider_than_the_first_candidates_is_found(table, top_p):
    """A flat row: the best tokens near the top hold far less than the nucleus."""
    row = np.random.default_rng(table).normal(0, 1, 20_000).astype(np.float32)
    row[7] = 9.0
    sampling = Sampling(0.5, top_p=top_p)
    expected, apart = by_definition(row, sampling)
    assert abs(len(filter_row(row, sampling)) - len(expected)) <= (apart < 1e-6).sum()


TEMPERATURES = st.sampled_from([1e-6, 0.01, 0.3, 0.8, 1.0, 2.0, 1e6])


@given(rows(), TEMPERATURES)
@settings(max_examples=200, deadline=None)
def test_the_estimate_of_a_mass_is_within_its_error(row, temperature):
    sampling = Sampling(temperature)
    mass = _mass(row, float(row.max()), -np.inf, sampling)
    assert abs(_estimate_mass(row, float(row.max()), sampling) / mass - 1.0) < _ESTIMATED / 2


@given(rows(), TEMPERATURES, st.integers(0, 40), st.sampled_from([-1e-3, -1e-6, -1e-9, 0.0, 1e-9, 1e-6, 1e-3]))
@settings(max_examples=300, deadline=None)
def test_a_nucleus_ends_where_the_mass_says_however_near_the_estimate_is(row, temperature, end, beside):
    """top-p is put at the end of a nucleus, or so near beside it that an estimate cannot tell on which side it is."""
    order = np.argsort(-row, kind="stable")
    top = float(row.max())
    steps = np.cumsum(np.exp((row[order].astype(np.float64) - top) / temperature))
    mass = _mass(row, top, -np.inf, Sampling(temperature))
    top_p = float(steps[min(end, len(row) - 1)] / mass) * (1.0 + beside)
    if not 0.0 < top_p < 1.0:
        return
    sampling = Sampling(temperature, top_p=top_p)
    last = int((steps >= top_p * mass).argmax()) if steps[-1] >= top_p * mass else None
    if last is None or steps[last] >= steps[-1] * (1.0 - 1e-5) or top - row[order[last]] > 15.9 * temperature:
        return  # at the very end, and far below the best, all ids are cut by another sum
    assert filter_row(row, sampling).tolist() == order[: last + 1].tolist()
