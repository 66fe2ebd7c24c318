"""What is counted of the drafts of one round."""

from __future__ import annotations

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.engine.draft_counts import DrafterCounts, RoundDraftCounts, count_by_drafter


def test_drafts_are_counted_by_position_and_by_the_rule_they_were_judged_by() -> None:
    counts = RoundDraftCounts()
    for drafted, accepted, rule in ((4, 2, "coupled"), (3, 3, "rejection"), (2, 0, "coupled"), (0, 0, "tolerance")):
        counts.add(drafted, accepted, rule)
    assert (counts.drafts, counts.drafted, counts.accepted) == (3, 9, 5)
    assert counts.by_rule == {"coupled": (6, 2), "rejection": (3, 3)}
    assert counts.per_position == [2, 2, 1]


def test_the_counts_by_drafter_add_up_to_all_of_them() -> None:
    """Tokens that a grammar added behind a drafter's are the grammar's, also where all before them are accepted."""
    counts = RoundDraftCounts()
    judged = [
        (Draft((1, 2, 3, 4), (0.5,) * 4, "suffix", forced=1), 4),
        (Draft((1, 2), (0.5,) * 2, "model"), 1),
        (Draft((5, 6, 7), (1.0,) * 3, "", forced=3), 3),
        (Draft((1, 2, 3), (0.5,) * 3, "suffix", forced=2), 2),
        (Draft(), 0),
    ]
    for draft, accepted in judged:
        counts.add(draft.guessed, accepted, "coupled")
        count_by_drafter(counts.by_drafter, draft, accepted)
    assert counts.by_drafter == {"suffix": (4, 4), "grammar": (6, 5), "model": (2, 1)}
    assert sum(drafted for drafted, _ in counts.by_drafter.values()) == counts.drafted
    assert sum(accepted for _, accepted in counts.by_drafter.values()) == counts.accepted


def test_tokens_that_only_statistics_said_are_counted_where_they_were_verified_and_where_they_were_right() -> None:
    counts = DrafterCounts()
    draft = Draft((1, 2, 3, 4, 5), (0.5,) * 5, "suffix", from_statistics=0b10110)
    counts.add(draft, 2)
    counts.add(draft.truncate(3), 3)
    counts.add(draft.behind(2), 1)
    counts.add(Draft((1, 2), (0.5,) * 2, "model"), 2)
    suffix, model = counts.states([DrafterState("suffix", "suffix"), DrafterState("model", "model")])
    assert (suffix.statistics_drafted, suffix.statistics_accepted) == (3 + 2 + 2, 1 + 2 + 1)
    assert (model.statistics_drafted, model.statistics_accepted) == (0, 0)
