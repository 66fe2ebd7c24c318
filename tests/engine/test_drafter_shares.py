"""What each drafter did for a request, by the words of a real decode loop over the simulated model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.cli.explain import describe_leaving, describe_unasked
from orchestrator.clock import SystemClock
from orchestrator.daemon.control.streams.request_history import RequestHistory
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Delta, DrafterShare, RequestStats
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from tests.support.loops import loop_over, requests, suffix, toy


def chain() -> ChainDrafter:
    state = DrafterState("model", "model", adapter="simulated", device="SIM")
    model = ModelDrafter(toy(), state, SystemClock(), vocabulary=272, prefill_ms=50.0)
    return ChainDrafter([suffix(), model], PredictionDrafter(SystemClock()))


def last_stats(loop: DecodeLoop, submits: Sequence[Submit]) -> dict[str, RequestStats]:
    found: dict[str, RequestStats] = {}
    for submit in submits:
        assert loop.submit(submit) is None
    while not loop.idle:
        for delta in loop.run_round_strictly().deltas:
            assert delta.stats is not None
            found[delta.request_id] = delta.stats
    return found


def test_every_drafted_token_is_some_drafters_and_every_round_has_its_reasons() -> None:
    stats = last_stats(loop_over(toy(), chain(), running=3), requests(6, depth=8))
    taken = 0
    for one in stats.values():
        shares = {share.name: share for share in one.drafters}
        assert shares.keys() <= {"suffix", "model"}, "nobody brought a prediction"
        assert sum(share.drafted for share in shares.values()) == one.drafted
        assert sum(share.accepted for share in shares.values()) == one.accepted
        for share in shares.values():
            assert share.proposed >= share.drafted >= share.accepted
            assert share.asked >= share.answered >= share.taken
            assert share.asked + share.spared <= one.steps
            assert share.off == 0
        assert shares["suffix"].spared == 0, "the cheapest is asked first"
        taken += shares["model"].taken
    assert taken > 0


def test_who_was_not_chosen_is_told_apart_from_who_was_not_needed() -> None:
    drafter = chain()
    drafter.choose(["model"])
    (stats,) = last_stats(loop_over(toy(), drafter, running=1), requests(1, depth=8)).values()
    shares = {share.name: share for share in stats.drafters}
    assert (shares["suffix"].asked, shares["suffix"].drafted) == (0, 0)
    assert shares["suffix"].off == shares["model"].asked > 0
    assert shares["model"].drafted == stats.drafted > 0
    assert drafter.describe_shares(next(iter(requests(1))).request_id) == [], "it is forgotten with its request"


def test_the_canarys_drafter_speaks_for_its_own_requests() -> None:
    own = ChainDrafter([suffix()])
    variants = VariantDrafter(chain(), {"canary": own})
    submit = requests(1, depth=4)[0]
    variants.join(submit.request_id, "canary")
    (stats,) = last_stats(loop_over(toy(), variants, running=1), [submit]).values()
    assert [share.name for share in stats.drafters] == ["suffix"]


def test_a_request_that_moved_has_the_counts_of_both_workers() -> None:
    history = RequestHistory(key="a", prompt_tokens=3, opened_s=0.0)
    stats = RequestStats(3, 1, 1, 4, 1, 0.0, 1.0, drafters=[DrafterShare("suffix", 5, 4, 3, 20, 0, 1, 9, 6)])
    history.observe_sent("t0", 1.0)
    history.observe_delta(Delta("a", [1], stats=stats), 2.0)
    history.observe_delta(Delta("a", [1], stats=msgspec.structs.replace(stats, drafters=[])), 3.0)
    history.observe_recalled("its worker was lost", 4.0)
    history.observe_sent("t1", 5.0)
    more = [DrafterShare("suffix", 1, 1, 1, 2, 0, 0, 2, 2), DrafterShare("model", 1)]
    history.observe_delta(Delta("a", [1], stats=msgspec.structs.replace(stats, drafters=more)), 6.0)
    assert history.view(7.0).drafters == (DrafterShare("suffix", 6, 5, 4, 22, 0, 1, 11, 8), DrafterShare("model", 1))


def test_reasons_are_told_in_words() -> None:
    share = msgspec.structs.asdict(DrafterShare("model", asked=9, answered=7, taken=4, spared=11))
    told = describe_leaving(share)
    assert told == "a cheaper draft promised enough: 11, it had nothing that pays: 2, another promised more: 3"
    assert describe_leaving(msgspec.structs.asdict(DrafterShare("suffix", 4, 4, 4))) == "-"
    one = {"drafters": [share], "rounds": [{"rounds": 25}]}
    assert describe_unasked(one).startswith("in 5 of 25 rounds no drafter was asked")
    assert describe_unasked({"drafters": [], "rounds": [{"rounds": 25}]}) == ""
