"""What is counted of the drafts of one round."""

from __future__ import annotations

from orchestrator.engine.draft_counts import RoundDraftCounts


def test_drafts_are_counted_by_position_and_by_the_rule_they_were_judged_by() -> None:
    counts = RoundDraftCounts()
    for drafted, accepted, rule in ((4, 2, "coupled"), (3, 3, "rejection"), (2, 0, "coupled"), (0, 0, "tolerance")):
        counts.add(drafted, accepted, rule)
    assert (counts.drafts, counts.drafted, counts.accepted) == (3, 9, 5)
    assert counts.by_rule == {"coupled": (6, 2), "rejection": (3, 3)}
    assert counts.per_position == [2, 2, 1]
