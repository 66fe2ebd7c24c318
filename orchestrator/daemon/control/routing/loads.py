"""The live state of devices: samples in, moving means out, for whoever chooses. No effects.

Samples of every host come the same way (`observe`), each device by "HOST/DEVICE". Where nothing is heard of a device
for STALE_S its load counts no more: an old figure is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from device_profiles.device_load import CoreLoad, DeviceLoad, name_counters
from device_profiles.units import MS_PER_S
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.control.actions import Action, LogLine
from orchestrator.daemon.control.port import DeviceView
from orchestrator.protocol.contract import WorkerSpec
from policies.serving import device_load

# ADR 0057: half of a device counts with the second sample, and is gone with the sixth behind its end.
SMOOTHING: Final = 0.3
# ADR 0057: ten samples were lost. Not tuned.
STALE_S: Final = 10.0
_LOOK_EVERY_S: Final = 1.0  # for stale ones. Not tuned.
# ADR 0057: a view of 10,000 devices takes 9 ms, so it is made twice a second at most.
_VIEWED_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Kept:
    """`newest` sample, `mean` of all, and which loads count: of the whole device, of its cores, and its heat.
    `stretches`: what that makes of work on some of its cores, once somebody has asked."""

    newest: DeviceLoad
    mean: DeviceLoad
    counted: bool
    counted_cores: frozenset[int]
    hot: str
    stretches: dict[tuple[int, ...], device_load.Stretch] = field(default_factory=dict, compare=False)

    def predict_stretch(self, cores: Sequence[int]) -> device_load.Stretch:
        """Return by how much longer work takes on these cores, or on all, than alone."""
        key = tuple(cores)
        stretch = self.stretches.get(key)
        if stretch is None:
            stretch = self.stretches[key] = device_load.predict_stretch(self.find_counted(cores), self.hot)
        return stretch

    def find_counted(self, cores: Sequence[int]) -> CoreLoad | None:
        if cores and all(core in self.mean.cores for core in cores):
            known = {core: load for core, load in self.mean.cores.items() if core in self.counted_cores}
            if not known.keys() & set(cores):
                return None
            quiet = {core: CoreLoad(self.mean.cores[core].ours, rivals=0.0) for core in cores}
            return replace(self.mean, cores={**quiet, **known}).find_share(cores)
        return self.mean.find_share() if self.counted else None

    def find_lost_share(self) -> float:
        """Return the share of the whole device that work on it has to do without."""
        share = self.mean.find_share() if self.counted else None
        return 1.0 - device_load.find_usable_share(share) if share is not None else 0.0


class LoadBoard:
    """All devices that samples came of. `smoothing`: the weight of the newest sample."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._kept: dict[str, _Kept] = {}
        self._busy_ms: dict[str, float] = {}  # of our rounds since the last sample
        self.look_s = 0.0
        self._views: tuple[float, tuple[DeviceView, ...]] = (math.inf, ())

    def observe_samples(
        self, samples: Mapping[str, DeviceLoad], queues: Mapping[str, int], now_s: float
    ) -> list[Action]:
        """Take samples of devices, by "HOST/DEVICE". `queues`: how many requests wait on each of ours."""
        actions: list[Action] = []
        for name, load in samples.items():
            before = self._kept.get(name)
            sample = replace(load, sampled_s=now_s, queue_depth=float(queues.get(name, 0)))
            sample = self._tell_others(name, sample, before, now_s)
            kept = self._kept[name] = _keep(before, sample, self._smoothing)
            if kept.counted != (before is not None and before.counted):
                actions.append(_tell(name, kept))
            if kept.hot and (before is None or not before.hot):
                actions.append(LogLine("warning", "device %s slows itself down: %s", (name, kept.hot)))
        return actions

    def find_faults(self, samples: Mapping[str, DeviceLoad]) -> dict[str, str]:
        """Return what devices say of themselves for which nothing more is to be computed there, by their names: they
        are gone, or found errors in their memory since the last sample that was taken in."""
        faults: dict[str, str] = {}
        for name, load in samples.items():
            kept = self._kept.get(name)
            known = kept.newest.memory_errors if kept is not None else None
            more = load.memory_errors - known if load.memory_errors is not None and known is not None else 0
            if load.fault:
                faults[name] = load.fault
            elif more > 0:
                faults[name] = f"{more} errors of its memory could not be corrected"
        return faults

    def observe_round(self, spec: WorkerSpec, device_ms: float) -> None:
        if not self._kept:
            return
        name = name_device(spec)
        if name in self._kept:
            self._busy_ms[name] = self._busy_ms.get(name, 0.0) + device_ms

    def forget_stale(self, now_s: float) -> list[Action]:
        if now_s < self.look_s:
            return []
        self.look_s = now_s + _LOOK_EVERY_S
        stale = [name for name, kept in self._kept.items() if now_s - kept.newest.sampled_s > STALE_S]
        for name in stale:
            del self._kept[name]
            self._busy_ms.pop(name, None)
        text = "device %s: nothing was heard of its load for %g s, it counts no more"
        return [LogLine("warning", text, (name, STALE_S)) for name in stale]

    @property
    def knows(self) -> bool:
        return bool(self._kept)

    def samples(self, device: str) -> bool:
        return device in self._kept

    def predict_stretch(self, spec: WorkerSpec) -> device_load.Stretch:
        """Return by how much longer a worker of this spec takes on its device, and on its cores, than alone."""
        kept = self._kept.get(name_device(spec)) if self._kept else None
        return kept.predict_stretch(spec.cores) if kept is not None else device_load.ALONE

    def find_share(self, device: str, cores: Sequence[int]) -> tuple[device_load.Stretch, float]:
        """Return by how much longer work takes on these cores of a device, and which share of its memory is free."""
        kept = self._kept.get(device)
        if kept is None:
            return device_load.ALONE, 1.0
        load = kept.mean
        free = load.memory_free_bytes / load.memory_total_bytes if load.memory_total_bytes else 1.0
        return kept.predict_stretch(cores), free

    def explain_last_rounds(self, spec: WorkerSpec) -> float:
        """Return how many times as long its rounds took since the sample before the newest, for what other programs
        did in that time."""
        kept = self._kept.get(name_device(spec))
        return explain_rounds(kept.newest if kept is not None else None, spec)

    def list_loads(self, names: Iterable[str] | None = None) -> dict[str, DeviceLoad]:
        """Return the moving means of these devices, or of all, as whoever plans takes them: `others` is what work on a
        device would have to do without, and 0 where that does not count."""
        kept = [(name, self._kept[name]) for name in (self._kept if names is None else names) if name in self._kept]
        return {name: replace(load.mean, others=load.find_lost_share()) for name, load in kept}

    def view(self, now_s: float) -> tuple[DeviceView, ...]:
        """Return what devices do, for people and metrics. Of very many it is not put together anew each time."""
        if not self._views[0] <= now_s < self._views[0] + _VIEWED_S:
            views = [
                DeviceView(name, kept.mean, kept.hot, now_s - kept.newest.sampled_s)
                for name, kept in sorted(self._kept.items())
            ]
            self._views = (now_s, tuple(views))
        return self._views[1]

    def _tell_others(self, name: str, sample: DeviceLoad, before: _Kept | None, now_s: float) -> DeviceLoad:
        """Where a device does not tell whose its time is, take off what our rounds used."""
        busy_ms = self._busy_ms.pop(name, 0.0)
        if sample.others is not None or sample.utilisation is None or before is None:
            return sample
        elapsed_ms = (now_s - before.newest.sampled_s) * MS_PER_S
        ours = min(1.0, busy_ms / elapsed_ms) if elapsed_ms > 0.0 else 0.0
        return replace(sample, others=max(0.0, sample.utilisation - ours))


def explain_rounds(load: DeviceLoad | None, spec: WorkerSpec) -> float:
    return device_load.predict_stretch(load.find_share(spec.cores) if load is not None else None).factor


def name_device(spec: WorkerSpec) -> str:
    return f"{spec.node or THIS_NODE}/{name_counters(spec.device)}"


def _keep(before: _Kept | None, sample: DeviceLoad, smoothing: float) -> _Kept:
    mean = device_load.smooth_load(before.mean if before is not None else None, sample, smoothing)
    known = before.counted_cores if before is not None else frozenset()
    cores = {core for core, load in mean.cores.items() if device_load.counts(load.others, counted=core in known)}
    return _Kept(
        sample,
        mean,
        device_load.counts(mean.others or 0.0, counted=before is not None and before.counted),
        frozenset(cores),
        device_load.describe_heat(mean, hot=before is not None and bool(before.hot)),
    )


def _tell(name: str, kept: _Kept) -> LogLine:
    share = kept.mean.others or 0.0
    text = "device %s: other programs take %.0f %% of it" if kept.counted else "device %s: it is ours again, %.0f %%"
    return LogLine("info", text, (name, 100.0 * (share if kept.counted else 1.0 - share)))
