"""What control says of plan, replicas, health, devices and drafts, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import Gauge

from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.api.metrics.series import Engine, PerWorker, Registered
from orchestrator.daemon.control.port import (
    DeviceView,
    DraftStoreView,
    PlanView,
    RecentOutputsView,
    ResidencyView,
    ScaleView,
    StateView,
)
from orchestrator.daemon.control.replicas.shortfall import count_out, list_wanted
from orchestrator.protocol.draft_messages import RemoteState


class PlanSeries:
    """No series where nothing was left to a plan."""

    def __init__(self, make: Registered) -> None:
        self._predicted = make.gauge("plan_predicted_tokens_per_second", "Output tokens a second that it predicts.")
        self._measured = make.gauge("plan_measured_tokens_per_second", "Output tokens a second of rounds that decode.")
        self._ratio = make.gauge("plan_drift_ratio", "Measured by predicted time of rounds, a running mean.")
        self._factor = make.gauge(
            "plan_misprediction_factor", "The drift ratio or a correction, or 1 by it, where above 1."
        )
        self._moves = make.counter("plan_moves", "Times that workers were replaced for another plan.")
        self._cost = make.gauge(
            "plan_predicted_cost_per_million_tokens", "Cost of a million output tokens that it predicts.", "currency"
        )
        self._joules = make.gauge("plan_predicted_joules_per_token", "Energy of an output token that it predicts.")
        self._moved = 0

    def refresh(self, of: Engine, plan: PlanView) -> None:
        self._predicted.labels(*of).set(plan.predicted_tokens_per_s)
        self._measured.labels(*of).set(plan.measured_tokens_per_s)
        self._ratio.labels(*of).set(plan.ratio)
        known = [ratio for ratio in (plan.ratio, *plan.corrections) if ratio > 0.0]
        self._factor.labels(*of).set(max((max(ratio, 1.0 / ratio) for ratio in known), default=1.0))
        for gauge in (self._cost, self._joules):
            gauge.clear()  # where it is not known there is no series
        if plan.predicted_cost_per_million_tokens:
            self._cost.labels(*of, plan.currency).set(plan.predicted_cost_per_million_tokens)
        if plan.predicted_joules_per_token:
            self._joules.labels(*of).set(plan.predicted_joules_per_token)
        self._moves.labels(*of).inc(plan.moves - self._moved)
        self._moved = plan.moves


class ScaleSeries:
    """No series where the number of replicas does not follow load."""

    def __init__(self, make: Registered) -> None:
        self._wanted = make.gauge("replicas_wanted", "Replicas that load asks for.")

    def refresh(self, of: Engine, scaling: ScaleView) -> None:
        self._wanted.labels(*of).set(scaling.wanted)


class ResidencySeries:
    """No series of a model that is loaded at the start and stays."""

    def __init__(self, make: Registered) -> None:
        self._state = make.gauge("model_state", "1 for the state that a model is in.", "state")
        self._waiting = make.gauge("model_waiting_requests", "Requests that wait for their model to be loaded.")
        self._load_s = make.gauge("model_load_seconds", "Time of the last load of a model that requests load.")
        self._loads = make.counter("model_loads", "Loads of a model that requests load.")
        self._failed = make.counter("model_failed_loads", "Loads of such a model that came to nothing.")
        self._unloads = make.counter("model_unloads", "Times that such a model was unloaded.", "why")
        self._loads_counted = (0, 0)
        self._unloads_counted: Counter[str] = Counter()

    def count_loads(self, of: Engine, residency: ResidencyView) -> None:
        self._state.clear()
        self._state.labels(*of, residency.state).set(1)
        self._waiting.labels(*of).set(residency.waiting)
        if residency.loads:
            self._load_s.labels(*of).set(residency.load_s)
        self._loads.labels(*of).inc(residency.loads - self._loads_counted[0])
        self._failed.labels(*of).inc(residency.failed_loads - self._loads_counted[1])
        self._loads_counted = (residency.loads, residency.failed_loads)
        for why, count in residency.unloads.items():
            self._unloads.labels(*of, why).inc(count - self._unloads_counted[why])
        self._unloads_counted = Counter(residency.unloads)


class HealthSeries:
    """No series of a part that nothing went wrong with."""

    def __init__(self, make: Registered) -> None:
        self._parts = make.gauge("part_health", "1 for the state that a part is in.", "kind", "name", "state")
        self._wanted = make.gauge("replicas_planned", "Replicas that are to serve.")
        self._ready = make.gauge("replicas_ready", "Replicas that serve.")
        self._out = make.gauge("replicas_failed", "Planned replicas that do not serve, and will not soon.", "reason")
        self._standbys = make.gauge("standbys", "Standbys that are loaded and do not serve.")
        self._taken = make.counter("standby_takeovers", "Times a standby took the target's place.", "bits")
        self._told: Counter[str] = Counter()
        self._changes = make.counter("changed_groups", "Streams that a replica went on with, with other bits.")
        self._changes_told: Counter[int] = Counter()

    def refresh(self, model: str, view: StateView) -> None:
        self._parts.clear()
        for part in view.health:
            self._parts.labels(model, "0", part.kind, part.name, part.state).set(1)
        wanted = list_wanted(view)
        self._wanted.labels(model, "0").set(len(wanted))
        self._ready.labels(model, "0").set(sum(replica.phase == "ready" for replica in wanted))
        for reason, count in count_out(view).items():
            self._out.labels(model, "0", reason).set(count)
        self._standbys.labels(model, "0").set(sum(replica.phase == "ready" for replica in view.standbys))
        for bits, count in view.taken_over.items():
            self._taken.labels(model, "0", bits).inc(count - self._told[bits])
        self._told = Counter(view.taken_over)
        for replica in view.replicas:
            more = view.changed_groups.get(replica.engine, 0) - self._changes_told[replica.engine]
            self._changes.labels(model, str(replica.engine)).inc(more)
        self._changes_told = Counter(view.changed_groups)


class DeviceSeries:
    """What a device does not tell has no series."""

    def __init__(self, make: Registered) -> None:
        self._load = make.gauge("device_utilisation", "Share of a device's time that is used, a moving mean.", "device")
        self._shares = make.gauge(
            "device_time_share", "Share of a device's time, by whose it is, a moving mean.", "device", "of"
        )
        self._memory = make.gauge("device_memory_bytes", "Memory of a device, by what it is.", "device", "kind")
        self._heat = make.gauge("device_temperature_celsius", "Temperature of a device.", "device")
        self._most_heat = make.gauge(
            "device_temperature_limit_celsius", "Temperature at which a device makes itself slower.", "device"
        )
        self._power = make.gauge("device_power_watts", "Power that a device takes.", "device")
        self._most_power = make.gauge("device_power_limit_watts", "Power that a device may take.", "device")
        self._queue = make.gauge("device_queue_depth", "Requests that wait for workers on a device, a mean.", "device")
        self._errors = make.gauge(
            "device_memory_errors", "Errors of a device's memory that could not be corrected.", "device"
        )
        self._fault = make.gauge("device_fault", "1 while a device says that it does not work.", "device", "what")
        self._slowed = make.gauge("device_slowed", "1 while a device lowers its clocks.", "device")
        self._all = [self._load, self._shares, self._memory, self._heat, self._most_heat, self._power]
        self._all += [self._most_power, self._queue, self._errors, self._fault, self._slowed]

    def refresh(self, model: str, devices: Iterable[DeviceView]) -> None:
        for gauge in self._all:
            gauge.clear()
        for device in devices:
            load, of = device.load, (model, "0", device.name.removeprefix(f"{THIS_NODE}/"))
            if load.memory_total_bytes:
                self._memory.labels(*of, "used").set(load.memory_total_bytes - load.memory_free_bytes)
                self._memory.labels(*of, "ours").set(load.memory_ours_bytes)
                self._memory.labels(*of, "total").set(load.memory_total_bytes)
            self._queue.labels(*of).set(load.queue_depth)
            if load.memory_errors is not None or load.fault:
                self._fault.labels(*of, "lost").set(float(bool(load.fault)))
                self._fault.labels(*of, "memory").set(float(bool(load.memory_errors)))
                self._slowed.labels(*of).set(float(bool(load.slowed_by)))
            if load.utilisation is not None and load.others is not None:
                self._shares.labels(*of, "ours").set(load.ours or 0.0)
                self._shares.labels(*of, "others").set(load.others)
                self._shares.labels(*of, "idle").set(max(0.0, 1.0 - load.utilisation))
            for gauge, value in (
                (self._load, load.utilisation),
                (self._heat, load.temperature_c),
                (self._errors, load.memory_errors),
                (self._most_heat, load.temperature_limit_c),
                (self._power, load.power_w),
                (self._most_power, load.power_limit_w),
            ):
                if value is not None:
                    gauge.labels(*of).set(value)


_ONE = 0  # the service lives as long as the registry: its counts never begin anew


class DraftStoreSeries:
    """No series where answers stay in the worker's memory."""

    def __init__(self, make: Registered) -> None:
        self._up = make.gauge("draft_store_up", "1 while the draft store works, 0 while it counts as away.")
        self._waiting = make.gauge("draft_store_waiting", "Answers that wait to be written.")
        self._lookups = PerWorker(make.counter("draft_store_lookups", "Lookups by how they went.", "outcome"))
        self._writes = PerWorker(make.counter("draft_store_writes", "Answers by what became of them.", "outcome"))
        self._recent_tokens = make.gauge("recent_outputs_tokens", "Tokens of users' last answers that are remembered.")
        self._recent_given = PerWorker(make.counter("recent_outputs_requests", "Requests that got some of them."))
        self._errors = PerWorker(make.counter("draft_store_errors", "Failures of the store.", "kind"))
        self._bytes = PerWorker(make.counter("draft_store_bytes", "Bytes of values.", "direction"))

    def refresh_recent(self, of: Engine, recent: RecentOutputsView) -> None:
        """Tell what is remembered of users."""
        self._recent_tokens.labels(*of).set(recent.tokens)
        self._recent_given.update(_ONE, recent.given, *of)

    def refresh(self, of: Engine, store: DraftStoreView) -> None:
        self._up.labels(*of).set(store.state == "ok")
        self._waiting.labels(*of).set(store.waiting)
        lookups = {"hit": store.hits, "miss": store.misses, "late": store.late, "skipped": store.skipped}
        for outcome, count in lookups.items():
            self._lookups.update(_ONE, count, *of, outcome)
        for outcome, count in (("written", store.written), ("dropped", store.dropped)):
            self._writes.update(_ONE, count, *of, outcome)
        for kind, count in (("failed", store.errors), ("damaged", store.damaged)):
            self._errors.update(_ONE, count, *of, kind)
        for direction, count in (("read", store.read_bytes), ("written", store.written_bytes)):
            self._bytes.update(_ONE, count, *of, direction)


TARGET = "target"


class MemoryMetrics:
    """Gauges by worker and device. What is not known, or of a worker that is not there, is not told."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        labels = ("worker", "device")
        self._planned = gauge("planned_memory_bytes", "What a worker was announced to hold at its peak.", *labels)
        self._peak = gauge("peak_memory_bytes", "The most host memory that a worker's process held.", *labels)

    def refresh(self, model: str, view: StateView) -> None:
        """Take what workers say of themselves now."""
        self._planned.clear()
        self._peak.clear()
        drafters: dict[tuple[str, str], RemoteState | None] = {}
        for replica in view.replicas:
            gauges = replica.gauges
            if replica.ready is not None:
                labels = (model, str(replica.engine), TARGET, replica.ready.device.name)
                peak = gauges.peak_rss_bytes if gauges is not None else 0
                self._tell(labels, replica.ready.device.planned_memory_bytes, peak)
            drafters |= {(replica.name, state.name): state.remote for state in (gauges.drafters if gauges else [])}
        for draft in view.drafts:
            if draft.ready is not None:
                state = draft.ready.drafter
                remotes = [drafters.get((target, draft.name)) for target in draft.targets]
                peak = max((remote.peak_rss_bytes for remote in remotes if remote is not None), default=0)
                labels = (model, str(draft.number), draft.name, state.device)
                self._tell(labels, state.planned_memory_bytes, peak)

    def _tell(self, labels: tuple[str, ...], planned_bytes: int, peak_bytes: int) -> None:
        for gauge, count in ((self._planned, planned_bytes), (self._peak, peak_bytes)):
            if count:
                gauge.labels(*labels).set(count)
