"""Objectives of a plan: each alone turns a choice, prices and powers must be known, and no draft is cut too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from policies.planning.merit import sum_merits
from policies.planning.placement import pairs, plan_placement
from policies.planning.plan import (
    Constraints,
    Device,
    DrafterFacts,
    Host,
    Inventory,
    ModelFacts,
    NoPlan,
    Objective,
    Option,
    PlanGoal,
    Role,
    TermWeights,
    Workload,
)
from tests.policies.placing import clusters, loads
from tests.support.made_clusters import build_goal, fleet

MODEL = ModelFacts("target", 8)
GIB = 1 << 30
SOME = settings(max_examples=40)
factors = st.floats(1.2, 8.0)


def device(name: str, *, price: float = 1.0, power: float = 100.0, host: str = "", room: float = 10.0) -> Device:
    return Device(name, host or f"of-{name}", "gpu", name, int(room * GIB), power_w=power, price_per_hour=price)


def option(name: str, round_ms: float, *, prompt_ms: float = 1.0, kv_bytes: float = 0.0) -> Option:
    """Return an option whose forwards take so long whatever the rows, up to those of a prompt."""
    cost = StepCost((1.0, 64.0, 512.0), (round_ms, round_ms, round_ms + prompt_ms))
    return Option(name, Role.TARGET, "target", "a", "as_file", cost, layer_bytes=1.0, kv_bytes_per_token=kv_bytes)


def cluster_of(*known: tuple[Device, Option], host_price: float = 0.0) -> Inventory:
    names = dict.fromkeys(device.host for device, _ in known)
    hosts = tuple(Host(name, price_per_hour=host_price) for name in names)
    return Inventory(hosts, tuple(device for device, _ in known), tuple(device for _, device in known))


def goal(objective: Objective, concurrency: int = 4, prompt: int = 100, **limits: object) -> PlanGoal:
    load = Workload(MODEL, (), concurrency, prompt, 100)
    return PlanGoal(load, Constraints(**limits), objective=objective)  # type: ignore[arg-type]


def choose(cluster: Inventory, objective: Objective, **more: int) -> str:
    return plan_placement(cluster, goal(objective, **more)).replicas[0].shards[0].device


@SOME
@given(st.floats(1.0, 50.0), factors, factors, st.sampled_from((Objective.COST, Objective.ENERGY)))
def test_price_and_power_each_alone_turn_a_choice(
    round_ms: float, slower: float, cheaper: float, objective: Objective
) -> None:
    """The one that is slower, and less dear by more than that, is chosen by its own objective alone."""
    less = slower * cheaper
    price, power = (10.0 / less, 100.0) if objective is Objective.COST else (10.0, 100.0 / less)
    cluster = cluster_of(
        (device("fast", price=10.0), option("fast", round_ms, prompt_ms=0.0)),
        (device("frugal", price=price, power=power), option("frugal", slower * round_ms, prompt_ms=0.0)),
    )
    found = {objective: choose(cluster, objective) for objective in Objective}
    assert found.pop(objective) == "frugal"
    assert set(found.values()) == {"fast"}


@SOME
@given(st.floats(2.0, 50.0), st.floats(1.1, 3.0), st.integers(1, 8))
def test_a_device_that_decodes_sooner_and_reads_prompts_slowly_is_for_latency_alone(
    round_ms: float, sooner: float, concurrency: int
) -> None:
    """Prefill counts for goodput, not for the time of a stream's token."""
    prompt_ms = 1000.0 * round_ms
    cluster = cluster_of(
        (device("even"), option("even", round_ms, prompt_ms=0.0)),
        (device("sooner"), option("sooner", round_ms / sooner, prompt_ms=prompt_ms)),
    )
    found = {objective: choose(cluster, objective, concurrency=concurrency, prompt=400) for objective in Objective}
    assert found.pop(Objective.LATENCY) == "sooner"
    assert set(found.values()) == {"even"}


def test_latency_counts_the_turns_of_requests_that_find_no_place() -> None:
    room = 8.0 + 1e-3
    cluster = cluster_of(
        (device("wide"), option("wide", 15.0)),
        (device("narrow", room=room), option("narrow", 5.0, kv_bytes=4.0 * 0.9 * GIB / 200)),
    )
    for requests, best in ((1, "narrow"), (2, "narrow"), (4, "narrow"), (8, "wide")):
        assert choose(cluster, Objective.LATENCY, concurrency=requests) == best


def test_of_equal_latencies_the_sooner_first_token_decides() -> None:
    cluster = cluster_of(
        (device("a"), option("a", 10.0, prompt_ms=500.0)),
        (device("b"), option("b", 10.0, prompt_ms=20.0)),
    )
    assert choose(cluster, Objective.LATENCY, concurrency=1, prompt=512) == "b"


@SOME
@given(st.floats(0.01, 1.0))
def test_a_host_is_paid_once_so_that_its_second_device_is_the_cheaper_one(own_price: float) -> None:
    """Alone, the device on the cheap host costs less; beside a target on the dear host its price counts no more."""
    drafter = DrafterFacts("draft", (0.95,), ModelFacts("draft", 2))
    places = {"target": "dear", "beside": "dear", "away": "cheap"}
    prices = {"dear": 5.0, "cheap": 4.0}
    devices = tuple(device(name, price=own_price, host=host) for name, host in places.items())
    cost = StepCost((1.0, 16.0), (0.5, 0.5))
    drafts = tuple(
        Option(name, Role.DRAFT, "draft", "a", "as_file", cost, layer_bytes=1.0, kv_bytes_per_token=0.0)
        for name in ("beside", "away")
    )
    hosts = tuple(Host(name, price_per_hour=price) for name, price in prices.items())
    cluster = Inventory(hosts, devices, (option("target", 20.0), *drafts))
    load = Workload(MODEL, (drafter,), 1, 100, 100, depth_bound=4)
    plan = plan_placement(cluster, PlanGoal(load, Constraints(apart="device"), objective=Objective.COST))
    assert plan.replicas[0].draft is not None
    assert plan.replicas[0].draft.shard is not None
    assert plan.replicas[0].draft.shard.device == "beside"
    assert plan.price_per_hour == pytest.approx(5.0 + 2 * own_price)


@pytest.mark.parametrize(
    ("objective", "known", "told"),
    [
        (Objective.COST, {"price": 0.0}, "the price of 'b' is not known; give it or its host a `price_per_hour`"),
        (Objective.ENERGY, {"power": 0.0}, "the power of 'b' is not known; measure it"),
    ],
)
def test_a_figure_that_is_missing_is_asked_for(objective: Objective, known: dict[str, Any], told: str) -> None:
    cluster = cluster_of((device("a"), option("a", 10.0)), (device("b", **known), option("b", 5.0)))
    with pytest.raises(NoPlan, match=told) as refused:
        plan_placement(cluster, goal(objective))
    assert "`placement.objective`" in str(refused.value)
    plan = plan_placement(cluster, goal(objective, exclude=("b",)))
    assert plan.replicas[0].shards[0].device == "a"
    other = plan_placement(cluster, goal(Objective.THROUGHPUT))
    assert other.replicas[0].shards[0].device == "b"
    figures = {Objective.COST: other.cost_per_million_tokens, Objective.ENERGY: other.joules_per_token}
    assert figures[objective] == 0.0


def test_a_device_that_no_model_runs_on_needs_no_price() -> None:
    cluster = cluster_of((device("a"), option("a", 10.0)))
    more = replace(cluster, devices=(*cluster.devices, replace(device("b", price=0.0), host="of-a")))
    assert choose(more, Objective.COST) == "a"


def test_figures_are_those_of_the_devices_in_use() -> None:
    cluster = cluster_of((device("a", price=2.0, power=50.0), option("a", 10.0, prompt_ms=0.0)), host_price=1.0)
    plan = plan_placement(cluster, goal(Objective.THROUGHPUT))
    assert plan.price_per_hour == pytest.approx(3.0)
    assert plan.cost_per_million_tokens == pytest.approx(3.0 / 3600 / plan.goodput_tokens_per_s * 1e6)
    assert plan.joules_per_token == pytest.approx(50.0 / plan.goodput_tokens_per_s)


def test_a_draft_on_the_targets_own_device_draws_its_power_once() -> None:
    drafter = DrafterFacts("draft", (0.9,), ModelFacts("draft", 2))
    cost = StepCost((1.0, 16.0), (0.5, 0.5))
    draft = Option("a", Role.DRAFT, "draft", "a", "as_file", cost, layer_bytes=1.0, kv_bytes_per_token=0.0)
    cluster = Inventory((Host("of-a"),), (device("a", power=70.0),), (option("a", 20.0), draft))
    load = Workload(MODEL, (drafter,), 1, 100, 100, depth_bound=4)
    plan = plan_placement(cluster, PlanGoal(load))
    assert plan.replicas[0].draft is not None
    assert plan.joules_per_token * plan.goodput_tokens_per_s == pytest.approx(70.0)


def alike(count: int, *, price: float = 1.0, steps: tuple[float, ...] = (10.0, 20.0)) -> Inventory:
    """Return devices on hosts of their own whose forwards take longer with more rows."""
    cost = StepCost((1.0, 8.0), steps)
    known = []
    for number in range(count):
        name = f"d{number}"
        known.append((device(name, price=price), replace(option(name, 1.0), cost=cost)))
    return cluster_of(*known)


def test_replicas_are_added_as_long_as_they_help_the_objective() -> None:
    """Eight requests: together they share a forward, so that apart they are faster and dearer."""
    found = {
        objective: plan_placement(alike(4), goal(objective, concurrency=8, prompt=1, max_replicas=4))
        for objective in Objective
    }
    assert {one: len(plan.replicas) for one, plan in found.items()} == {
        Objective.THROUGHPUT: 4,
        Objective.LATENCY: 4,
        Objective.COST: 1,
        Objective.ENERGY: 1,
    }
    for objective in (Objective.COST, Objective.ENERGY):
        assert any(
            "2 replicas: " in told and f"more do not help `{objective}`" in told for told in found[objective].reasons
        )


@pytest.mark.parametrize(("requests", "most"), [(4, 3), (5, 2), (7, 4)])
def test_replicas_have_no_more_requests_together_than_there_are(requests: int, most: int) -> None:
    wish = goal(Objective.THROUGHPUT, concurrency=requests, prompt=1, max_replicas=most)
    plan = plan_placement(alike(4), wish)
    assert len(plan.replicas) == most
    assert sum(one.prediction.sequences for one in plan.replicas) == requests


def test_latency_adds_no_replica_that_does_not_help() -> None:
    """A forward takes as long for one row as for eight."""
    plan = plan_placement(alike(4, steps=(10.0, 10.0)), goal(Objective.LATENCY, concurrency=8, max_replicas=4))
    assert len(plan.replicas) == 1
    assert any("more do not help `latency`" in told for told in plan.reasons)


def test_cost_adds_a_replica_that_costs_no_more_a_token() -> None:
    """Each device has room for two requests of eight: more of them serve more at the same cost of a token."""
    known = [(device(f"d{number}"), option(f"d{number}", 10.0, kv_bytes=4.0 * GIB / 200)) for number in range(4)]
    plan = plan_placement(cluster_of(*known), goal(Objective.COST, concurrency=8, max_replicas=3))
    assert len(plan.replicas) == 3


def test_a_second_replica_on_a_host_that_is_paid_makes_a_token_cheaper() -> None:
    """The same devices on hosts of their own would make it dearer."""
    cost = StepCost((1.0, 8.0), (10.0, 20.0))
    for host, replicas in (("one", 2), ("", 1)):
        known = [
            (device(f"d{number}", price=0.0, host=host), replace(option(f"d{number}", 1.0), cost=cost))
            for number in range(2)
        ]
        cluster = cluster_of(*known, host_price=4.0)
        plan = plan_placement(cluster, goal(Objective.COST, concurrency=8, prompt=1, max_replicas=2))
        assert len(plan.replicas) == replicas
        assert plan.price_per_hour == pytest.approx(4.0)
        assert all(one.prediction.cost_per_million_tokens > 0.0 for one in plan.replicas)


@SOME
@given(clusters(memory_mib=(60, 500)), loads(), st.sampled_from(Objective), st.integers(2, 4))
def test_more_replicas_are_never_worse_by_the_objective(
    cluster: Inventory, load: Workload, objective: Objective, most: int
) -> None:
    merits = []
    for count in (1, most):
        wish = PlanGoal(load, Constraints(max_replicas=count), objective=objective)
        try:
            plan = plan_placement(cluster, wish)
        except NoPlan:
            return
        merits.append(sum_merits(objective, [one.prediction for one in plan.replicas])[0])
        assert len(plan.replicas) == 1 or any(one.startswith(f"{len(plan.replicas)} replicas") for one in plan.reasons)
    assert merits[1] >= merits[0] * (1 - 1e-9)


def test_indifference_may_give_up_a_share_of_any_objective_for_a_better_score() -> None:
    dear = replace(device("dear", price=1.05), health=1.0)
    ill = replace(device("ill"), health=0.5, health_why="it failed once")
    cluster = cluster_of((dear, option("dear", 10.0)), (ill, option("ill", 10.0)))
    strict = goal(Objective.COST)
    assert plan_placement(cluster, strict).replicas[0].shards[0].device == "ill"
    lenient = replace(strict, weights=TermWeights(indifference=0.1))
    plan = plan_placement(cluster, lenient)
    assert plan.replicas[0].shards[0].device == "dear"
    assert any("by no more than `indifference` allows" in rejection.why for rejection in plan.rejected)


def test_what_lost_is_shown_with_its_own_figures() -> None:
    cluster = cluster_of(
        (device("a", price=1.0), option("a", 10.0)), (device("b", price=4.0, power=400.0), option("b", 5.0))
    )
    for objective, words in ((Objective.COST, "USD a million tokens"), (Objective.ENERGY, "J a token")):
        plan = plan_placement(cluster, goal(objective))
        lost = next(rejection for rejection in plan.rejected if rejection.what == "b")
        assert words in lost.why
        assert "more than the plan's" in lost.why
        assert lost.cost_per_million_tokens == pytest.approx(4.0 / 3600 / lost.goodput_tokens_per_s * 1e6)
        assert lost.joules_per_token == pytest.approx(400.0 / lost.goodput_tokens_per_s)
        assert lost.tpot_ms > 0.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", [Objective.COST, Objective.ENERGY])
def test_drafts_that_are_left_out_of_large_clusters_are_never_the_best(
    objective: Objective, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(seed)
    cluster = fleet(90, 4, seed, per_host=3)
    targets = tuple(one.id for one in cluster.devices[::2])
    found = tuple(
        replace(
            one,
            price_per_hour=float(draw.uniform(0.01, 0.7)) + 6.0 * (one.id in targets),
            power_w=float(draw.uniform(10.0, 120.0)) + 900.0 * (one.id in targets),
        )
        for one in cluster.devices
    )
    hosts = tuple(replace(one, price_per_hour=float(draw.uniform(0.0, 0.5)) * (seed % 2)) for one in cluster.hosts)
    options = tuple(replace(one, layer_bytes=one.layer_bytes / 10) for one in cluster.options)
    wish = build_goal(1 + seed, sharding="never", apart="device", pin_target=targets)
    drafters = tuple(replace(one, acceptance=(0.95,)) for one in wish.workload.drafters if one.model is not None)
    wish = replace(wish, objective=objective, workload=replace(wish.workload, drafters=drafters))
    plans = []
    for few in (0, len(found) * 10):
        monkeypatch.setattr(pairs, "_FEW_DRAFTS", few)
        plans.append(plan_placement(replace(cluster, devices=found, hosts=hosts, options=options), wish))
    assert plans[0].replicas == plans[1].replicas
    assert plans[0].replicas[0].draft is not None


@SOME
@given(clusters(memory_mib=(60, 900)), loads(), st.sampled_from(Objective), st.integers(1, 4), st.sampled_from((0, 2)))
def test_without_indifference_nothing_better_is_left_out_and_no_reason_says_so(
    cluster: Inventory, load: Workload, objective: Objective, replicas: int, shards: int
) -> None:
    """What is compared with a replica has that replica's part of the requests. What is better than that replica may be
    no better for all of them together."""
    limits = Constraints(max_replicas=replicas, min_replicas=min(2, replicas), shards=shards)
    try:
        plan = plan_placement(cluster, PlanGoal(load, limits, objective=objective))
    except NoPlan:
        return
    reasons = [rejection.why for rejection in plan.rejected if "better than" in rejection.why]
    assert not any("indifference" in why for why in reasons)
    together = [why for why in reasons if "all replicas together" in why]
    assert len(plan.replicas) > 1 or not together
    assert reasons == together or shards


def test_what_one_replica_alone_could_do_is_not_compared_with_one_of_several() -> None:
    """Ten rows at once make more tokens than five; two replicas of five make more than either."""
    cost = StepCost((1.0, 8.0), (10.0, 12.0))
    known = [(device(f"d{number}"), replace(option(f"d{number}", 1.0), cost=cost)) for number in range(3)]
    plan = plan_placement(cluster_of(*known), goal(Objective.THROUGHPUT, concurrency=8, prompt=1, max_replicas=2))
    assert len(plan.replicas) == 2
    third = next(rejection for rejection in plan.rejected if rejection.what == "d2")
    assert third.goodput_tokens_per_s == pytest.approx(plan.replicas[0].prediction.goodput_tokens_per_s)
    assert "as replica 0's" in third.why
