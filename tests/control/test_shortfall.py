"""A replica, a standby or a draft worker that nothing can run is told by its name, and blamed on nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.cli.status import list_rows
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.port import StateView, UnmetWish
from orchestrator.daemon.control.replicas.shortfall import (
    count_out,
    describe_missing,
    find_out_reason,
    list_missing,
    list_shortfall,
    list_wanted,
)
from orchestrator.errors import WorkerLost
from orchestrator.launch.local import LocalCluster
from orchestrator.launch.local_worker import LocalWorker
from orchestrator.planning.basis import list_left_out_as_unlike
from orchestrator.planning.proposal import build_proposal
from orchestrator.protocol.contract import ClusterMembers, WorkerSpec
from policies.serving.failover.standby import FailoverRules, Readiness
from tests.control.test_controller import PROMPT, at_once, decode
from tests.control.test_plan_keeper import Clock, Making, Workers, first_plan, name_workers
from tests.control.test_replicas import LIMITS
from tests.support import engines
from tests.support.profiles import drift_after
from tests.support.waiting import until_async


def name_worker(name: str, **options: object) -> WorkerSpec:
    """A worker on a device of that name."""
    return msgspec.structs.replace(engines.spec(**options), name=name, device=name.upper())


@asynccontextmanager
async def start_control(
    *specs: WorkerSpec, drafts: tuple[WorkerSpec, ...] = (), standbys: tuple[StandbySpec, ...] = ()
) -> AsyncIterator[TargetControl]:
    limits = replace(LIMITS, max_restarts=1, failover=FailoverRules(2.0, 10.0, "never", alike=True))
    control = TargetControl(LocalCluster(), specs, limits, SystemClock(), at_once, drafts, standbys)
    await control.start()
    try:
        await control.wait_settled()
        yield control
    finally:
        await control.close()


def list_out(view: StateView) -> list[tuple[str, str, str]]:
    return [(part.kind, part.name, part.state) for part in view.health]


@pytest.mark.parametrize(
    ("one", "other", "told", "reason", "became"),
    [
        ({}, {"fail_start": "final"}, "no such device", "failed", "is failed"),
        (
            *({"activations": "bf16"}, {"activations": "fp32"}, "its tokens would differ"),
            *("unlike", "is left out as unlike"),
        ),
    ],
    ids=["said by the worker", "said of its tokens"],
)
async def test_a_refused_replica_is_named_and_neither_its_device_nor_a_crash_is(
    one, other, told, reason, became
) -> None:
    async with start_control(name_worker("one", **one), name_worker("other", **other)) as control:
        await until_async(lambda: any(map(find_out_reason, control.view().replicas)))
        view = control.view()
        (missing,) = list_missing(view)
        assert list_out(view) == [("worker", missing.name, "failed")]
        assert told in view.health[0].why
        assert view.losses == {}, "it was not lost"
        assert [replica.name for replica in list_wanted(view)] == ["one", "other"]
        assert describe_missing(missing) == f"{missing.name} {became}: {view.health[0].why}"
        assert {out: count for out, count in count_out(view).items() if count} == {reason: 1}
        assert missing.device == f"here/{missing.name.upper()}"
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)


async def test_a_replica_that_ends_at_each_start_is_named_while_it_is_tried_again() -> None:
    async with start_control(name_worker("good"), name_worker("bad", fail_start="exit")) as control:
        await until_async(lambda: control.view().replicas[1].spent)
        view = control.view()
        (part,) = [one for one in view.health if one.kind == "worker"]
        assert (part.name, part.state, view.replicas[1].phase) == ("bad", "open", "starting")
        assert list_shortfall(view) == [f"bad is out of restarts: {part.why}"]
        assert "started once a minute" in part.why


async def test_a_standby_with_other_bits_is_named_though_nothing_is_left_of_it() -> None:
    spare = StandbySpec(name_worker("spare", activations="fp32"), Readiness.HOT)
    async with start_control(name_worker("good", activations="bf16"), standbys=(spare,)) as control:
        await until_async(lambda: bool(control.view().health))
        view = control.view()
        assert list_out(view) == [("worker", "spare", "failed")]
        assert "its tokens could differ" in view.health[0].why
        assert list_missing(view) == []


async def test_a_draft_worker_that_cannot_start_is_named() -> None:
    async with start_control(name_worker("good"), drafts=(name_worker("small", fail_start="final"),)) as control:
        await until_async(lambda: bool(control.view().health))
        assert list_out(control.view()) == [("worker", "small", "failed")]


async def test_what_serves_of_a_plan_is_what_its_replicas_reach_that_are_ready(tmp_path) -> None:
    proposal = first_plan(tmp_path, {"SIM": 2.0, "SIM.1": 2.1}, replicas=2)
    keeper = PlanKeeper(name_workers(proposal), Workers(), Making(), drift_after(0.2, 3.0), Clock())
    async with start_control(name_worker("good"), name_worker("bad", fail_start="final")) as control:
        control.views.plan_view = keeper.view
        await until_async(lambda: any(map(find_out_reason, control.view().replicas)))
        plan = control.view().plan
        reached = [one.prediction.goodput_tokens_per_s for one in proposal.plan.replicas]
        assert plan is not None
        assert (plan.predicted_tokens_per_s, plan.serving_tokens_per_s) == (sum(reached), reached[0])
        assert [(one.replica, one.name) for one in plan.missing] == [(1, "bad")]
        keeper.set_places([1, 0])  # the plan's first replica runs in the second place
        plan = control.view().plan
        assert plan is not None
        assert plan.serving_tokens_per_s == reached[1]
        assert [one.replica for one in plan.missing] == [0]


async def test_what_a_plan_leaves_out_as_unlike_is_told_though_no_replica_is_there_for_it(tmp_path) -> None:
    first = first_plan(tmp_path, {"SIM": 2.0, "SIM.1": 2.1}, replicas=2)
    assert list_left_out_as_unlike(first) == "", "nobody asked for one group"
    alike = build_proposal(first.cluster, replace(first.request, alike=True), first.behind)
    why = list_left_out_as_unlike(alike)
    assert "1 of 2 replicas left out as unlike: simulated device SIM.1 SIM simulated fp32: its bits would differ" in why
    async with start_control(name_worker("good")) as control:
        control.views.list_unmet = lambda: [UnmetWish("unlike", why)]
        view = control.view()
        assert list_shortfall(view) == [why]
        assert list_shortfall(view, whole=False) == ["a configured replica is left out as unlike"]
        assert count_out(view)["unlike"] == 1


async def test_a_head_that_is_away_and_a_host_that_is_lost_are_told_and_requests_are_served() -> None:
    cluster: Any = LocalCluster()
    control = TargetControl(cluster, [name_worker("good")], LIMITS, SystemClock(), at_once)
    await control.start()
    try:
        await control.wait_settled()
        app = create_admin_app([AdminTarget(control)], "http://127.0.0.1:8000/v1", "1")
        metrics = Metrics(control, SystemClock())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
            away = "Ray's head has not answered for 9 s; is it running (ray start --head)?"
            for why, lost in (("", ()), (away, ()), ("", ("10.0.0.2",)), ("", ())):
                cluster.away = why
                cluster.members = ClusterMembers("10.0.0.1:6379", ("10.0.0.1",), lost)
                rows = dict(list_rows((await client.get("/admin/status")).json()))
                assert ("RAY AWAY" in rows) is bool(why)
                assert why in rows.get("RAY AWAY", "")
                assert f'what="cluster"}} {float(bool(why))}' in metrics.render().decode()
                assert f'what="host"}} {float(bool(lost))}' in metrics.render().decode()
                assert ("LOST 10.0.0.2" in rows["cluster"]) is bool(lost)
                parts = (await client.get("/admin/health")).json()["parts"]
                assert [part["state"] for part in parts] == ["away"] * bool(why) + ["lost"] * len(lost)
                assert await decode(control, f"a{why}{lost}", PROMPT, 5) == engines.tokens(PROMPT, 5)
    finally:
        await control.close()


@pytest.mark.parametrize(("expected_s", "patient_s"), [(0.0, 890.0), (1.0, 50.0), (100.0, 290.0)])
async def test_a_replica_that_loads_for_longer_than_its_plan_says_is_told_and_no_sooner(expected_s, patient_s) -> None:
    specs, clock = [name_worker("good"), name_worker("slow", fail_start="never")], SystemClock()
    control = TargetControl(LocalCluster(), specs, LIMITS, clock, at_once)
    control.views.expect_load_s = lambda engine: expected_s
    await control.start()
    try:
        await until_async(lambda: [replica.phase for replica in control.view().replicas] == ["ready", "starting"])
        patient = control.views.build_view(clock.monotonic_s() + patient_s)
        assert (list_out(patient), not any(count_out(patient).values())) == ([], True)
        assert list_shortfall(patient)[0].startswith("slow is starting")
        late = control.views.build_view(clock.monotonic_s() + patient_s + 20.0)
        assert list_out(late) == [("worker", "slow", "open")]
        assert {reason: count for reason, count in count_out(late).items() if count} == {"slow": 1}
        assert list_shortfall(late)[0].startswith("slow has been loading for longer than expected")
    finally:
        await control.close()


class HostAway(LocalCluster):
    """Has no host of that name."""

    missing = ""

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        if spec.node == self.missing != "":
            raise WorkerLost(f"there is no node {spec.node}", kind="host")
        return await super().start(msgspec.structs.replace(spec, node=""))


async def test_a_replica_whose_host_is_away_is_told_until_the_host_is_back() -> None:
    cluster = HostAway()
    cluster.missing = "10.0.0.7"
    far = msgspec.structs.replace(name_worker("far"), node="10.0.0.7")
    control = TargetControl(cluster, [name_worker("good"), far], LIMITS, SystemClock(), at_once)
    await control.start()
    try:
        await until_async(lambda: control.view().phase == "ready" and count_out(control.view())["host"] == 1)
        view = control.view()
        assert list_shortfall(view) == [describe_missing(view.replicas[1])]
        assert "far waits for its host: there is no node 10.0.0.7" in list_shortfall(view)[0]
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)
        cluster.missing = ""
        await until_async(lambda: list_missing(control.view()) == [])
        assert not any(count_out(control.view()).values())
    finally:
        await control.close()
