"""The rows of one verification, chosen by expected tokens: the best chain, the best tree, and the best set of forks.

A candidate is a token with a chance, given that all before it are accepted. `reach` is the product of these chances
along its path. All three choices maximise `tokens - value * time`, as policies/speculation/allocation does. Where
chances are known for each candidate, the best tree of n tokens is the n with the most reach: a child has no more than
its parent. Where they are known by rank only, it is Sequoia's programme (Chen et al., arXiv 2402.12374).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

RowCost = Callable[[int], float]
"""The milliseconds of a forward of so many rows."""
NO_PARENT = -1
"""The parent of a candidate for the next token: the last committed token, which always has a row."""
_LEAST_GAIN = 1e-9


class Candidate(NamedTuple):
    """`depth` tokens stand between it and the committed ones. `raw`: a first guess of its chance, from
    the votes. `rank` among its siblings, from 0. `match`: the longest match behind it, in tokens. Parents stand
    in front of their children."""

    parent: int
    depth: int
    token: int
    raw: float
    rank: int
    match: int


class Budget(NamedTuple):
    """`value`: tokens per ms that decoding makes on the average. `most_rows` of a forward. `deepest`: the most draft
    tokens that can become output. `fork_ms`: what it takes to begin one forked sequence."""

    row_ms: RowCost
    value: float
    most_rows: int
    deepest: int
    fork_ms: float = 0.0


class Choice(NamedTuple):
    """Indices of candidates, and the rows and forks that verify them."""

    candidates: list[int]
    rows: int
    forks: int = 0


def multiply_chances(candidates: Sequence[Candidate], chances: Sequence[float]) -> list[float]:
    """Return each candidate's reach."""
    reach: list[float] = []
    for candidate, chance in zip(candidates, chances, strict=True):
        reach.append(chance * (1.0 if candidate.parent == NO_PARENT else reach[candidate.parent]))
    return reach


def choose_chain(candidates: Sequence[Candidate], reach: Sequence[float], budget: Budget) -> Choice:
    """Follow the likeliest child from the root on, as deep as it pays."""
    children: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        children.setdefault(candidate.parent, []).append(index)
    order: list[int] = []
    at = NO_PARENT
    while at in children and len(order) < budget.deepest:
        at = max(children[at], key=reach.__getitem__)
        order.append(at)
    return _take_worthy(order, reach, budget)


def choose_tree(candidates: Sequence[Candidate], reach: Sequence[float], budget: Budget) -> Choice:
    """Return the best tree, one row a candidate. The best chain is never better."""
    allowed = [index for index, candidate in enumerate(candidates) if candidate.depth < budget.deepest]
    return _take_worthy(sorted(allowed, key=lambda index: (-reach[index], index)), reach, budget)


def _take_worthy(order: Sequence[int], reach: Sequence[float], budget: Budget) -> Choice:
    best = total = 0.0
    taken, base_ms = 0, budget.row_ms(1)
    for count, index in enumerate(order[: budget.most_rows - 1], start=1):
        total += reach[index]
        surplus = total - budget.value * (budget.row_ms(1 + count) - base_ms)
        if surplus > best:
            best, taken = surplus, count
    return Choice(list(order[:taken]), 1 + taken)


def choose_forks(candidates: Sequence[Candidate], reach: Sequence[float], budget: Budget) -> Choice:
    """Return a chain and branches as sequences of their own: of chains of several lengths, each with the branches that
    pay, added one by one, the best.

    A branch has rows for all of its path, the last committed token included: its source has not computed them yet.
    """
    chain = choose_chain(candidates, reach, budget).candidates
    if not chain:
        return Choice([], 1)
    paths = [_path(candidates, index) if one.depth < budget.deepest else [] for index, one in enumerate(candidates)]
    lengths = dict.fromkeys((len(chain), (len(chain) + 1) // 2, (len(chain) + 3) // 4))
    return max(
        (_add_branches(chain[:length], paths, reach, budget) for length in lengths),
        key=lambda choice: _count_surplus(choice, reach, budget),
    )


def _count_surplus(choice: Choice, reach: Sequence[float], budget: Budget) -> float:
    ms = budget.row_ms(choice.rows) + budget.fork_ms * choice.forks
    return sum(reach[index] for index in choice.candidates) - budget.value * ms


def _add_branches(chain: list[int], paths: list[list[int]], reach: Sequence[float], budget: Budget) -> Choice:
    have, rows, forks = set(chain), 1 + len(chain), 0
    while True:
        best_gain, best_path = _LEAST_GAIN, list[int]()
        for index, path in enumerate(paths):
            more = len(path) + 1
            if index in have or not path or rows + more > budget.most_rows:
                continue
            more_ms = budget.row_ms(rows + more) - budget.row_ms(rows) + budget.fork_ms
            gain = sum(reach[one] for one in path if one not in have) - budget.value * more_ms
            if gain > best_gain:
                best_gain, best_path = gain, path
        if not best_path:
            return Choice(sorted(have), rows, forks)
        have.update(best_path)
        rows, forks = rows + len(best_path) + 1, forks + 1


def _path(candidates: Sequence[Candidate], index: int) -> list[int]:
    found = []
    while index != NO_PARENT:
        found.append(index)
        index = candidates[index].parent
    return found


def count_expected_tokens(by_rank: Sequence[float], most_rows: int, deepest: int) -> list[list[float]]:
    """Return the most expected tokens of a round, by depth (up to `deepest`) and rows (up to `most_rows`), the target's
    own token included: Sequoia's programme. `by_rank[k]`: the chance that the target chooses candidate k."""
    levels = [[0.0, *[1.0] * most_rows]]
    for _ in range(deepest):
        below, best = levels[-1], [0.0] * (most_rows + 1)
        for chance in by_rank:  # with one child more: it has s of the n rows
            best = [
                max([best[n], *(best[n - s] + chance * below[s] for s in range(1, n + 1))])
                for n in range(most_rows + 1)
            ]
        levels.append([0.0, *(1.0 + best[n - 1] for n in range(1, most_rows + 1))])
    return levels
