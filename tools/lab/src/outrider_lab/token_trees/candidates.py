"""Candidates for the next tokens, several at each place: what all voters go on with, not only their winner."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchestrator.drafting.passages import MATCH, Passages
from orchestrator.drafting.suffix import OutputStore, SuffixIndex
from orchestrator.drafting.suffix_vote import weigh_match
from outrider_lab.token_trees.shapes import NO_PARENT, Candidate

DEEPEST = 16
_WIDEST = 6
_MOST = 160
_LEAST_REACH = 0.004
_STORE_BYTES = 64 << 20
_PLACES = 48  # of the statistics, for each length of match that is asked for
_LENGTHS = (MATCH, 4, 3, 2, 1)
_END = -1

Voter = tuple[float, Sequence[int], int]
"""Weight, text, and where in it the continuation begins."""


class RecordedOutput(msgspec.Struct, frozen=True):
    """A request, and what the target answered, in tokens."""

    key: str
    category: str
    prompt: list[int]
    tokens: list[int]


class Sources(NamedTuple):
    """Where voters come from. `suffix`: the request's own text and earlier outputs. `statistics`: texts of the model's
    own."""

    suffix: bool
    statistics: Passages | None


def list_candidates(outputs: Sequence[RecordedOutput], sources: Sources) -> Iterator[list[list[Candidate]]]:
    """Yield the candidates in front of every token of each output. Outputs are remembered in their order."""
    store = OutputStore(_STORE_BYTES)
    for output in outputs:
        index = SuffixIndex()
        index.extend(output.prompt)
        found = []
        for token in output.tokens:
            voters, longest = _find_voters(index, store, sources)
            found.append(grow_candidates(voters, longest))
            index.extend([token])
        store.add(output.tokens)
        yield found


def _find_voters(index: SuffixIndex, store: OutputStore, sources: Sources) -> tuple[list[Voter], int]:
    voters: list[Voter] = []
    longest, context = 0, index.tokens
    for number, one in enumerate((index, *store.generations) if sources.suffix else ()):
        found = one.candidates(context, MATCH)
        for age, (length, place) in enumerate(found, start=1):
            longest = max(longest, length)
            recency = 1.0 + 3.0 * age / len(found)
            voters.append((weigh_match(length, own=number == 0) * recency, one.tokens, place))
    seen: set[int] = set()
    for length in _LENGTHS if sources.statistics else ():
        assert sources.statistics is not None  # noqa: S101
        for match in sources.statistics.find(context[-length:], _PLACES, 1):
            if match.place not in seen:
                seen.add(match.place)
                longest = max(longest, match.length)
                text = [*sources.statistics.read(match.place, DEEPEST), _END]
                voters.append((weigh_match(match.length, own=False), text, 0))
    return voters, longest


def grow_candidates(voters: Sequence[Voter], longest: int) -> list[Candidate]:
    """Return the candidates that voters go on with, the likeliest path first. `longest`: the longest match among the
    voters."""
    found: list[Candidate] = []
    waiting: list[tuple[float, int, Candidate, list[Voter]]] = []
    count = 0

    def expand(parent: int, depth: int, own: Sequence[Voter], reach: float) -> None:
        nonlocal count
        groups: dict[int, list[Voter]] = {}
        for voter in own:
            if voter[2] + depth < len(voter[1]):
                groups.setdefault(voter[1][voter[2] + depth], []).append(voter)
        total = sum(weight for group in groups.values() for weight, _, _ in group)
        shares = sorted(
            ((sum(weight for weight, _, _ in group) / total, token) for token, group in groups.items()), reverse=True
        )
        for rank, (share, token) in enumerate(shares[:_WIDEST]):
            if token >= 0:
                raw = (1.0 - 0.6 ** (longest + depth)) * share
                count += 1
                heapq.heappush(
                    waiting, (-reach * raw, count, Candidate(parent, depth, token, raw, rank, longest), groups[token])
                )

    expand(NO_PARENT, 0, voters, 1.0)
    while waiting and len(found) < _MOST:
        reach, _, candidate, own = heapq.heappop(waiting)
        if -reach < _LEAST_REACH:
            break
        found.append(candidate)
        if candidate.depth + 1 < DEEPEST:
            expand(len(found) - 1, candidate.depth + 1, own, -reach)
    return found


def load_outputs(path: Path) -> list[RecordedOutput]:
    """Read what `record` wrote. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=list[RecordedOutput])
