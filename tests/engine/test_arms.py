"""Two arms in one worker: each request is served its own way, and all of them get the target's tokens."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.engine.variants import SpeculationVariants, VariantDepth
from policies.sampling import Sampling
from tests.support.drafters import KnowingDrafter
from tests.support.loops import alone, decode, loop_over, requests, suffix, toy

ARMS = SpeculationVariants(VariantDepth(8), {"canary": VariantDepth(4, fixed=True), "none": VariantDepth(0)})


@pytest.mark.parametrize(
    ("lane", "depth", "most", "served"),
    [
        ("", None, None, (None, 8)),
        ("control", None, 3, (None, 3)),
        ("control", 20, None, (8, None)),
        ("canary", None, None, (4, None)),
        ("canary", 2, None, (2, None)),
        ("canary", 20, None, (4, None)),
        ("canary", None, 3, (None, 3)),
        ("none", None, None, (None, 0)),
        ("none", 5, None, (0, None)),
    ],
)
def test_an_arm_bounds_what_requests_ask_for_and_fixes_what_they_leave_open(lane, depth, most, served):
    found = ARMS.apply_variant(Submit("r", [1], 9, depth=depth, most_depth=most, variant=lane))
    assert (found.depth, found.most_depth) == served


def test_both_arms_give_the_targets_tokens_and_each_is_drafted_for_by_its_own():
    asked = [
        msgspec.structs.replace(one, variant="canary" if at % 3 else "control") for at, one in enumerate(requests(8))
    ]
    expected = alone(asked)
    own = SuffixDrafter(max_match=2, memory_bytes=1 << 20, clock=SystemClock(), name="canary-suffix")
    lanes = VariantDrafter(suffix(), {"canary": own})
    arms = SpeculationVariants(VariantDepth(8), {"canary": VariantDepth(3, fixed=True)}, lanes)
    loop = loop_over(toy(), lanes)
    for one in asked:
        arms.join_drafter(one)
    out, rounds = decode(loop, [arms.apply_variant(one) for one in asked])
    assert out == expected
    states = {state.name: state for state in loop.gauges(0).drafters}
    assert list(states) == ["suffix", "canary-suffix"]
    assert min(state.drafted for state in states.values()) > 0
    fixed = {one.request_id for one in asked if one.variant == "canary"}
    deltas = [delta for done in rounds for delta in done.deltas if delta.request_id in fixed]
    assert all(len(delta.tokens) <= 3 + 1 for delta in deltas)


def test_a_lane_is_asked_for_its_own_sequences_only_and_forgotten_with_them():
    text = [1, 2, 3, 4, 5, 6]
    first, second = KnowingDrafter([text]), KnowingDrafter([[1, 2, 9, 9, 9]])
    lanes = VariantDrafter(first, {"canary": second})
    lanes.join("b", "canary")
    for key in "abc":
        lanes.begin(key, text[:2], Sampling())
    lanes.end("c", keep=False)
    a, b = lanes.propose([Ask("a", 2), Ask("b", 2)])
    assert (a.tokens, b.tokens) == ((3, 4), (9, 9))
    lanes.extend("b", [9])
    assert lanes.propose([Ask("b", 1)])[0].tokens == (9,)
    lanes.end("b", keep=True)
    lanes.begin("b", text[:3], Sampling())
    assert lanes.propose([Ask("b", 2)])[0].tokens == (4, 5), "the next one of this name is in no lane"


def test_where_only_the_canary_has_drafters_nobody_else_gets_drafts():
    asked = requests(4)
    expected = alone(asked)
    texts = [one.prompt + expected[one.request_id] for one in asked]
    lanes = VariantDrafter(None, {"canary": KnowingDrafter(texts)})
    out, rounds = decode(loop_over(toy(), lanes), asked)
    assert out == expected
    assert sum(done.drafted for done in rounds) == 0
