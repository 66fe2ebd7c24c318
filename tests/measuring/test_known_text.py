"""A target that says what is known: the real loop over it, in no time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.acceptance import TargetTexts
from device_profiles.cost import StepCost
from device_profiles.measured import RoundOverhead
from orchestrator.protocol.commands import Submit
from orchestrator.worker.measuring.known_text import Hours, KnownText
from tests.support.loops import loop_over, suffix, toy

COST = StepCost((1.0, 9.0), (8.0, 12.0), prefill=StepCost((8.0, 64.0), (10.0, 40.0)))
BESIDE = RoundOverhead(1.0)
BOUND = 6

spoken = st.lists(st.integers(0, 5), min_size=2, max_size=40)
conversations = st.lists(st.tuples(spoken, spoken), min_size=1, max_size=6)


def build_known_text(conversation, *, rows=256):
    prompts = tuple((100 + number, *prompt) for number, (prompt, _) in enumerate(conversation))
    texts = TargetTexts("t", "d", "chat", prompts, tuple(tuple(said) for _, said in conversation))
    clock = Hours()
    return KnownText(toy(rows=rows), texts, COST, BESIDE, clock, BOUND), texts, clock


def list_said(model, texts, *, running, drafts, clock):
    drafter = suffix() if drafts else None
    loop = loop_over(model, drafter, running=running, depth=BOUND, prefix_reuse=False, max_itl_ms=50.0)
    outputs: list[list[int]] = [[] for _ in texts.prompts]
    for number, (prompt, said) in enumerate(zip(texts.prompts, texts.outputs, strict=True)):
        assert loop.submit(Submit(f"{number}", [*prompt], len(said))) is None
    while not loop.idle:
        before_s = clock.now_s
        for delta in loop.run_round().deltas:
            outputs[int(delta.request_id)] += delta.tokens
        assert clock.now_s > before_s
    return outputs


@settings(max_examples=40, deadline=None)
@given(conversations, st.integers(1, 5), st.booleans())
def test_it_says_the_texts_whatever_is_drafted(conversation, running, drafts):
    model, texts, clock = build_known_text(conversation)
    outputs = list_said(model, texts, running=running, drafts=drafts, clock=clock)
    assert [tuple(one) for one in outputs] == list(texts.outputs)
    found = model.result(BOUND)
    # Every token but those that come with prompts is the target's own, or an accepted draft.
    assert found.tokens * found.rounds <= sum(map(len, texts.outputs)) + 1e-6
    assert all(right <= offered + 1e-9 for right, offered in zip(found.accepted, found.offered, strict=True))
    assert list(found.offered) == sorted(found.offered, reverse=True)
    assert 0.0 <= found.changes <= 1.0
    if not drafts:
        assert found.offered == (0.0,) * BOUND


def test_alone_and_without_prompts_in_its_rounds_every_token_is_counted():
    model, texts, clock = build_known_text([([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])])
    list_said(model, texts, running=1, drafts=True, clock=clock)
    found = model.result(BOUND)
    assert found.tokens * found.rounds == pytest.approx(11)  # the first one comes with the prompt
    assert found.tokens > 2.0


def test_time_goes_on_as_predicted():
    model, texts, clock = build_known_text([([1, 2, 3], [4, 5, 0, 4, 5])])
    list_said(model, texts, running=1, drafts=False, clock=clock)
    prompt_ms = COST.prefill_ms(4) + BESIDE.round_ms
    rounds_ms = sum(COST.ms(1, 1, 4 + number) + BESIDE.round_ms for number in range(4))
    assert clock.monotonic_s() * 1000.0 == pytest.approx(prompt_ms + rounds_ms)
    assert clock.wall_s() == clock.monotonic_s()
