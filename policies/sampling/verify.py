"""The judgement of one sequence's whole draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.sampling.accept import judge
from policies.sampling.coupled import choose, choose_each, greedy
from policies.sampling.draft_distribution import DraftDistribution
from policies.sampling.params import NotFinite, Row, Sampling, Shape


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """`tokens` are to be committed: `accepted` drafts, then one recovered or bonus token (none where a shape said that
    nothing may follow). `gaps` of the drafts that were judged, where the rule is tolerance; `tolerated`: which of the
    tokens only the tolerance accepted."""

    accepted: int
    tokens: tuple[int, ...]
    gaps: tuple[float, ...] = ()
    tolerated: tuple[int, ...] = ()


def verify_draft(
    rows: Row,
    draft: Sequence[int],
    sampling: Sampling,
    position: int,
    shape: Shape | None = None,
    *,
    proposals: Sequence[DraftDistribution | None] = (),
    delta: float | None = None,
) -> VerifiedDraft:
    """Judge one sequence's draft by the rule of `sampling`.

    `rows`: float32, shape (len(draft) + 1, vocabulary); row i holds the logits of position `position + i`,
    where `position` is that of the first drafted token. `shape` changes each row before it is judged, in order: what a
    row is shaped to depends on the drafts accepted before it. `proposals[i]` is what draft i was drawn from: None, or
    no entry, where it was not drawn. `delta`: see `judge`. Raises NotFinite.
    """
    if shape is None and sampling.rule == "greedy":
        return _greedy_verdict(rows, draft)
    gaps: list[float] = []
    tolerated: list[int] = []
    for index, token in enumerate(draft):
        row = _shape_row(rows[index], draft[:index], shape)
        if row is None:
            return VerifiedDraft(index, tuple(draft[:index]), tuple(gaps), tuple(tolerated))
        proposal = proposals[index] if index < len(proposals) else None
        judged = judge(row, token, proposal, sampling, position + index, delta=delta)
        if judged.gap is not None and sampling.acceptance == "tolerance":
            gaps.append(judged.gap)
        if not judged.accepted:
            return VerifiedDraft(index, (*draft[:index], judged.token), tuple(gaps), tuple(tolerated))
        if judged.tolerated:
            tolerated.append(index)
    count = len(draft)
    row = _shape_row(rows[count], draft, shape)
    bonus = () if row is None else (choose(row, sampling, position + count),)
    return VerifiedDraft(count, (*draft, *bonus), tuple(gaps), tuple(tolerated))


def verify_coupled_drafts(rows: Sequence[tuple[Row, Sequence[int], Sampling, int]]) -> list[VerifiedDraft]:
    """Return what `verify_draft` does for each (rows, draft, sampling, position), side by side, a position of each at a
    time. All must go by the coupled rule, and none may have a shape. Raises NotFinite."""
    taken: list[list[int]] = [[] for _ in rows]
    going = list(range(len(rows)))
    while going:
        chosen = choose_each(_next(*rows[index], len(taken[index])) for index in going)
        for index, token in zip(going, chosen, strict=True):
            taken[index].append(token)
        going = [index for index in going if _goes_on(taken[index], rows[index][1])]
    return [VerifiedDraft(len(tokens) - 1, tuple(tokens)) for tokens in taken]


def _next(rows: Row, draft: Sequence[int], sampling: Sampling, position: int, taken: int) -> tuple[Row, Sampling, int]:
    return rows[taken], sampling, position + taken


def _goes_on(taken: Sequence[int], draft: Sequence[int]) -> bool:
    """True where the last token was drafted, so that the row behind it counts."""
    return len(taken) <= len(draft) and taken[-1] == draft[len(taken) - 1]


def _greedy_verdict(rows: Row, draft: Sequence[int]) -> VerifiedDraft:
    choices = greedy(rows)
    accepted = 0
    while accepted < len(draft) and choices[accepted] == draft[accepted]:
        accepted += 1
    return VerifiedDraft(accepted, tuple(choices[: accepted + 1]))


def _shape_row(row: Row, taken: Sequence[int], shape: Shape | None) -> Row | None:
    if shape is None:
        return row
    if not math.isfinite(float(row.max())):  # a shape may cover garbage up
        raise NotFinite("the logits are not finite")
    return shape(row, taken)
