"""Forwards of a draft model hold what it can take, and are as few as that allows."""

from __future__ import annotations

from adapters.contract import Segment
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask
from policies.sampling import Sampling
from tests.support.loops import toy


def test_sequences_are_fed_in_as_few_forwards_as_the_model_takes(monkeypatch) -> None:
    model = toy(rows=4, slots=10)
    drafter = ModelDrafter(model, DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=1e6)
    keys = [f"s{number}" for number in range(10)]
    for key in keys:
        drafter.begin(key, [5], Sampling())
    forward, rows = model.forward, []

    def count_rows(segments: list[Segment]):
        rows.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments)

    monkeypatch.setattr(model, "forward", count_rows)
    assert all(len(draft.tokens) == 2 for draft in drafter.propose([Ask(key, 2) for key in keys]))
    assert rows == [4, 4, 2, 4, 4, 2]
