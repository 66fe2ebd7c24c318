"""A canary's trial: who is in which arm, what counts, how it ends, and that a new daemon goes on with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clock import SystemClock
from orchestrator.daemon.control.port import DraftView, StateView, Totals
from orchestrator.daemon.control.rollout.canary import CanaryTerms, CanaryTrial, TrialFile
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Delta, Gauges
from policies.sampling import Sampling
from policies.serving.canary import PromotionRule

RULE = PromotionRule(least_requests=5, most_requests=40)
KEEP = ("cluster.yaml:7: speculation.method: off",)


@dataclass
class Workers:
    """A control of which only the state counts."""

    restarts: int = 0
    drafters: list[DrafterState] = field(default_factory=list)
    drafts: tuple[DraftView, ...] = ()

    def view(self) -> StateView:
        gauges = Gauges(0, 0, 1, 1, 0, 0, 0, 0, drafters=self.drafters)
        totals = Totals(restarts=self.restarts)
        return StateView("ready", "", "", "local", None, gauges, totals, drafts=self.drafts)

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        pass

    def find_speculation(self, submit: Submit) -> None:
        pass

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        yield Delta(submit.request_id, [])


def trial(directory: Path, workers: Workers | None = None, *, by_rule: bool = True, share: float = 0.5) -> CanaryTrial:
    terms = CanaryTerms(share, by_rule, RULE, ("speculation.method: auto -> off",), KEEP, frozenset(["canary-model"]))
    return CanaryTrial(terms, "salt", TrialFile(directory / "canary" / "x.json"), workers or Workers(), SystemClock())


def request(number: int, **fields: Any) -> Submit:
    return Submit(f"r{number}", [1], 8, **fields)


def serve(found: CanaryTrial, numbers: range, *, canary_ms: float, control_ms: float = 10.0) -> list[str]:
    """Serve requests of the ids; returns the variant of each."""
    variants = []
    for number in numbers:
        submit, entry = found.assign_variant(request(number))
        variants.append(submit.variant)
        tpot_ms = (canary_ms if submit.variant == "canary" else control_ms) + 0.01 * (number % 3)
        found.end_entry(entry, ttft_ms=50.0 + number % 5, tpot_ms=tpot_ms, acceptance=0.5)
    return variants


def test_a_faster_canary_is_promoted_and_every_new_request_gets_it(tmp_path):
    found = trial(tmp_path)
    variants = serve(found, range(60), canary_ms=6.0)
    view = found.view()
    assert (view.phase, view.effective_share) == ("promoted", 1.0)
    assert view.decision is not None
    assert (view.decision.by, view.decision.figure) == ("rule", "tpot_ms")
    assert view.decision.low is not None
    assert -4.1 < view.decision.low < -3.9
    assert "against 10.01 ms of the others, after " in view.decision.reason
    assert min(arm.ttft_ms.seen for arm in view.arms.values()) == RULE.least_requests
    first = next(at for at in range(60) if set(variants[at:]) == {"canary"})
    assert set(variants[:first]) == {"canary", "control"}
    submit, _ = found.assign_variant(request(1, depth=3, sampling=Sampling(acceptance="rejection", temperature=1.0)))
    assert submit.variant == "canary", "it is everybody's now"


def test_a_slower_canary_is_rolled_back_and_its_figures_stay(tmp_path):
    found = trial(tmp_path)
    serve(found, range(60), canary_ms=14.0)
    view = found.view()
    assert (view.phase, view.effective_share) == ("rolled_back", 0.0)
    assert {found.assign_variant(request(number))[0].variant for number in range(100, 150)} == {"control"}
    serve(found, range(60, 90), canary_ms=1.0)
    assert found.view().arms == view.arms


def test_the_operator_decides_where_no_rule_may_and_overrules_where_one_did(tmp_path, caplog):
    found = trial(tmp_path, by_rule=False)
    serve(found, range(60), canary_ms=1.0)
    assert found.view().phase == "trial"
    caplog.set_level("INFO")
    found.abort()
    assert found.view().phase == "rolled_back"
    found.promote()
    view = found.view()
    assert view.phase == "promoted"
    assert view.decision is not None
    assert view.decision.by == "operator"
    assert view.decision.reason.startswith("TPOT -9")
    assert "to keep the canary: cluster.yaml:7: speculation.method: off" in caplog.text
    assert "the canary is promoted (by the operator): TPOT -9" in caplog.text


def test_requests_that_are_no_evidence_take_no_part(tmp_path):
    workers = Workers()
    found = trial(tmp_path, workers, by_rule=False)
    own: list[dict[str, Any]] = [
        {"depth": 3},
        {"most_depth": 2},
        {"sampling": Sampling(temperature=1.0, acceptance="rejection")},
    ]
    for number in range(40):
        for fields in own:
            submit, entry = found.assign_variant(request(number, **fields), names_rule="sampling" in fields)
            assert submit.variant == "control"
            found.end_entry(entry, ttft_ms=1.0, tpot_ms=1.0, acceptance=None)
    assert sum(arm.ttft_ms.seen for arm in found.view().arms.values()) == 0
    _, entry = found.assign_variant(request(0))
    workers.restarts += 1
    found.end_entry(entry, ttft_ms=9000.0, tpot_ms=1.0, acceptance=None)
    assert sum(arm.ttft_ms.seen for arm in found.view().arms.values()) == 0, "it waited for a worker"


def test_an_acceptance_rule_is_tried_by_those_who_name_none_and_held_to_its_agreement(tmp_path):
    terms = CanaryTerms(
        0.5, True, RULE, ("speculation.acceptance: coupled -> tolerance",), KEEP, acceptance="tolerance"
    )
    file = TrialFile(tmp_path / "canary" / "x.json")
    found = CanaryTrial(terms, "salt", file, Workers(), SystemClock())
    rules: dict[str, set[str]] = {}
    for number in range(60):
        submit, entry = found.assign_variant(request(number, sampling=Sampling(temperature=1.0)))
        rules.setdefault(submit.variant, set()).add(submit.sampling.acceptance)
        named, _ = found.assign_variant(request(number, sampling=Sampling(temperature=1.0)), names_rule=True)
        assert (named.variant, named.sampling.acceptance) == ("control", "coupled"), "it says what it wants"
        lost = submit.variant == "canary"
        tpot_ms = (6.0 if lost else 10.0) + 0.01 * (number % 3)
        agreement = 0.8 + 0.001 * (number % 3) if lost else 1.0
        found.end_entry(entry, ttft_ms=50.0, tpot_ms=tpot_ms, acceptance=0.5, agreement=agreement)
    assert rules == {"canary": {"tolerance"}, "control": {"coupled"}}
    view = found.view()
    assert view.decision is not None
    assert (view.phase, view.decision.figure) == ("rolled_back", "agreement")
    assert "are the target's own choice, and 95.0% must be (canary.least_agreement)" in view.decision.reason
    again = CanaryTrial(terms, "salt", file, Workers(), SystemClock())
    assert again.view().arms == view.arms


def test_a_drafter_of_its_own_that_fails_ends_it(tmp_path):
    workers = Workers(drafters=[DrafterState("model", "model", "failed", "gone")])
    found = trial(tmp_path, workers, by_rule=False)
    serve(found, range(3), canary_ms=10.0)
    assert found.view().phase == "trial", "that one is everybody's"
    workers.drafters.append(DrafterState("canary-model", "model", "failed", "the device was lost"))
    serve(found, range(3, 4), canary_ms=10.0)
    decision = found.view().decision
    assert decision is not None
    assert (found.view().phase, decision.by) == ("rolled_back", "drafter")
    assert "the device was lost" in decision.reason


def test_nothing_counts_before_draft_workers_were_ready_and_one_that_is_given_up_ends_it(tmp_path):
    workers = Workers()
    found = trial(tmp_path, workers, by_rule=False)
    for phase, seen in (("starting", 0), ("ready", 20), ("restarting", 40)):
        workers.drafts = (DraftView("canary-model", phase, "", "", None, 0),)
        serve(found, range(20), canary_ms=10.0)
        assert sum(arm.ttft_ms.seen for arm in found.view().arms.values()) == seen
    workers.drafts = (DraftView("canary-model", "failed", "no such fault", "", None, 5),)
    serve(found, range(1), canary_ms=10.0)
    decision = found.view().decision
    assert decision is not None
    assert (found.view().phase, decision.by) == ("rolled_back", "drafter")
    assert decision.reason == "the worker of its drafter canary-model failed: no such fault"


def test_a_daemon_that_starts_again_goes_on_and_a_restart_forgets(tmp_path):
    first = trial(tmp_path, by_rule=False)
    variants = serve(first, range(30), canary_ms=8.0)
    first.save()
    again = trial(tmp_path, by_rule=False)
    assert again.view() == first.view()
    assert [again.assign_variant(request(number))[0].variant for number in range(30)] == variants
    again.promote()
    kept = trial(tmp_path, by_rule=False)
    assert kept.view().phase == "promoted"
    submit, entry = kept.assign_variant(request(1))
    kept.restart()
    kept.end_entry(entry, ttft_ms=1.0, tpot_ms=1.0, acceptance=None)
    view = kept.view()
    assert (view.phase, view.decision, submit.variant) == ("trial", None, "canary")
    assert sum(arm.ttft_ms.seen for arm in view.arms.values()) == 0, "what began in another trial is not counted"
    assert [kept.assign_variant(request(number))[0].variant for number in range(30)] != variants, "drawn anew"


@pytest.mark.parametrize("kept", [b"", b"{", b'{"phase": 3}', b"\xff"])
def test_a_damaged_file_is_told_and_the_trial_begins_anew(tmp_path, kept, caplog):
    path = tmp_path / "canary" / "x.json"
    path.parent.mkdir()
    path.write_bytes(kept)
    assert trial(tmp_path).view().phase == "trial"
    assert "cannot be used" in caplog.text


def test_a_place_that_cannot_be_written_is_told_and_the_trial_goes_on(tmp_path, caplog):
    (tmp_path / "canary").write_text("in the way")
    found = trial(tmp_path)
    found.promote()
    assert found.view().phase == "promoted"
    assert "is not kept" in caplog.text


@pytest.mark.parametrize(
    ("canary_ms", "served", "words"),
    [(10.0, 0, "5 more of the canary and 5 more of the others"), (10.0, 30, "goes on until TPOT is surely 2% lower")],
)
def test_what_comes_next_is_said(tmp_path, canary_ms, served, words):
    found = trial(tmp_path)
    serve(found, range(served), canary_ms=canary_ms)
    assert words in found.view().outlook
