"""DRY takes off what its definition says, of the tokens that would go on with a repetition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sampling import Dry, Sampling, verify_draft
from policies.sampling.dry import DryPenalty
from policies.sampling.penalties import Penalties

VOCABULARY = 5
TEXTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
RUNS = st.lists(st.integers(0, VOCABULARY - 1), max_size=2).map(tuple)
BREAKERS = st.lists(st.tuples(st.sampled_from([(0,), (1,), (2, 3)]), RUNS), max_size=2).map(tuple)
# Text, multiplier, base, allowed length, breakers, and what is left of equal probabilities: llama.cpp's own figures
# (tests/test-sampling.cpp).
FIGURES = [
    ([0, 1], 1.0, 1.1, 2, (), [0.25, 0.25, 0.25, 0.25]),
    ([0, 1, 2, 0, 1], 1.0, 1.1, 2, (), [0.296923, 0.296923, 0.109232, 0.296923]),
    ([0, 1, 3, 4, 0, 1], 1.0, 1.1, 2, (((3,), ()),), [0.2] * 5),
    ([0, 1, 2, 0, 1], 2.0, 1.1, 2, (), [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
    ([0, 1, 2, 3, 4, 0, 1], 1.0, 1.1, 4, (), [0.2] * 5),
]


def by_definition(text: list[int], dry: Dry, most: int) -> dict[int, int]:
    """Compare the text's end with what stands before each token, one token after the other."""
    window = text if dry.last_tokens < 0 else text[len(text) - min(len(text), dry.last_tokens) :]
    size = len(window)
    runs = [(token, *rest) for tokens, rest in dry.breakers for token in tokens]
    free = size
    for back in range(size):
        at = size - 1 - back
        here = [len(run) - 1 for run in runs if tuple(window[at : at + len(run)]) == run]
        if here:
            free = back - max(here)
            break
    repeats: dict[int, int] = {}
    for next_at in range(1, size):
        length = 0
        while length < min(free, most) and next_at - 1 - length >= 0:
            if window[next_at - 1 - length] != window[size - 1 - length]:
                break
            length += 1
        if length >= dry.allowed_length and (window[next_at],) not in runs:
            repeats[window[next_at]] = max(length, repeats.get(window[next_at], 0))
    return repeats


@pytest.mark.parametrize(("text", "multiplier", "base", "allowed", "breakers", "left"), FIGURES)
def test_the_figures_of_llama_cpp(text, multiplier, base, allowed, breakers, left) -> None:
    row = np.zeros(len(left), np.float32)
    DryPenalty(Dry(multiplier, base, allowed, -1, breakers)).apply_dry(row, text)
    shares = np.exp(row.astype(np.float64))
    assert shares / shares.sum() == pytest.approx(left, abs=1e-5)


@given(
    TEXTS, BREAKERS, st.integers(1, 4), st.sampled_from([-1, 0, 1, 3, 7, 20, 100]), st.sampled_from([1.0, 1.75, 80.0])
)
@settings(max_examples=400)
def test_repetitions_are_those_of_the_definition(text, breakers, allowed, last, base) -> None:
    dry = Dry(1.0, base, allowed, last, breakers)
    penalty = DryPenalty(dry)
    repeats = penalty.find_repeats(text)
    expected = by_definition(text, dry, allowed + penalty._most_exponent)
    assert repeats == expected
    row = np.zeros(VOCABULARY, np.float32)
    penalty.apply_dry(row, text)
    for token in range(VOCABULARY):
        loss = base ** (expected[token] - allowed) if token in expected else 0.0
        assert row[token] == pytest.approx(-loss, rel=1e-6)


def test_a_long_repetition_takes_off_much_and_never_all() -> None:
    text = [1, 2, 3] * 400
    row = np.zeros(VOCABULARY, np.float32)
    DryPenalty(Dry(100.0, 10.0, 2, -1, ())).apply_dry(row, text)
    assert np.isfinite(row).all()
    assert (row < 0).tolist() == [False, True, False, False, False]


@given(st.integers(0, 2**32), TEXTS, st.sampled_from([0.0, 0.9]), BREAKERS, st.data())
@settings(max_examples=100)
def test_whatever_is_drafted_the_same_tokens_come_out(table, prompt, temperature, breakers, data) -> None:
    rows = np.random.default_rng(table).normal(0, 1, (12, VOCABULARY)).astype(np.float32)
    sampling = Sampling(temperature, seed=table, dry=Dry(3.0, 1.75, 1, -1, breakers))
    penalties = Penalties.of(sampling, prompt)
    assert penalties is not None

    def judge_draft(draft: list[int], output: list[int]) -> tuple[int, ...]:
        def shape(row, taken):
            return penalties.apply_penalties(row, {}, [*prompt, *output, *taken])

        return verify_draft(rows[len(output) :][: len(draft) + 1], draft, sampling, len(output), shape).tokens

    plain: list[int] = []
    while len(plain) < 12:
        plain += judge_draft([], plain)
    out: list[int] = []
    while len(out) < 11:
        depth = data.draw(st.integers(0, min(6, 11 - len(out))))
        right = data.draw(st.integers(0, depth))
        wild = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=depth - right, max_size=depth - right))
        out += judge_draft(plain[len(out) : len(out) + right] + wild, out)
    assert out == plain[: len(out)]
