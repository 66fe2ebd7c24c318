"""The replay of token trees: no choice beats the best tree, Sequoia's programme is right, and gains are found."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_lab.token_trees.bits import find_path, list_depths, make_mask
from outrider_lab.token_trees.candidates import RecordedOutput, Sources, grow_candidates, list_candidates
from outrider_lab.token_trees.replay import WAYS, Curve, Recorded, calibrate, compare, compare_by_category, play
from outrider_lab.token_trees.shapes import (
    NO_PARENT,
    Budget,
    Candidate,
    Choice,
    choose_chain,
    choose_forks,
    choose_tree,
    count_expected_tokens,
    multiply_chances,
)

FLAT = Curve(((1, 10.0), (64, 10.0)), 64)
STEEP = Curve(((1, 10.0), (2, 10.5), (4, 19.0), (16, 60.0)), 16)


@st.composite
def candidate_trees(draw):
    """Draw candidates whose parents stand in front of them, and the chance of each."""
    candidates: list[Candidate] = []
    chances: list[float] = []
    for token in range(draw(st.integers(0, 24))):
        parent = draw(st.integers(NO_PARENT, token - 1))
        depth = 0 if parent == NO_PARENT else candidates[parent].depth + 1
        candidates.append(Candidate(parent, depth, token, 0.5, 0, 1))
        chances.append(draw(st.floats(0.01, 0.99)))
    return candidates, multiply_chances(candidates, chances)


@given(candidate_trees(), st.sampled_from((FLAT, STEEP)), st.floats(0.0, 0.3), st.integers(1, 40), st.integers(0, 12))
def test_the_best_tree_is_never_worse_than_the_best_chain_and_keeps_its_bounds(drawn, curve, value, rows, deepest):
    candidates, reach = drawn
    budget = Budget(curve.row_ms, value, rows, deepest)

    def surplus(choice: Choice) -> float:
        return sum(reach[index] for index in choice.candidates) - value * curve.row_ms(choice.rows)

    chain, tree, forks = (choose(candidates, reach, budget) for choose in (choose_chain, choose_tree, choose_forks))
    assert surplus(tree) >= surplus(chain) - 1e-9
    assert surplus(forks) >= surplus(chain) - 1e-9
    assert surplus(tree) >= surplus(forks) - 1e-9, "a fork verifies no more in as many rows"
    for choice in (chain, tree, forks):
        chosen = set(choice.candidates)
        assert choice.rows <= max(1, rows)
        assert all(candidates[index].depth < deepest for index in chosen)
        assert all(candidates[index].parent in chosen | {NO_PARENT} for index in chosen)
    assert tree.rows == len(tree.candidates) + 1
    assert forks.rows >= len(forks.candidates) + 1


def test_forks_cost_what_they_are_said_to():
    candidates = [Candidate(NO_PARENT, 0, token, 0.3, token, 1) for token in range(3)]
    reach = [0.3, 0.25, 0.2]
    free, dear = (choose_forks(candidates, reach, Budget(FLAT.row_ms, 0.1, 64, 8, ms)) for ms in (0.0, 2.2))
    assert (free.rows, free.forks) == (6, 2)
    assert (dear.rows, dear.forks) == (4, 1)


def best_by_hand(chances: tuple[float, ...], rows: int, deepest: int) -> float:
    """Return the most expected tokens of a tree of so many rows, by taking the likeliest candidate again and again."""
    waiting, total = [(1.0, 0)], 0.0
    for _ in range(rows):
        if not waiting:
            break
        waiting.sort(reverse=True)
        reach, depth = waiting.pop(0)
        total += reach
        waiting += [(reach * chance, depth + 1) for chance in chances if depth < deepest]
    return total


@pytest.mark.parametrize("chances", [(0.7,), (0.6, 0.2), (0.4, 0.3, 0.1)])
def test_sequoias_programme_finds_the_likeliest_nodes(chances):
    levels = count_expected_tokens(chances, 20, 6)
    for depth, level in enumerate(levels):
        assert all(less <= more + 1e-12 for less, more in pairwise(level)), "more rows are never worse"
        for rows in range(1, 21):
            assert level[rows] == pytest.approx(best_by_hand(chances, rows, depth))


def test_all_voters_are_followed_not_only_the_winner():
    candidates = grow_candidates([(3.0, [1, 2, 3], 0), (1.0, [1, 5], 0), (1.0, [7], 0)], longest=6)
    paths = {(one.parent, one.token) for one in candidates}
    first = next(index for index, one in enumerate(candidates) if one.token == 1)
    assert {(NO_PARENT, 1), (NO_PARENT, 7), (first, 2), (first, 5)} <= paths
    assert [one.rank for one in candidates if one.parent == NO_PARENT] == [0, 1]


def record(choices: int) -> list[Recorded]:
    """Return outputs in which a word is followed by any of so many others."""
    outputs = []
    for number in range(10):
        chance = random.Random(number)
        tokens = [token for _ in range(30) for token in (1, 2, 10 + chance.randrange(choices))]
        outputs.append(RecordedOutput(str(number), "one" if number % 2 else "other", [1, 2, 10, 1, 2], tokens))
    return calibrate(outputs, list(list_candidates(outputs, Sources(suffix=True, statistics=None))))


def test_a_gain_is_found_where_there_is_one_and_rows_are_free():
    """Behind one word in three come three others, each as likely: a tree has all of them."""
    recorded = record(3)
    played = {way: play(recorded, choose, FLAT) for way, choose in WAYS.items()}
    assert len({one.tokens for one in played.values()}) == 1
    assert played["chain"].tokens_per_s > 1.3 * played["plain"].tokens_per_s
    assert compare(played["tree"], played["chain"]).replayed > 1.2
    assert compare(played["forks"], played["chain"]).replayed > 1.2
    dear = play(recorded, choose_forks, FLAT, fork_ms=100.0)
    assert dear.forks == 0


def test_there_is_none_where_rows_cost_what_they_bring():
    recorded = record(3)
    chain, tree = (play(recorded, WAYS[way], STEEP) for way in ("chain", "tree"))
    assert compare(tree, chain).replayed == pytest.approx(1.0, abs=0.05)
    assert set(compare_by_category(recorded, tree, chain)) == {"one", "other"}


def test_there_is_none_where_the_first_candidate_is_always_right():
    recorded = record(1)
    chain, tree = (play(recorded, WAYS[way], FLAT) for way in ("chain", "tree"))
    assert compare(tree, chain).replayed == pytest.approx(1.0, abs=0.03)


def test_a_row_sees_its_own_path_alone():
    parents = (-1, 0, 0, 2, 1)
    assert list_depths(parents) == [0, 1, 1, 2, 2]
    assert find_path(parents, 3) == [0, 2, 3]
    assert make_mask(parents).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
