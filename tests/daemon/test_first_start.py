"""Random events at the start of a target: one with a ready worker answers, and one without says why wherever it can.
So is it of each member of a pool of unlike replicas, and each group of bits that serves can be asked for.

All but the worker processes is real: a target's life, its control, the API and the alerts over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.clock import SystemClock
from orchestrator.daemon.alerts.evaluator import ActiveAlert, Evaluator, Sample
from orchestrator.daemon.alerts.table import METRICS
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.app import create_app
from orchestrator.daemon.api.question import system_fingerprint
from orchestrator.daemon.api.served import ServedModel
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.bootstrap.admin_targets import describe_targets
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.target_life import DaemonGround, TargetLife
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.replicas.shortfall import describe_missing, find_out_reason, list_shortfall
from orchestrator.daemon.control.state import find_group
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import DaemonError, WorkerError, WorkerLost
from orchestrator.protocol.commands import Command, Retune, Submit
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.events import Event, Failed, Progress, Retuned
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, RoundReport
from tests.api.support import READY
from tests.support.config import parse_config
from tests.support.ready import change_ready

CONFIG = (
    "model: {source: 'simulated:toy', adapter: simulated, name: toy%(replicas)s}\ncluster: {max_restarts: 2}\n"
    "store: {directory: '%(base)s/store'}\nstate: {directory: '%(base)s/state'}\n"
)
UNLIKE = "[{}, {exactness: kernel}, {device: SIM.1}]"
POOLS = ("", f", replicas: {UNLIKE}", f", replicas: {{min: 2, max: 3, places: {UNLIKE}}}")
WAYS = (
    {"adapter": "simulated", "exactness": "bit"},
    {"adapter": "onnx_rt", "exactness": "bit"},
    {"adapter": "simulated", "exactness": "kernel"},
)
"""How replicas compute that another plan has."""
ASK = {"model": "toy", "prompt": "x", "max_tokens": 1}
ENDS: dict[str, Failed | WorkerLost] = {
    "killed": WorkerLost("killed by SIGKILL", kind="killed"),
    "its host left": WorkerLost("its host has left", kind="host"),
    "a full disk": Failed("the store is full", restartable=True, kind="storage"),
    "nothing to run it with": Failed("a library is not installed", restartable=False, kind="not_installed"),
}
FAILED_ALERT = "OutriderReplicaFailed"
_SETTLED_S = 0.02
_LOOK_S = 15.0
_T = TypeVar("_T")


@dataclass(eq=False)
class FakeWorker:
    """A worker that becomes ready, answers and ends as it is told."""

    spec: WorkerSpec
    ready: bool = False
    ended: bool = False
    pids: tuple[int, ...] = ()
    said: asyncio.Queue[Event | WorkerLost] = field(default_factory=asyncio.Queue)

    @property
    def where(self) -> str:
        return f"process of {self.spec.name}"

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            delta = Delta(command.request_id, [65], "length")
            self.said.put_nowait(RoundReport([delta], 1, 1, 0, 0, 0, [], 1.0, 1.0, 0.0))
        elif isinstance(command, Retune):
            self.said.put_nowait(Retuned(self._describe()))

    def become_ready(self) -> None:
        self.ready = True
        self.said.put_nowait(self._describe())

    def _describe(self) -> Ready:
        model = self.spec.options["model"]
        way = {name: model[name] for name in ("adapter", "exactness") if name in model}
        return change_ready(READY, **way, device_name=f"device {model['device']}")

    def end(self, how: Failed | WorkerLost) -> None:
        self.ended = True
        if isinstance(how, Failed):
            self.said.put_nowait(how)
            how = WorkerLost("it ended")
        self.said.put_nowait(how)

    async def events(self) -> AsyncIterator[Event]:
        while True:
            item = await self.said.get()
            if isinstance(item, WorkerLost):
                raise item
            yield item

    async def stop(self, grace_s: float) -> None:
        self.ended = True


@dataclass
class FakeCluster:
    """Starts such workers at once, on any host."""

    runtime: str = "local"
    own_node: str = ""
    away: str = ""
    members: None = None
    workers: list[FakeWorker] = field(default_factory=list)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def nodes(self) -> list[str]:
        return [""]

    async def start(self, spec: WorkerSpec) -> Worker:
        self.workers.append(FakeWorker(spec))
        return self.workers[-1]

    def list_live(self) -> list[FakeWorker]:
        return [one for one in self.workers if not one.ended]


def list_told(view: StateView) -> list[tuple[str, str, str]]:
    """Return what is said of each replica."""
    return [(replica.name, replica.phase, describe_missing(replica)) for replica in view.replicas]


class FirstStart(RuleBasedStateMachine):
    """One target from its first start on. `built` numbers plans: each starts other workers."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = TemporaryDirectory()
        self.cluster = FakeCluster()
        self.change: asyncio.Task[list[int]] | None = None
        self.built = 0
        self.looked_s = 0.0
        self.alerts = Evaluator()
        self.sandbox = Sandbox()

    def run(self, work: Awaitable[_T]) -> _T:
        return self.loop.run_until_complete(work)

    @initialize(replicas=st.sampled_from(POOLS))
    def begin(self, replicas: str) -> None:
        self.run(self._begin(replicas))

    async def _begin(self, replicas: str) -> None:
        base, clock = Path(self.directory.name), SystemClock()
        config = parse_config(CONFIG % {"base": base, "replicas": replicas}, base / "cluster.yaml")
        shared = SharedCluster(self.cluster)
        board = PlanBoard([config], base)
        ground = DaemonGround(
            base / "cluster.yaml", base, shared, board, clock, self.sandbox, lambda name, progress: None
        )
        self.life = TargetLife(config, ground)
        await self.life.prepare()
        app = create_app([self.life.offer()], ApiSettings(), clock, sandbox=self.sandbox)
        models: list[ServedModel] = list(app.state.models)
        self.page = app.state.page
        admin = create_admin_app(describe_targets([self.life], models, None), "", "0")
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        self.admin = httpx.AsyncClient(transport=httpx.ASGITransport(admin), base_url="http://127.0.0.1")
        await self.life.start()
        self.waiting = asyncio.create_task(self._wait_ready())

    async def _wait_ready(self) -> None:
        """As orchestrator.daemon.run does."""
        try:
            await self.life.wait_ready()
        except DaemonError as error:
            self.life.give_up(str(error))

    def pick(self, index: int, *, ready: bool) -> FakeWorker | None:
        live = [one for one in self.cluster.list_live() if one.ready is ready]
        return live[index % len(live)] if live else None

    @rule(index=st.integers(0, 3))
    def a_worker_loads(self, index: int) -> None:
        if (worker := self.pick(index, ready=False)) is not None:
            worker.said.put_nowait(Progress("load", 0.5))

    @rule(index=st.integers(0, 3))
    def a_worker_is_ready(self, index: int) -> None:
        if (worker := self.pick(index, ready=False)) is not None:
            worker.become_ready()

    @rule(index=st.integers(0, 3), ready=st.booleans(), how=st.sampled_from(sorted(ENDS)))
    def a_worker_ends(self, index: int, ready: bool, how: str) -> None:
        if (worker := self.pick(index, ready=ready)) is not None:
            worker.end(ENDS[how])

    @precondition(lambda self: self.change is None or self.change.done())
    @rule(ways=st.lists(st.sampled_from(WAYS), min_size=1, max_size=3))
    def hosts_join_or_leave_and_it_is_planned_again(self, ways: list[dict[str, str]]) -> None:
        self.built += 1
        first = next(iter(self.life.control.list_specs().values()))
        model = first.options["model"]
        specs = [
            msgspec.structs.replace(
                first,
                name=f"planned-{number}",
                options={**first.options, "model": {**model, **way}, "built": self.built},
            )
            for number, way in enumerate(ways)
        ]
        self.change = self.loop.create_task(self.life.control.change(specs, [()] * len(specs)))

    @precondition(lambda self: self.waiting.done() and (self.change is None or self.change.done()))
    @rule()
    def it_is_reloaded(self) -> None:
        """As the reloader does, once it serves."""
        known = self.life.control.list_specs()
        task = self.loop.create_task(self.life.control.retune(known, [()] * len(known), (), {}))
        self.run(asyncio.wait([task], timeout=1.0))
        task.cancel()

    @rule()
    def time_passes(self) -> None:
        self.run(asyncio.sleep(0.25))

    @invariant()
    def what_serves_answers_and_what_does_not_says_why(self) -> None:
        if hasattr(self, "waiting"):
            self.run(self._look())

    async def _look(self) -> None:
        await asyncio.sleep(_SETTLED_S)
        control, state = self.life.control, self.life.control._state
        served = any(one.life.served for one in state.replicas.serving)
        names = {one.name for one in (state.replicas.serving if served else state.replicas.list_all()) if one.serving}
        view, ready = control.view(), await self.client.get("/ready")
        health, status = await self.client.get("/health"), (await self.admin.get("/admin/status")).json()
        after = control.view()
        if (after.phase, after.detail) != (view.phase, view.detail):
            await self._look()  # something happened meanwhile
            return
        assert status["phase"] == view.phase
        assert status["detail"] == view.detail
        active = self._list_alerts()
        if names and not self.life.problem:
            assert (view.phase, ready.status_code, health.status_code) == ("ready", 200, 200)
            answer = await asyncio.wait_for(self.client.post("/v1/completions", json=ASK), 20.0)
            assert answer.status_code == 200, answer.text
            await self._look_at_pool()
            return
        assert ready.status_code == 503
        assert view.phase != "ready"
        assert view.detail, "it says why"
        assert view.phase in ready.json()["error"]["message"]
        assert view.detail in ready.json()["error"]["message"]
        assert view.detail in health.text.encode().decode("unicode_escape") or view.phase == "failed"
        assert active, "an alert is on its way"
        if view.phase != "restarting":  # then requests wait
            refused = await self.client.post("/v1/completions", json=ASK)
            assert refused.status_code == 503
            assert view.detail in refused.json()["error"]["message"]

    async def _look_at_pool(self) -> None:
        """See that all agree on which members serve, and that each group that does can be asked for."""
        before = self.life.control.view()
        answers = [await self.client.get("/ready"), await self.client.get("/health")]
        admin = (await self.admin.get("/admin/health")).json()["models"][0]
        (pool,) = (await self.admin.get("/admin/explain")).json()["models"]
        reasons = {active.labels["reason"] for active in self._evaluate() if active.alert.name == FAILED_ALERT}
        view = self.life.control.view()
        if list_told(before) != list_told(view):
            return  # something happened meanwhile
        missing, serving = list_shortfall(view), [replica for replica in view.replicas if replica.phase == "ready"]
        assert (admin["planned"], admin["missing"]) == (len(view.replicas), missing)
        for answer in answers:
            assert answer.json()["replicas"]["missing"] == missing
            assert (answer.json()["status"] == "degraded") == bool(missing)
        assert reasons == {reason for reason in map(find_out_reason, view.replicas) if reason}
        members = [name for group in pool["groups"] for name in group["members"]]
        assert sorted(members) == sorted(replica.name for replica in serving)
        assert len(pool["groups"]) == len({find_group(replica.ready) for replica in serving})
        for fingerprint in {system_fingerprint(replica.ready) for replica in serving}:
            answer = await asyncio.wait_for(
                self.client.post("/v1/completions", json=ASK | {"system_fingerprint": fingerprint}), 20.0
            )
            if answer.status_code != 409:  # its last member may have been replaced meanwhile
                assert (answer.status_code, answer.json()["system_fingerprint"]) == (200, fingerprint)

    def _list_alerts(self) -> list[str]:
        return [one.alert.name for one in self._evaluate()]

    def _evaluate(self) -> list[ActiveAlert]:
        self.looked_s += _LOOK_S
        return self.alerts.evaluate(self.looked_s, [Sample(*one) for one in self.page.read(METRICS)])

    def teardown(self) -> None:
        if hasattr(self, "waiting"):
            self.run(self._close())
        self.sandbox.close()
        self.loop.close()
        self.directory.cleanup()

    async def _close(self) -> None:
        await self.life.end_planning()
        await self.life.close()
        tasks: list[asyncio.Task[Any]] = [self.waiting, *([self.change] if self.change is not None else [])]
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert error is None or isinstance(error, list | WorkerError)
        await self.client.aclose()
        await self.admin.aclose()
        assert not self.cluster.list_live()


TestFirstStart = FirstStart.TestCase
TestFirstStart.settings = settings(max_examples=20, stateful_step_count=10, deadline=None)
