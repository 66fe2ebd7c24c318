"""A draft model that checks several tokens of a cheaper one in a step drafts what it drafts alone, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ForwardResult, Segment
from adapters.simulated.model import ToyModel
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.cascade import Cascade, ContinuingDrafter
from orchestrator.worker.drafting.guard import GuardedDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft
from orchestrator.worker.drafting.suffix import SuffixDrafter
from policies.sampling import Sampling
from policies.speculation.cascade import MEASURED_ROWS, StepTimes
from tests.drafting.test_draft_cache import fresh, read_cache
from tests.support.loops import toy

PROMPT = [60, 32, 101] * 12
FREE_ROWS = StepTimes(MEASURED_ROWS, (1.0,) * len(MEASURED_ROWS))
SAMPLINGS = [Sampling(), Sampling(0.8, seed=5, frequency_penalty=0.5), Sampling(0.9, seed=3, acceptance="rejection")]


class Said:
    """A cheaper drafter that goes on as it is told, right or wrong."""

    def __init__(self, text: Sequence[int], start: int, confidence: float = 0.9) -> None:
        self.text, self.start, self.confidence = list(text), start, confidence
        self.known = self.asked = 0

    def continue_from(self, key: str, tokens: Sequence[int], limit: int) -> Draft:
        self.asked += 1
        found = self.text[self.known + len(tokens) :][:limit]
        return Draft(tuple(found), (self.confidence,) * len(found), "said") if found else NOTHING


def build(cheaper: Sequence[ContinuingDrafter] = (), model: ToyModel | None = None, *, ahead: int = 0) -> ModelDrafter:
    clock = SystemClock()
    own = Cascade(tuple(cheaper), clock)
    own.times = FREE_ROWS
    state = DrafterState("m", "model")
    return ModelDrafter(model or toy(), state, clock, vocabulary=272, prefill_ms=1e6, cascade=own, ahead=ahead)


def propose(drafter: ModelDrafter, limit: int) -> Draft:
    return drafter.propose([Ask("a", limit)])[0]


def count_forwards(model: ToyModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    forward, found = model.forward, list[int]()

    def count_rows(batch: Sequence[Segment]) -> ForwardResult:
        found.append(sum(len(segment.tokens) for segment in batch))
        return forward(batch)

    monkeypatch.setattr(model, "forward", count_rows)
    return found


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6), st.booleans()), max_size=8),
    st.sampled_from(SAMPLINGS),
    st.lists(st.integers(0, 9), min_size=60, max_size=60),
)
@settings(max_examples=80)
def test_the_draft_is_the_models_own_whatever_a_cheaper_drafter_says(steps, sampling, wrong):
    """`wrong` says where the cheaper drafter errs: at every position that has a 0."""
    plain = build()
    plain.begin("a", PROMPT, sampling)
    text = list(plain.propose([Ask("a", 60)])[0].tokens)
    said = Said([token + (not wrong[at % 60]) for at, token in enumerate(text)], 0)
    alone, checking, model = build(), None, toy()
    checking = build([said], model)
    for drafter in (alone, checking):
        drafter.begin("a", PROMPT, sampling)
    for limit, agreed, ends_wrong in steps:
        expected, found = propose(alone, limit), propose(checking, limit)
        assert (found.tokens, found.confidences) == (expected.tokens, expected.confidences)
        known = checking._known["a"]
        assert (read_cache(model, known.slot, known.held) == fresh(known)).all()
        chosen = [*expected.tokens[:agreed], *([7] if ends_wrong or not agreed else [])]
        for drafter in (alone, checking):
            drafter.extend("a", chosen)
        said.known += len(chosen)


def test_tokens_of_a_cheaper_drafter_that_is_right_are_checked_in_one_step(monkeypatch):
    plain = build()
    plain.begin("a", PROMPT, Sampling())
    text = propose(plain, 9).tokens
    model = toy()
    drafter = build([Said(text, 0)], model)
    drafter.begin("a", PROMPT, Sampling())
    propose(drafter, 1)  # reads the prompt
    forwards = count_forwards(model, monkeypatch)
    assert propose(drafter, 8).tokens == text[:8]
    assert forwards == [7]  # the token that was there, and six of the cheaper drafter


def test_a_worker_that_is_asked_for_one_token_more_has_checked_more(monkeypatch):
    plain = build()
    plain.begin("a", PROMPT, Sampling())
    text = propose(plain, 12).tokens
    model = toy()
    drafter = build([Said(text, 0)], model, ahead=4)
    drafter.begin("a", PROMPT, Sampling())
    propose(drafter, 1)
    forwards = count_forwards(model, monkeypatch)
    for limit in range(2, 11):
        assert propose(drafter, limit).tokens == text[:limit]
    assert len(forwards) <= 3


def test_a_model_is_a_cheaper_drafter_of_another_and_loses_nothing(monkeypatch):
    """Three cheaper: the text's repetitions, a model that is often wrong, and one that checks for the target."""
    suffix = SuffixDrafter(max_match=16, memory_bytes=1 << 20, clock=SystemClock())
    small = build([suffix], toy(script="agree=0.7"))
    model = toy()
    drafter, alone = build([suffix, small], model), build()
    forwards = count_forwards(model, monkeypatch)
    for one in (suffix, small, drafter, alone):
        one.begin("a", PROMPT, Sampling())
    used = 0
    for number in range(12):
        expected = propose(alone, 6)
        used += len(expected.tokens)
        assert propose(drafter, 6).tokens == expected.tokens
        chosen = [*expected.tokens[: number % 6], 32 + number % 3]
        for one in (suffix, small, drafter, alone):
            one.extend("a", chosen)
    assert small.states()[0].rounds > 0
    assert len(forwards) < used
    held = small._known["a"]
    assert held.tokens == drafter._known["a"].tokens


def test_a_cheaper_drafter_that_is_never_right_is_asked_seldom():
    said = Said([5] * 4000, 0)
    drafter = build([said])
    drafter._cascade.times = StepTimes(MEASURED_ROWS, (1e-4, 2e-4, 3e-4, 5e-4, 9e-4))  # a step takes less than an ask
    drafter.begin("a", PROMPT, Sampling())
    for _ in range(40):
        propose(drafter, 4)
        drafter.extend("a", [6])
    before = said.asked
    for _ in range(40):
        propose(drafter, 4)
        drafter.extend("a", [6])
    assert said.asked - before < 40


def test_a_cheaper_drafter_that_raises_is_asked_no_more():
    class Broken(SuffixDrafter):
        def continue_from(self, key: str, tokens: Sequence[int], limit: int) -> Draft:
            raise ZeroDivisionError("broken")

    broken = GuardedDrafter(Broken(max_match=8, memory_bytes=1 << 20, clock=SystemClock()))
    drafter, alone = build([broken]), build()
    for one in (drafter, alone):
        one.begin("a", PROMPT, Sampling())
        assert one.states()[0].state == "ok"
    assert propose(drafter, 5).tokens == propose(alone, 5).tokens
    assert broken.states()[0].state == "failed"


def test_a_draft_of_a_short_context_is_timed_within_it():
    model = toy()
    model.capabilities = replace(model.capabilities, max_context_tokens=64)
    drafter = build([Said([5], 0)], model)
    drafter.measure()
    assert drafter.states()[0].state == "ok"
    assert drafter._cascade.times.rows == MEASURED_ROWS
