"""The ceiling of first depths: replayed by the real policy, and found where there is one."""

from __future__ import annotations

from dataclasses import replace

from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model
from outrider_lab.replay.recorded import RecordedDraft, RecordedRequest
from outrider_lab.replay.run import replay
from policies.speculation.state import COLD_DEPTH
from tools.lab.tests.golden.rounds import recording
from outrider_lab.measure.first_depth import ClassMeans, FirstDepths, measure_first_depths

RECORDED = recording()


def test_the_constant_that_ships_is_the_shipped_policy():
    requests = RECORDED.kinds["good"][:6]
    played = [
        replay(requests, policy, RECORDED.costs, concurrency=2, most=RECORDED.most).ms
        for policy in (FirstDepths(RECORDED.known, lambda _: COLD_DEPTH), Adaptive(start_cost_model(RECORDED.known)))
    ]
    assert played[0] == played[1]


def test_class_means_follow_where_requests_of_a_class_ended():
    requests = [replace(one, category="one") for one in RECORDED.kinds["good"][:3]]
    policy = ClassMeans(RECORDED.known, {one.key: one.category for one in requests})
    replay(requests, policy, RECORDED.costs, concurrency=1, most=RECORDED.most)
    policy.begin(requests[0].key, RECORDED.most)
    begun = policy.state.requests[requests[0].key].pid.integral
    assert begun != COLD_DEPTH
    assert 1.0 <= begun <= RECORDED.most


def test_a_first_depth_that_pays_is_found():
    """Short answers of which half is copied and half is not: who begins deep wins on the former alone."""
    sure, wrong = RecordedDraft(12, (0.9,) * 12, 12), RecordedDraft(12, (0.9,) * 12, 0)
    requests = [
        RecordedRequest(f"{name}-{index}", (draft,) * 13, name, 50)
        for index in range(6)
        for name, draft in (("copy", sure), ("prose", wrong))
    ]
    gains = measure_first_depths(requests, RECORDED.known, RECORDED.costs, concurrency=1, most=12, orders=3)
    assert gains.best_of_requests.mean > 1.02
    assert gains.best_of_requests.mean >= max(one.mean for one in gains.constants.values()) - 0.01
    assert gains.constants[COLD_DEPTH].mean == 1.0
