"""What control knows of the target, folded from the worker's events. No I/O, no clock of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Final

from orchestrator.daemon.control.port import Hindrance, ReplicaView, StateView, Totals
from orchestrator.protocol.events import Event, Progress
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, RoundReport

STARTING: Final = "starting"
READY: Final = "ready"
UNLOADED: Final = "unloaded"
"""Of a model that a request loads."""
RESTARTING: Final = "restarting"
DRAINING: Final = "draining"
RESTING: Final = "resting"
FAILED: Final = "failed"


def tell_nobody() -> None:
    """Nobody wants to know of changes."""


class RunningTotals:
    """Totals that rounds are added to: a `Totals` is made of them when somebody asks."""

    __slots__ = ("_before", "_by_drafter", "_counts", "_positions", "_summed")

    def __init__(self, before: Totals) -> None:
        self._before = before
        self._summed: Totals | None = before
        self._counts = [0, 0, 0, 0, 0]
        self._positions: list[int] = []
        self._by_drafter: dict[str, tuple[int, int]] = {}

    def add_round(self, done: RoundReport, delivered: int) -> None:
        """Add a round. `delivered`: its tokens that went to a live stream."""
        self._summed = None
        counts, positions = self._counts, self._positions
        counts[0] += done.drafts
        counts[1] += done.drafted
        counts[2] += done.accepted
        counts[3] += delivered
        counts[4] += 1
        per_position = done.accepted_per_position
        if len(per_position) > len(positions):
            positions.extend([0] * (len(per_position) - len(positions)))
        for index, accepted in enumerate(per_position):
            positions[index] += accepted
        for name, (drafted, accepted) in done.by_drafter.items():
            known = self._by_drafter.get(name, (0, 0))
            self._by_drafter[name] = (known[0] + drafted, known[1] + accepted)

    def sum_up(self) -> Totals:
        if self._summed is not None:
            return self._summed
        drafts, drafted, accepted, generated, rounds = self._counts
        added = Totals(
            drafts, drafted, accepted, tuple(self._positions), generated, rounds, by_drafter=self._by_drafter
        )
        self._summed = add_totals([self._before, added])
        return self._summed


def fold_round(totals: Totals, round_: RoundReport, delivered: int) -> Totals:
    """Return the totals with one round added. `delivered`: its tokens that went to a live stream."""
    running = RunningTotals(totals)
    running.add_round(round_, delivered)
    return running.sum_up()


def _add_positions(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def _add_counts(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for drafter_counts in counts:
        for name, (drafted, accepted) in drafter_counts.items():
            known = sums.get(name, (0, 0))
            sums[name] = (known[0] + drafted, known[1] + accepted)
    return sums


_MODEL = ("model_digest", "vocabulary_fingerprint")
_FORMATS = ("adapter", "weights", "activations", "kv_cache")
_EXACTNESS, _BITS = "exactness", "class_fingerprint"
_DEVICE = ("device_name", "numerical_class", "shapes")
# A start that takes so many times as long as the last one, or as its plan says, is late, but never before a minute. Not
# tuned: machines that are busy took up to twice as long.
_LATE_TIMES, _LATE_AFTER_S = 3.0, 60.0
# Where nobody knows how long it takes: the conversion of 1.5B took 160 to 270 s on two busy cores. Not tuned.
_LATE_UNKNOWN_S = 900.0
_GROUP_DIGITS = 12  # as of a system_fingerprint: 48 bits tell the groups of any fleet apart


def _list_facts(ready: Ready) -> dict[str, str]:
    model, precision = ready.model, ready.precision
    formats = (ready.device.adapter, precision.weights, precision.activations, precision.kv_cache)
    shapes = f"static {model.context_tokens}" if ready.device.static_widths else "dynamic"
    bits = (precision.exactness, precision.class_fingerprint)
    device = (ready.device.full_name, precision.numerical_class, shapes)
    values = (model.digest, model.vocabulary_fingerprint, *formats, *bits, *device)
    return dict(zip((*_MODEL, *_FORMATS, _EXACTNESS, _BITS, *_DEVICE), values, strict=True))


def _list_decisive(facts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of what decides a replica's tokens: the bits of its numerical class where they were measured,
    whatever computes them; else the formats that it computes in, and what computes."""
    if facts[_BITS]:
        return (*_MODEL, _EXACTNESS, _BITS) if facts[_EXACTNESS] == "bit" else (*_MODEL, _EXACTNESS, *_FORMATS, _BITS)
    return (*_MODEL, _EXACTNESS, *_FORMATS, *_DEVICE)


def find_group(ready: Ready | None) -> str:
    """Return the name of the group of equal bits of a replica: all say the same tokens. "" where it is not known."""
    if ready is None:
        return ""
    facts = _list_facts(ready)
    decisive = "\0".join(f"{name} {facts[name]}" for name in _list_decisive(facts))
    return hashlib.sha256(decisive.encode()).hexdigest()[:_GROUP_DIGITS]


def unlike(ready: Ready, other: Ready) -> str:
    """Return in what a replica differs from another so that its tokens may too; "" where it does not."""
    mine, theirs = _list_facts(ready), _list_facts(other)
    return _describe_difference(mine, theirs, (*_list_decisive(mine), *_list_decisive(theirs)))


def compare_models(ready: Ready, other: Ready) -> str:
    """Return in what a replica's model differs from another's: no group serves beside it then. "" where it does not. A
    worker that has no weights may not know their digest."""
    mine, theirs = _list_facts(ready), _list_facts(other)
    return _describe_difference(mine, theirs, [name for name in _MODEL if mine[name] and theirs[name]])


def _describe_difference(mine: Mapping[str, str], theirs: Mapping[str, str], names: Iterable[str]) -> str:
    unlike = [name for name in dict.fromkeys(names) if mine[name] != theirs[name]]
    return ", ".join(f"{name} {mine[name]} instead of {theirs[name]}" for name in unlike)


def effective_places(ready: Ready, gauges: Gauges | None) -> int:
    """Return how many streams a worker decodes at a time: fewer than it has slots where an objective asks for it."""
    slo = gauges.slo if gauges is not None else None
    return ready.slots if slo is None else min(ready.slots, slo.max_running)


@dataclass(slots=True)
class TargetState:
    """The target's phase, and the last that its worker told. `ready` outlives a lost worker; `serving`: its worker is
    ready. `due_s`: when the next worker is started, or was; `start_s`: how long the last start took. `spent`: it was
    lost too often of late. `hindrance`: see ReplicaView; that it is slow is found when it is looked at. `on_change` is
    called with each change that routing has to know of."""

    name: str
    detail: str = "the worker is being started"
    where: str = ""
    spent: bool = False
    due_s: float = 0.0
    start_s: float = 0.0
    hindrance: Hindrance = ""
    on_change: Callable[[], object] = tell_nobody
    phase: str = STARTING
    serving: bool = False
    ready: Ready | None = None
    gauges: Gauges | None = None
    _running: RunningTotals = field(default_factory=lambda: RunningTotals(Totals()), init=False)

    @property
    def totals(self) -> Totals:
        return self._running.sum_up()

    @totals.setter
    def totals(self, totals: Totals) -> None:
        self._running = RunningTotals(totals)

    @property
    def back_s(self) -> float:
        """When its worker can be expected to serve, by the clock, as its last start went."""
        return self.due_s + self.start_s

    def observe_event(self, event: Event, delivered: int = 0) -> None:
        """Fold one event of the current worker. `delivered`: see fold_round."""
        match event:
            case RoundReport():
                self._running.add_round(event, delivered)
            case Gauges():
                self.gauges = event
                self.on_change()
            case Ready():
                self.ready, self.serving, self.spent = event, True, False
                self.phase, self.detail, self.hindrance = READY, "", ""
                self.on_change()
            case Progress():
                self.detail = format_progress(event)
            case _:
                pass

    def replace_ready(self, ready: Ready) -> None:
        """The same worker is another one by now: it decodes by other options."""
        self.ready = ready
        self.on_change()

    def mark_worker_lost(self, cause: str) -> None:
        """The worker ended. What it said about load is void; a first start goes on being one."""
        self.serving = False
        self.gauges = None
        self.detail = cause
        if self.phase == READY:
            self.phase = RESTARTING
        self.on_change()

    def mark_restarting(self, detail: str, due_s: float, *, spent: bool, hindrance: Hindrance = "") -> None:
        self.totals = replace(self.totals, restarts=self.totals.restarts + 1)
        self.detail, self.due_s, self.spent, self.hindrance = detail, due_s, spent, hindrance

    def mark_started(self, where: str, now_s: float) -> None:
        """A worker's process is there; whether the server answers that it asks is not known."""
        self.where, self.due_s = where, now_s
        if self.hindrance == "host":
            self.hindrance = ""

    def mark_unloaded(self, why: str) -> None:
        """There is no worker, and the first request that asks for the model has one started."""
        self.phase, self.detail, self.serving, self.gauges = UNLOADED, why, False, None
        self.hindrance, self.due_s = "", 0.0
        self.on_change()

    def mark_loading(self) -> None:
        self.phase, self.detail = STARTING, "the worker is being started"
        self.on_change()

    def mark_failed(self, cause: str, hindrance: Hindrance = "") -> None:
        self.phase, self.detail, self.serving, self.hindrance = FAILED, cause, False, hindrance
        self.on_change()

    def view(
        self, engine: int, streams: int, silent_s: float = 0.0, now_s: float = 0.0, expected_s: float = 0.0
    ) -> ReplicaView:
        """Return it as it is. `expected_s`: how long a first start is expected to take; 0: nobody knows."""
        back_in_s = 0.0 if self.serving else max(0.0, self.back_s - now_s)
        named = (engine, self.name, self.phase, self.detail, self.where or self.name)
        figures = (self.ready, self.gauges, self._running.sum_up(), streams)
        hindrance = self.hindrance or ("slow" if self._is_late(now_s, self.start_s or expected_s) else "")
        return ReplicaView(*named, *figures, silent_s if streams else 0.0, self.spent, back_in_s, hindrance)

    def _is_late(self, now_s: float, expected_s: float) -> bool:
        if self.serving or self.phase == FAILED or not self.due_s:
            return False
        bound_s = max(_LATE_AFTER_S, _LATE_TIMES * expected_s) if expected_s else _LATE_UNKNOWN_S
        return now_s - self.due_s > bound_s


def format_progress(progress: Progress) -> str:
    return progress.stage if progress.fraction < 0 else f"{progress.stage} {progress.fraction:.0%}"


def whole(replicas: Sequence[ReplicaView], runtime: str, *, streams: int, uptime_s: float, draining: bool) -> StateView:
    """Return the state of all replicas together. Draining hides every phase but failed."""
    phases = {replica.phase for replica in replicas}
    phase = next(phase for phase in (READY, RESTARTING, STARTING, UNLOADED, FAILED) if phase in phases)
    first = next(replica for replica in replicas if replica.phase == phase)
    hidden = draining and phase != FAILED
    detail = f"{streams} streams are being finished" if hidden else _detail(first, replicas)
    return StateView(
        phase=DRAINING if hidden else phase,
        detail=detail,
        worker=", ".join(replica.worker for replica in replicas),
        runtime=runtime,
        ready=next((replica.ready for replica in (first, *replicas) if replica.ready is not None), None),
        gauges=add_gauges([replica.gauges for replica in replicas if replica.gauges is not None]),
        totals=add_totals([replica.totals for replica in replicas]),
        streams=streams,
        uptime_s=uptime_s,
        replicas=tuple(replicas),
    )


def _detail(first: ReplicaView, replicas: Sequence[ReplicaView]) -> str:
    if len(replicas) == 1 or all(replica.phase == READY for replica in replicas):
        return first.detail
    others = [
        f"replica {replica.engine} is {replica.phase}{f': {replica.detail}' * bool(replica.detail)}"
        for replica in replicas
        if replica.phase != READY
    ]
    serving = sum(replica.phase == READY for replica in replicas)
    return f"{serving} of {len(replicas)} replicas serve; {'; '.join(others)}"


def add_totals(totals: Sequence[Totals]) -> Totals:
    if len(totals) == 1:
        return totals[0]
    return Totals(
        drafts=sum(total.drafts for total in totals),
        drafted=sum(total.drafted for total in totals),
        accepted=sum(total.accepted for total in totals),
        accepted_per_position=reduce(_add_positions, (total.accepted_per_position for total in totals), ()),
        generated=sum(total.generated for total in totals),
        rounds=sum(total.rounds for total in totals),
        restarts=sum(total.restarts for total in totals),
        by_drafter=_add_counts([total.by_drafter for total in totals]),
    )


_NOT_COUNTS: Final = ("drafters", "tolerance_deltas", "low_acceptance", "slo", "memory_bound", "corrupt", "server")


def add_gauges(gauges: Sequence[Gauges]) -> Gauges | None:
    """Return the sums; drafters, tolerances and warnings one replica after the other; objectives and bounds are each
    replica's own. None where no replica says anything."""
    if len(gauges) < 2:
        return gauges[0] if gauges else None
    names = [name for name in Gauges.__struct_fields__ if name not in _NOT_COUNTS]
    read = attrgetter(*names)
    counts: dict[str, Any] = dict(zip(names, map(sum, zip(*map(read, gauges), strict=True)), strict=True))
    drafters = [drafter for gauge in gauges for drafter in gauge.drafters]
    deltas = {kind: delta for gauge in gauges for kind, delta in gauge.tolerance_deltas.items()}
    warnings = [warning for gauge in gauges for warning in gauge.low_acceptance]
    corrupt = list(dict.fromkeys(file for gauge in gauges for file in gauge.corrupt))
    return Gauges(**counts, drafters=drafters, tolerance_deltas=deltas, low_acceptance=warnings, corrupt=corrupt)
