"""Load, memory, temperature and power of devices, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.config.target import THIS_NODE
from orchestrator.daemon.api.metrics.series import Registered
from orchestrator.daemon.control.port import DeviceView


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
        self._all = [self._load, self._shares, self._memory, self._heat, self._most_heat, self._power]
        self._all += [self._most_power, self._queue]

    def refresh(self, model: str, devices: Iterable[DeviceView]) -> None:
        """Tell what is so now."""
        for gauge in self._all:
            gauge.clear()
        for device in devices:
            load, of = device.load, (model, "0", device.name.removeprefix(f"{THIS_NODE}/"))
            if load.memory_total_bytes:
                self._memory.labels(*of, "used").set(load.memory_total_bytes - load.memory_free_bytes)
                self._memory.labels(*of, "ours").set(load.memory_ours_bytes)
                self._memory.labels(*of, "total").set(load.memory_total_bytes)
            self._queue.labels(*of).set(load.queue_depth)
            if load.utilisation is not None and load.others is not None:
                self._shares.labels(*of, "ours").set(load.ours or 0.0)
                self._shares.labels(*of, "others").set(load.others)
                self._shares.labels(*of, "idle").set(max(0.0, 1.0 - load.utilisation))
            for gauge, value in (
                (self._load, load.utilisation),
                (self._heat, load.temperature_c),
                (self._most_heat, load.temperature_limit_c),
                (self._power, load.power_w),
                (self._most_power, load.power_limit_w),
            ):
                if value is not None:
                    gauge.labels(*of).set(value)
