"""The same run, simulated: the same requests at the same times, by profiles and recordings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from device_profiles.cost import StepCost
from orchestrator.daemon.control.streams.admission import ControlLimits
from outrider_lab.bench.validation.real import RealRun, RunFigures, summarise_times
from outrider_lab.bench.validation.requests import RunRequests
from outrider_lab.bench.validation.runs import ValidationRun
from outrider_lab.replay.recorded import Costs
from outrider_lab.simulation.courses import CourseBook
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.fleet import Fleet, PlacedReplica, ReplicaKind
from outrider_lab.simulation.processes import Timing
from outrider_lab.simulation.trace import TracedRequest
from outrider_lab.simulation.world import World
from policies.serving.failover.standby import FailoverRules

_KV_TOKENS = 40_000
_START_WITHIN_S = 600.0
_MOST_PACE = 1.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a place is known by before its runs: `cost` of its workers' rounds, `draft_ms` that drafting from the text
    takes, `load_s` of a worker, and `timing`. With the daemon and its clients on the same cores, rounds take `pace`
    times as long as the profile says and `round_ms` more, and prompts `prefill_pace` times as long and
    `prompt_ms` more. `alone`: the share of that which a round takes while no other worker runs. `slowness`: how many
    times as long as usual everything takes. `group`: of equal bits."""

    cost: StepCost
    draft_ms: float
    load_s: float
    timing: Timing
    places: int = 16
    max_itl_ms: float = 200.0
    max_depth: int = 12
    pace: float = 1.0
    round_ms: float = 0.0
    prefill_pace: float = 1.0
    prompt_ms: float = 0.0
    alone: float = 1.0
    slowness: float = 1.0
    group: str = "worker"

    def slow_down(self, factor: float) -> Calibration:
        """Return it on a machine that takes so many times as long."""
        timing = replace(self.timing, spawn_s=factor * self.timing.spawn_s)
        return replace(self, slowness=factor, load_s=factor * self.load_s, timing=timing)

    @property
    def real_cost(self) -> StepCost:
        """What rounds take there."""
        scaled = self.cost.scale_by(self.pace)
        prefill = (self.cost.prefill or self.cost).scale_by(self.prefill_pace)
        prefill = replace(prefill, row_ms=tuple(max(1.0, ms + self.prompt_ms) for ms in prefill.row_ms))
        whole = replace(scaled, row_ms=tuple(max(1.0, ms + self.round_ms) for ms in scaled.row_ms), prefill=prefill)
        return whole.scale_by(self.slowness)


def predict_run(
    run: ValidationRun,
    requests: RunRequests,
    members: Sequence[Calibration],
    *,
    real: RealRun | None,
    slo_ms: float,
) -> RunFigures:
    """Return what the simulator says of a run on these workers. Of the `real` one it takes when requests came in an
    open loop, and when something went wrong; None: nothing did."""
    kinds = {one: _build_kind(run, requests, one) for one in members}
    hosts = [f"host-{number}" if run.place == "three hosts" else "here" for number in range(1, len(members) + 1)]
    placed = tuple(
        PlacedReplica(f"target-{number}", kinds[one], host, "CPU", machine="this")
        for number, (one, host) in enumerate(zip(members, hosts, strict=True), 1)
    )
    waiting: deque[TracedRequest] = deque()

    def send_next(_: str) -> None:
        """A client of a closed loop sends its next request when one has ended."""
        if waiting:
            world.send(waiting.popleft())

    limits = ControlLimits(members[0].places, 256, 5, failover=FailoverRules(other_bits="streams"))
    world = World(Fleet(placed, len(placed)), limits, members[0].timing, ended=send_next, in_order=True)
    world.open()
    world.start(_START_WITHIN_S)
    traced = _trace(requests, real.sent_s if real is not None and not run.concurrency else ())
    faults = []
    if run.fault and real is not None:
        part = "host" if run.fault in ("kill_host", "cut_link") else "target"
        faults.append(Fault(at_s=real.fault_s, kind=run.fault, name=f"{part}-{len(members)}"))
    together = run.concurrency or len(traced)
    waiting.extend(traced[together:])
    world.play(traced[:together], faults)
    return _summarise(world, slo_ms)


def _build_kind(run: ValidationRun, requests: RunRequests, known: Calibration) -> ReplicaKind:
    cost = known.real_cost
    costs = Costs(cost, draft_ms=known.draft_ms if run.speculates else 0.0, change_ms=cost.changing_ms)
    # Each request goes on along its own recording: the course's number is the request's.
    book = CourseBook(requests.recorded, costs, most=known.max_depth if run.speculates else 0)
    return ReplicaKind(
        known.group,
        costs,
        book,
        places=known.places,
        kv_tokens=_KV_TOKENS,
        max_itl_ms=known.max_itl_ms,
        load_s=known.load_s,
        max_depth=known.max_depth if run.speculates else 0,
        alone=known.alone,
        group=known.group,
    )


def _trace(requests: RunRequests, times_s: Sequence[float]) -> list[TracedRequest]:
    times_s = times_s or [0.0] * len(requests.texts)
    rows = zip(times_s, requests.prompt_tokens, requests.output_tokens, requests.texts, strict=True)
    return [TracedRequest(at_s, prompt, output, category=text.category) for at_s, prompt, output, text in rows]


def _summarise(world: World, slo_ms: float) -> RunFigures:
    found = world.outcomes
    return replace(
        summarise_times(found.arrivals_s, found.firsts_s, found.ends_s, found.tokens, slo_ms),
        tokens_per_round=_count_round_tokens(world),
        pause_ms=float(np.mean(found.pauses_ms)) if found.pauses_ms else None,
        changed_group=found.changed_group,
    )


def _count_round_tokens(world: World) -> float:
    sequences = sum(use.sequences for use in world.uses.values())
    return sum(use.tokens for use in world.uses.values()) / sequences if sequences else 0.0


def calibrate_rounds(before: Calibration, pairs: Sequence[tuple[RunFigures, RunFigures]]) -> Calibration:
    """Return a calibration by plain runs under two loads that are not among those that are compared, each with what was
    simulated of it: a line through both TPOTs."""
    (real, simulated), (later, further) = pairs[0], pairs[-1]
    spread = further.tpot_ms - simulated.tpot_ms
    pace = (later.tpot_ms - real.tpot_ms) / spread if spread > 0.0 else real.tpot_ms / simulated.tpot_ms
    pace = min(_MOST_PACE, max(1.0 / _MOST_PACE, pace))
    left_ms = [one.tpot_ms - pace * other.tpot_ms for one, other in (pairs[0], pairs[-1])]
    return replace(before, pace=pace, round_ms=sum(left_ms) / len(left_ms))


def calibrate_prompts(before: Calibration, prompts: Sequence[int], ttfts_ms: Sequence[float]) -> Calibration:
    """Return a calibration by the times to the first token of requests that came one at a time: a line over what the
    profile says of their prompts, whose relative errors are least: a long prompt counts no more than a short one. Each
    prompt's forward has other rows than the one before."""
    predicted = [before.cost.prefill_ms(tokens) for tokens in prompts]
    slope, base = np.polyfit(predicted, ttfts_ms, 1, w=[1.0 / ms for ms in ttfts_ms])
    beside_ms = before.timing.intake_ms + before.timing.deliver_ms + before.pace * before.cost.changing_ms
    return replace(before, prefill_pace=float(slope), prompt_ms=float(base) - beside_ms)
