"""What replicas that run reach on devices as they are now: the same as planned where nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.proposal import PlanProposal, propose_here
from orchestrator.planning.wanted import DraftCandidate, PlanRequest
from policies.planning.placement.running import predict_running
from tests.support.profiles import store_simulated_profiles

DRAFT = "base_ms=3"


def plan(directory, sim_ms=15.0, also_on_cpu_ms=0.0, most_replicas=1, **placement) -> PlanProposal:
    target = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    draft = model_at_hand(f"simulated:toy?{DRAFT}", "", directory, "auto", directory)
    here, row_ms = ({"CPU": also_on_cpu_ms}, 1.0) if also_on_cpu_ms else ({}, 0.0)
    store_simulated_profiles(directory, {"SIM": 20.0, **here}, more_row_ms=row_ms)
    store = store_simulated_profiles(directory, {"CPU": 3.0, "SIM.1": sim_ms}, draft.name, "draft", script=DRAFT)
    section = PlacementSection(draft_acceptance=0.8, **placement)
    asked = PlanRequest(target, (DraftCandidate(draft, (0.8,)),), False, Exactness.BIT, 8, most_replicas, section)
    return propose_here(asked, store, {})


def test_where_nothing_has_changed_it_is_what_was_planned(tmp_path):
    found = plan(tmp_path)
    draft = found.plan.replicas[0].draft
    assert draft is not None
    assert draft.shard is not None
    assert draft.shard.device == "here/CPU"
    (reached,) = predict_running(found.plan.replicas, found.cluster, found.wanted)
    assert reached.goodput_tokens_per_s == pytest.approx(found.plan.replicas[0].prediction.goodput_tokens_per_s)
    assert reached.depth == found.plan.replicas[0].depth


def test_a_draft_on_a_device_that_is_taken_costs_what_it_costs(tmp_path):
    found = plan(tmp_path)
    before = found.plan.replicas[0].prediction
    taken = [replace(one, utilisation=0.8) if one.id == "here/CPU" else one for one in found.cluster.devices]
    (reached,) = predict_running(found.plan.replicas, replace(found.cluster, devices=tuple(taken)), found.wanted)
    assert reached.goodput_tokens_per_s < 0.9 * before.goodput_tokens_per_s
    assert reached.goodput_tokens_per_s >= before.plain_tokens_per_s * 0.99, "at worst it drafts nothing"


def test_a_replica_whose_device_is_not_there_any_more_reaches_nothing(tmp_path):
    found = plan(tmp_path)
    left = [one for one in found.cluster.devices if one.id != "here/SIM"]
    assert predict_running(found.plan.replicas, replace(found.cluster, devices=tuple(left)), found.wanted) == []


@pytest.mark.parametrize("requests", [1, 2, 7])
def test_it_shares_the_requests_that_there_are_now(tmp_path, requests):
    found, more = plan(tmp_path, concurrency=4), plan(tmp_path, concurrency=requests)
    (reached,) = predict_running(found.plan.replicas, more.cluster, more.wanted)
    assert reached.sequences == more.plan.replicas[0].prediction.sequences
    assert reached.goodput_tokens_per_s == pytest.approx(more.plan.replicas[0].prediction.goodput_tokens_per_s)


def test_it_runs_no_more_than_fit_into_memory(tmp_path):
    found, more = plan(tmp_path, concurrency=4), plan(tmp_path, concurrency=4096, prompt_tokens=100_000)
    (reached,) = predict_running(found.plan.replicas, more.cluster, more.wanted)
    (best,) = more.plan.replicas
    assert 4 <= reached.sequences == best.prediction.sequences < 4096
