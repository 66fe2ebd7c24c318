"""The same run, simulated: the same requests at the same times, by profiles and recordings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from device_profiles.cost import StepCost
from device_profiles.units import MS_PER_S
from orchestrator.bench.validation.real import RealRun, RunFigures
from orchestrator.bench.validation.requests import RunRequests
from orchestrator.bench.validation.runs import ValidationRun
from orchestrator.control.admission import ControlLimits
from orchestrator.simulation.courses import CourseBook
from orchestrator.simulation.faults import Fault
from orchestrator.simulation.fleet import Fleet, PlacedReplica, ReplicaKind
from orchestrator.simulation.processes import Timing
from orchestrator.simulation.trace import TracedRequest
from orchestrator.simulation.world import World
from policies.speculation.replay.recorded import Costs

_KV_TOKENS = 40_000
_START_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a place is known by before its runs: `cost` of its workers' rounds, `draft_ms` that drafting from the text
    takes, `load_s` of a worker, and `timing`. `pace`: how many times as long rounds take as the profile says, with the
    daemon and its clients on the same cores."""

    cost: StepCost
    draft_ms: float
    load_s: float
    timing: Timing
    places: int = 16
    max_itl_ms: float = 200.0
    max_depth: int = 12
    pace: float = 1.0
    rtt_ms: float = 0.0


def predict_run(
    run: ValidationRun,
    requests: RunRequests,
    known: Calibration,
    workers: int,
    *,
    real: RealRun | None,
    slo_ms: float,
) -> RunFigures:
    """Return what the simulator says of a run. Of the `real` one it takes when requests came in an open loop, and when
    something went wrong; None: nothing did."""
    world, sent = build_world(run, requests, known, workers)
    world.open()
    world.start(_START_WITHIN_S)
    traced = _trace(requests, real.sent_s if real is not None and not run.concurrency else ())
    faults = []
    if run.fault and real is not None:
        name = f"host-{workers}" if run.fault in ("kill_host", "cut_link") else f"target-{workers}"
        faults.append(Fault(at_s=real.fault_s, kind=run.fault, name=name))
    if run.concurrency:
        waiting = deque(traced)
        sent.waiting = waiting
        first = [replace_arrival(waiting.popleft()) for _ in range(min(run.concurrency, len(waiting)))]
        world.play(first, faults)
    else:
        world.play(traced, faults)
    return _summarise(world, slo_ms)


class _Clients:
    """Clients of a closed loop: each sends its next request when one has ended."""

    def __init__(self) -> None:
        self.waiting: deque[TracedRequest] = deque()
        self.world: World | None = None

    def send_next(self, _: str) -> None:
        """A request has ended."""
        if self.waiting and self.world is not None:
            self.world.send(self.waiting.popleft())


def build_world(run: ValidationRun, requests: RunRequests, known: Calibration, workers: int) -> tuple[World, _Clients]:
    """Return the place of a run, simulated, and its clients."""
    cost = known.cost.scale_by(known.pace)
    costs = Costs(cost, draft_ms=known.draft_ms if run.speculates else 0.0, change_ms=cost.changing_ms)
    # Each request goes on along its own recording: the course's number is the request's.
    book = CourseBook(requests.recorded, costs, most=known.max_depth if run.speculates else 0)
    kind = ReplicaKind(
        "worker",
        costs,
        book,
        places=known.places,
        kv_tokens=_KV_TOKENS,
        max_itl_ms=known.max_itl_ms,
        load_s=known.load_s,
        max_depth=known.max_depth if run.speculates else 0,
    )
    placed = tuple(
        PlacedReplica(f"target-{number}", kind, f"host-{number}" if run.place == "three hosts" else "here", "CPU")
        for number in range(1, workers + 1)
    )
    clients = _Clients()
    limits = ControlLimits(known.places, 256, 5)
    world = World(Fleet(placed, workers), limits, known.timing, ended=clients.send_next, in_order=True)
    clients.world = world
    return world, clients


def _trace(requests: RunRequests, times_s: Sequence[float]) -> list[TracedRequest]:
    return [
        TracedRequest(
            times_s[number] if times_s else 0.0,
            requests.prompt_tokens[number],
            requests.output_tokens[number],
            category=requests.texts[number].category,
        )
        for number in range(len(requests.texts))
    ]


def replace_arrival(one: TracedRequest) -> TracedRequest:
    """Return a request that comes at once."""
    return TracedRequest(0.0, one.prompt_tokens, one.output_tokens, category=one.category)


def _summarise(world: World, slo_ms: float) -> RunFigures:
    found = world.outcomes
    arrivals, firsts, ends = (np.frombuffer(one) for one in (found.arrivals_s, found.firsts_s, found.ends_s))
    tokens = np.array(found.tokens)
    span_s = float(ends.max() - arrivals.min())
    several = tokens > 1
    tpots = ((ends - firsts)[several] / (tokens[several] - 1)) * MS_PER_S
    latencies = (ends - arrivals) * MS_PER_S
    return RunFigures(
        output_tok_s=float(tokens.sum()) / span_s,
        ttft_ms=float(np.median((firsts - arrivals) * MS_PER_S)),
        tpot_ms=float(np.median(tpots)),
        e2e_ms=float(np.median(latencies)),
        e2e_p90_ms=float(np.percentile(latencies, 90)),
        goodput_per_s=float((tpots <= slo_ms).sum()) / span_s,
        pause_ms=float(np.mean(found.pauses_ms)) if found.pauses_ms else None,
    )


def calibrate(before: Calibration, real: RunFigures, simulated: RunFigures) -> Calibration:
    """Return a calibration by one real run that is not among those that are compared: how much longer rounds take than
    their profile says, and how long the way to the worker and back is."""
    pace = before.pace * real.tpot_ms / simulated.tpot_ms
    way_ms = max(0.5, before.timing.intake_ms + real.ttft_ms - simulated.ttft_ms * pace / before.pace)
    return replace(before, pace=pace, timing=replace(before.timing, intake_ms=way_ms))
