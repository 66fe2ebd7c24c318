"""Typical sampling and XTC leave what their definitions leave, and XTC's draw goes by seed and position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sampling import Sampling, choose, distribution

# Probabilities, what is kept of them, and by which filter: llama.cpp's own figures (tests/test-sampling.cpp).
FIGURES = [
    ([0.97, 0.01, 0.01, 0.01], [0], {"typical_p": 0.5}),
    ([0.4, 0.2, 0.2, 0.2], [1, 2, 3], {"typical_p": 0.5}),
    ([0.4, 0.3, 0.2, 0.1], [3], {"xtc_threshold": 0.09}),
    ([0.4, 0.3, 0.2, 0.1], [2, 3], {"xtc_threshold": 0.19}),
    ([0.4, 0.3, 0.2, 0.1], [1, 2, 3], {"xtc_threshold": 0.29}),
    ([0.4, 0.3, 0.2, 0.1], [0, 1, 2, 3], {"xtc_threshold": 0.39}),
]
ROWS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32))


def sample(**filters: float) -> Sampling:
    return Sampling(1.0, **({"xtc_probability": 1.0} if "xtc_threshold" in filters else {}), **filters)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shares", "kept", "filters"), FIGURES)
def test_the_figures_of_llama_cpp(shares: list[float], kept: list[int], filters: dict[str, float]) -> None:
    ids, left = distribution(np.log(np.array(shares, np.float32)), sample(**filters), 0)
    assert sorted(ids.tolist()) == kept
    expected = np.array(shares)[ids.astype(int)]
    assert left == pytest.approx(expected / expected.sum())


@given(ROWS, st.floats(0.05, 0.99), st.sampled_from([1.0, 0.7]), st.sampled_from([0, 5]))
def test_typical_tokens_are_those_nearest_to_the_entropy(
    row: np.ndarray, mass: float, top_p: float, top_k: int
) -> None:
    before, p = distribution(row, Sampling(1.0, top_p=top_p, top_k=top_k), 0)
    kept, _ = distribution(row, Sampling(1.0, top_p=top_p, top_k=top_k, typical_p=mass), 0)
    information = -np.log(p)
    far = np.abs(information - float(p @ information))
    inside = np.isin(before, kept)
    assert inside.any()
    assert far[inside].max() <= far[~inside].min(initial=np.inf)
    assert p[inside].sum() > mass - 1e-9 or inside.all()
    assert p[inside].sum() - p[inside][far[inside].argmax()] <= mass + 1e-9


@given(ROWS, st.floats(0.01, 0.5), st.integers(0, 2**40), st.integers(0, 10**6))
def test_xtc_drops_all_likely_tokens_but_the_least_likely(row: np.ndarray, least: float, seed: int, at: int) -> None:
    before, p = distribution(row, Sampling(1.0), 0)
    sampling = Sampling(1.0, xtc_probability=1.0, xtc_threshold=least, seed=seed)
    kept, _ = distribution(row, sampling, at)
    likely = p >= least * (1 + 1e-9)
    dropped = ~np.isin(before, kept)
    assert dropped.sum() in (max(0, likely.sum() - 1), max(0, (p >= least * (1 - 1e-9)).sum() - 1))
    assert p[dropped].min(initial=1.0) >= p[likely & ~dropped].max(initial=0.0)
    assert choose(row, sampling, at) in kept


def test_the_draw_goes_by_seed_and_position_and_has_the_chance_that_is_asked_for() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    sampling = Sampling(1.0, xtc_probability=0.3, xtc_threshold=0.15)

    def excludes(seed: int, position: int) -> bool:
        return (
            len(distribution(row, Sampling(1.0, xtc_probability=0.3, xtc_threshold=0.15, seed=seed), position)[0]) < 4
        )

    over_positions = [excludes(7, position) for position in range(2000)]
    assert over_positions == [excludes(7, position) for position in range(2000)]
    for drawn in (over_positions, [excludes(seed, 3) for seed in range(2000)]):
        assert 0.25 < np.mean(drawn) < 0.35
    assert not sampling.unfiltered
