"""What one control plane carries: its cost by replicas, of requests, lost workers, views and metrics; and of a plan.

Workers are not run: their events are made here, as the daemon's supervisor would post them. Times are processor time of
one core. `--drafts` measures as many draft workers as replicas, too, and `--plans` plans: one replica on each device,
over 20 zones. Each is in a process of its own that is stopped after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from device_profiles.cost import StepCost
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.control.actions import Send, StartWorker
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.events import (
    ClusterOpened,
    ControlEvent,
    StreamOpened,
    Woke,
    WorkerEnded,
    WorkerSaid,
    WorkerStarted,
)
from orchestrator.daemon.control.step import step
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import Cluster, WorkerSpec
from orchestrator.protocol.draft_messages import DrafterState, DraftLoad, DraftReady
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.rounds import Delta, Gauges, RequestStats, RoundReport
from policies.planning.placement import plan_placement
from policies.planning.plan import (
    Constraints,
    Device,
    Host,
    Inventory,
    ModelFacts,
    NoPlan,
    Option,
    PlanGoal,
    Role,
    Workload,
)
from tests.api.support import READY
from tests.support.ready import change_ready

SIZES = (1, 8, 100, 1000, 10_000)
_MOST_LIVE = 3000
_PROMPT = list(range(200))


class Clock:
    """Time that moves when the bench says so."""

    now_s = 1.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class Fleet:
    """A control of so many replicas, and of as many draft workers where it has them; and what their workers say."""

    def __init__(self, replicas: int, *, with_drafts: bool = False) -> None:
        self.clock = Clock()
        nowhere = cast(Cluster, type("Nowhere", (), {"runtime": "local"})())
        specs = [
            WorkerSpec(f"r{number}", "no:where", {}, device=f"CUDA:{number % 8}", node=f"h{number // 8}")
            for number in range(replicas)
        ]
        drafts = [WorkerSpec("small", "no:where", {})] if with_drafts else []  # one for each replica
        self.draft_numbers = range(replicas, 2 * replicas if with_drafts else replicas)
        self.control = TargetControl(nowhere, specs, ControlLimits(64, 100_000, 5), self.clock, drafts=drafts)
        self.live: deque[tuple[int, str]] = deque()
        self.opened = 0
        self.start_s = _time(partial(self._start, ClusterOpened()))
        for worker in range(replicas):
            self.post(WorkerSaid(worker, Gauges(0, 0, 4000, 4000, 0, 0, 0, 0)))

    def post(self, event: ControlEvent) -> list[Any]:
        return step(self.control._state, event, self.clock.now_s)

    def _start(self, event: ControlEvent) -> None:
        drafters = ["small"] if self.draft_numbers else []
        due = deque(self.post(event))
        while due:
            action = due.popleft()
            if not isinstance(action, StartWorker):
                continue
            self.clock.now_s += 0.0005
            name, drafts = action.spec.name, action.worker in self.draft_numbers
            host = f"h{(action.worker - self.draft_numbers.start) // 8}" if drafts else action.spec.node
            self.post(WorkerStarted(action.worker, host))
            if drafts:
                state, door = DrafterState(name, "model"), LinkEndpoint([f"tcp:{host}:1"], b"")
                self.post(WorkerSaid(action.worker, DraftReady(name, door, state, 100, "", "auto", 1, 1.0, host)))
            else:
                ready = change_ready(READY, kv_blocks=4000, host=host, drafters=drafters)
                due += self.post(WorkerSaid(action.worker, ready))

    def wake(self) -> None:
        """A second passes."""
        self.clock.now_s += 1.0
        self.post(Woke())

    def tell_load(self, worker: int) -> None:
        """A draft worker says how much it had to do, as each does once a second."""
        self.clock.now_s += 1.0 / len(self.draft_numbers)
        self.post(WorkerSaid(worker, DraftLoad(1, 1, 0.5, 0.0, 1.0)))

    def open_request(self) -> None:
        self.opened += 1
        self.clock.now_s += 0.0005
        submit = Submit(f"q{self.opened}", [self.opened, *_PROMPT], 64)
        for action in self.post(StreamOpened(submit)):
            if isinstance(action, Send) and isinstance(action.command, Submit):
                self.live.append((action.worker, action.command.request_id))

    def end_request(self) -> None:
        worker, key = self.live.popleft()
        delta = Delta(key, list(range(64)), "length", RequestStats(201, 64, 40, 40, 30, 1.0, 10.0))
        self.post(WorkerSaid(worker, RoundReport([delta], 1, 2, 1, 1, 1, [1], 10.0, 9.0, 0.1)))

    def lose_worker(self, worker: int) -> None:
        """One worker dies and another one comes in its place."""
        self.clock.now_s += 120.0
        self._start(WorkerEnded(worker, "exit code 1", "crashed"))


def _time(act: Callable[[], object]) -> float:
    """Return the processor seconds that something takes."""
    begun = time.process_time()
    act()
    return time.process_time() - begun


def measure_fleet(replicas: int, requests: int) -> dict[str, float]:
    """Return what events of a fleet cost, with three in four of its places taken, up to _MOST_LIVE streams."""
    fleet = Fleet(replicas)
    live = max(1, min(_MOST_LIVE, 3 * replicas))
    for _ in range(live):
        fleet.open_request()
    open_s = report_s = 0.0
    for _ in range(requests):
        open_s += _time(fleet.open_request)
        report_s += _time(fleet.end_request)
    losses = 20
    lost_s = sum(_time(partial(fleet.lose_worker, number % replicas)) for number in range(losses))
    fleet.clock.now_s += 5.0
    view_s = _time(partial(fleet.control.views.build_view, fleet.clock.now_s))
    metrics = Metrics(fleet.control, fleet.clock)
    metrics.render()
    fleet.clock.now_s += 5.0
    refresh_s = _time(metrics.refresh)
    return {
        "replicas": replicas,
        "start_ms": 1e3 * fleet.start_s,
        "open_us": 1e6 * open_s / requests,
        "report_us": 1e6 * report_s / requests,
        "lost_worker_us": 1e6 * lost_s / losses,
        "view_ms": 1e3 * view_s,
        "scrape_ms": 1e3 * _time(metrics.render),
        "scrape_refresh_ms": 1e3 * refresh_s,
        "requests_per_s": requests / (open_s + report_s),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_drafts(replicas: int) -> dict[str, float]:
    """Return what a draft worker for each of so many replicas costs: the start of all, a worker that tells its load,
    and one that is lost and comes again."""
    fleet = Fleet(replicas, with_drafts=True)
    settle_s = _time(fleet.wake)
    views = fleet.control._state.drafts.views()
    if any(len(one.targets) != 1 for one in views):
        raise SystemExit("the draft workers are not spread over the replicas")
    load_s = sum(_time(partial(fleet.tell_load, worker)) for worker in fleet.draft_numbers)
    lost = fleet.draft_numbers[:20]
    lost_s = sum(_time(partial(fleet.lose_worker, worker)) for worker in lost)
    return {
        "replicas": replicas,
        "start_ms": 1e3 * (fleet.start_s + settle_s),
        "load_us": 1e6 * load_s / replicas,
        "lost_draft_us": 1e6 * lost_s / len(lost),
    }


def _run_apart(measure: Callable[..., Any], *values: Any, limit_s: float = 600.0) -> Any:
    """Return what a measurement gives in a process of its own; None where it takes too long."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(measure, values).get(limit_s)
        except multiprocessing.TimeoutError:
            return None


def measure_plan(devices: int, kinds: int = 4) -> float:
    """Return the seconds that a plan over so many devices of so many kinds takes, 8 to a host, in 20 zones."""
    model = ModelFacts("target", 32, 4096.0)
    hosts = tuple(Host(f"h{number}", f"zone-{number % 20}", 64, 0.0) for number in range((devices + 7) // 8))
    cost = StepCost((1.0, 4.0, 16.0), (8.0, 9.0, 12.0))
    owned = tuple(
        Device(
            f"{hosts[number // 8].name}/gpu-{number % 8}",
            hosts[number // 8].name,
            "gpu",
            f"kind-{number % kinds}",
            80 << 30,
        )
        for number in range(devices)
    )
    options = tuple(
        Option(
            f"kind-{kind}",
            Role.TARGET,
            "target",
            "torch",
            "as_file",
            cost.scale_by(1.0 + kind / kinds),
            400 << 20,
            1e5,
            2,
        )
        for kind in range(kinds)
    )
    load = Workload(model, (), 4 * devices, 600, 300, depth_bound=4)
    goal = PlanGoal(load, Constraints(max_replicas=devices, min_replicas=devices))

    def plan() -> None:
        try:
            plan_placement(Inventory(hosts, owned, options, ()), goal)
        except NoPlan as error:
            raise SystemExit(f"no plan over {devices} devices: {error}") from error

    return _time(plan)


def read_processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--plans", type=int, nargs="*", default=[], metavar="DEVICES")
    parser.add_argument("--kinds", type=int, default=4, help="of devices in plans")
    parser.add_argument("--drafts", type=int, nargs="*", default=[], metavar="REPLICAS")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="of plans and drafts")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = [_run_apart(measure_fleet, count, asked.requests) for count in asked.replicas]
    plans = {count: _run_apart(measure_plan, count, asked.kinds, limit_s=asked.limit) for count in asked.plans}
    drafts = [_run_apart(measure_drafts, count, limit_s=asked.limit) for count in asked.drafts]
    if asked.json:
        print(json.dumps({"processor": read_processor_name(), "fleets": found, "drafts": drafts, "plan_s": plans}))
        return
    print(read_processor_name())
    for name in found[0] if found else ():
        print(f"{name:>16}" + "".join(f"{one[name]:>12,.1f}" for one in found))
    for count, one in zip(asked.drafts, drafts, strict=True):
        told = ", ".join(f"{name} {value:,.1f}" for name, value in one.items()) if one is not None else "not in time"
        print(f"{count:,} draft workers: {told}")
    for count, took_s in plans.items():
        print(f"a plan over {count:,} devices: " + (f"{took_s:.2f} s" if took_s is not None else "not in time"))


if __name__ == "__main__":
    main()
