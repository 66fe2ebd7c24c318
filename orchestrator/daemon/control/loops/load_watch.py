"""Whether other programs take another share of devices than the running plan was made with, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final

from device_profiles.device_load import DeviceLoad, name_device_counters
from orchestrator.daemon.control.routing.loads import STALE_S
from policies.planning.plan import Device
from policies.planning.shard_cost import MOST_BUSY

# ADR 0057: 15 points, as of what counts at all.
DIFFERS_FROM: Final = 0.15
_KNOWN_FOR_S: Final = 3.0  # three samples: an older figure says nothing. Not tuned.
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class LoadWatch:
    """Compares loads with those that the running plan has. A difference is told once it has lasted for `lasts_s`: a
    short one is over before workers are loaded. `taken`: what others had of each device while it was measured. The
    plan has that in its costs, and less than that makes no other plan."""

    def __init__(self, devices: Sequence[Device], lasts_s: float, taken: Mapping[str, float] = _NOTHING) -> None:
        self._settled: dict[str, float] = {}
        self._taken = taken
        self._lasts_s = lasts_s
        self._devices: dict[str, list[str]] = {}  # by whose counters tell of them
        self._loads: dict[str, DeviceLoad] = {}
        self._heard_s: dict[str, float] = {}
        self._known_s: float | None = None
        self._since_s: dict[str, float] = {}
        self.set_devices(devices)

    def set_devices(self, devices: Sequence[Device]) -> None:
        self._settled = {device.id: self._settled.get(device.id, device.utilisation) for device in devices}
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in self._settled}
        self._devices = {}
        for device in devices:
            self._devices.setdefault(name_device_counters(device.id), []).append(device.id)

    def set_taken(self, taken: Mapping[str, float]) -> None:
        self._taken = taken

    def knows(self, now_s: float) -> bool:
        return self._known_s is not None and now_s - self._known_s < _KNOWN_FOR_S

    def observe_means(self, loads: Mapping[str, DeviceLoad], now_s: float) -> None:
        self._known_s = now_s
        self._loads |= loads
        self._heard_s |= dict.fromkeys(loads, now_s)
        stale = [name for name, heard_s in self._heard_s.items() if now_s - heard_s > STALE_S]
        for name in stale:
            del self._loads[name], self._heard_s[name]
        for device in chain.from_iterable(self._devices.get(name, ()) for name in (*loads, *stale)):
            if abs(self._find_counted(device) - self._find_planned(device)) >= DIFFERS_FROM:
                self._since_s.setdefault(device, now_s)
            else:
                self._since_s.pop(device, None)

    def find_lasting(self, now_s: float) -> str:
        """Return what has been otherwise than planned for long, in a line; "" where nothing has."""
        lasting = [device for device, since_s in self._since_s.items() if now_s - since_s >= self._lasts_s]
        return ", ".join(
            f"other programs take {self._find_others(device):.0%} of {device} instead of "
            f"{self._find_planned(device):.0%}"
            for device in sorted(lasting)
        )

    def find_change(self, device: str) -> float:
        """Return how much more or less of a device is left than the running plan was made with: 0.5 is half."""
        planned = min(self._find_planned(device), MOST_BUSY)
        return (1.0 - min(self._find_counted(device), MOST_BUSY)) / (1.0 - planned)

    def list_loads(self) -> dict[str, DeviceLoad]:
        return dict(self._loads)

    def settle(self) -> dict[str, DeviceLoad]:
        """Return the loads to plan with: they are the planned ones from here on."""
        self._settled = {device: self._find_others(device) for device in self._settled}
        self._since_s = {}
        return dict(self._loads)

    def _find_planned(self, device: str) -> float:
        return max(self._settled.get(device, 0.0), self._taken.get(device, 0.0))

    def _find_counted(self, device: str) -> float:
        return max(self._find_others(device), self._taken.get(device, 0.0))

    def _find_others(self, device: str) -> float:
        load = self._loads.get(name_device_counters(device))
        return load.others or 0.0 if load is not None else 0.0
