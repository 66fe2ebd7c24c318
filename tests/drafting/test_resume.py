"""A draft model that is asked for more of the same draft goes on where it was, and drafts what it drafts at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ForwardResult, Segment
from adapters.simulated.model import ToyModel
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask
from policies.sampling import Sampling
from tests.support.loops import toy

PROMPT = [60, 32, 101] * 3


def drafter_over(model: ToyModel) -> ModelDrafter:
    return ModelDrafter(model, DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=50.0)


def propose_tokens(drafter: ModelDrafter, limit: int) -> tuple[int, ...]:
    return drafter.propose([Ask("a", limit)])[0].tokens


def at_once(committed: Sequence[int], limit: int, sampling: Sampling) -> tuple[int, ...]:
    """What a fresh drafter proposes behind the prompt and the committed tokens."""
    drafter = drafter_over(toy())
    drafter.begin("a", PROMPT, sampling)
    drafter.extend("a", committed)
    return propose_tokens(drafter, limit)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.booleans()), max_size=8),
    st.sampled_from([Sampling(), Sampling(0.8, seed=5, frequency_penalty=0.5)]),
)
@settings(max_examples=60)
def test_a_resumed_draft_is_that_of_a_fresh_drafter(steps, sampling):
    drafter = drafter_over(toy())
    drafter.begin("a", PROMPT, sampling)
    committed: list[int] = []
    for more, agreed, ends_wrong in steps:
        short = propose_tokens(drafter, more)
        long = propose_tokens(drafter, more + 3)
        assert long[: len(short)] == short
        assert long == at_once(committed, more + 3, sampling)
        chosen = [*long[:agreed], *([(long[agreed] + 1) % 256] if ends_wrong and agreed < len(long) else [])]
        drafter.extend("a", chosen)
        committed += chosen


def test_each_token_more_costs_one_row(monkeypatch: pytest.MonkeyPatch):
    model, rows = toy(), []
    forward = model.forward

    def counting(batch: Sequence[Segment]) -> ForwardResult:
        rows.append(sum(len(segment.tokens) for segment in batch))
        return forward(batch)

    monkeypatch.setattr(model, "forward", counting)
    drafter = drafter_over(model)
    drafter.begin("a", PROMPT, Sampling())
    first = propose_tokens(drafter, 4)
    rows.clear()
    assert propose_tokens(drafter, 4) == first
    assert rows == []
    propose_tokens(drafter, 7)
    assert rows == [1, 1, 1]
    drafter.extend("a", first)
    rows.clear()
    assert len(propose_tokens(drafter, 3)) == 3
    assert rows == []
