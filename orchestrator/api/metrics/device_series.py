"""Load, memory, temperature and power of this host's devices, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.device_facts import DeviceFacts
from orchestrator.api.metrics.series import Registered


class DeviceSeries:
    """What a device does not tell has no series."""

    def __init__(self, make: Registered) -> None:
        self._load = make.gauge("device_utilisation", "Share of a device's time that is used, a moving mean.", "device")
        self._memory = make.gauge("device_memory_bytes", "Memory of a device, by what it is.", "device", "kind")
        self._heat = make.gauge("device_temperature_celsius", "Temperature of a device.", "device")
        self._power = make.gauge("device_power_watts", "Power that a device takes.", "device")

    def refresh(self, model: str, devices: Iterable[DeviceFacts]) -> None:
        """Tell what is so now."""
        for gauge in (self._load, self._memory, self._heat, self._power):
            gauge.clear()
        for facts in devices:
            of = (model, "0", facts.name.partition(" ")[0])
            self._memory.labels(*of, "used").set(facts.memory_used_bytes)
            self._memory.labels(*of, "total").set(facts.memory_total_bytes)
            for gauge, value in (
                (self._load, facts.utilisation),
                (self._heat, facts.temperature_c),
                (self._power, facts.power_w),
            ):
                if value is not None:
                    gauge.labels(*of).set(value)
