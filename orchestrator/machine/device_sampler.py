"""What this host's devices do: their own counters, less what our workers take of them.

The sampler asks the machine and takes its time; who decides by what it found does no I/O. Another host's agent uses it
there, and hands its samples on under that host's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from adapters.device_memory import read_host_memory
from adapters.nvidia_load import read_nvidia_loads
from adapters.processor_time import ProcessorMeter, list_own_processes, read_processor_temperatures, sum_held_bytes
from device_profiles.device_load import PROCESSOR, DeviceLoad


class DeviceSampler:
    """Samples the devices of the host that it runs on. `list_workers` names workers by their processes' numbers that
    this process did not start itself, `list_others` those that do not count as ours, whoever started them."""

    def __init__(
        self, list_workers: Callable[[], Iterable[int]] = tuple, list_others: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self._list_workers = list_workers
        self._list_others = list_others
        self._meter = ProcessorMeter()

    def sample(self) -> dict[str, DeviceLoad]:
        """Return what each device did since the last call, by its name ("CPU", "CUDA:0"). Blocks for some
        milliseconds. Of the first call the processor's time is not known yet."""
        own = list_own_processes(self._list_workers(), self._list_others())
        used = self._meter.measure(own)
        memory = read_host_memory()
        temperature_c, temperature_limit_c = read_processor_temperatures()
        loads = {
            PROCESSOR: DeviceLoad(
                utilisation=None if used is None else used.utilisation,
                others=None if used is None else used.others,
                rivals=None if used is None else used.rivals,
                cores={} if used is None else used.cores,
                memory_total_bytes=memory.total_bytes,
                memory_free_bytes=memory.free_bytes,
                memory_ours_bytes=sum_held_bytes(own),
                temperature_c=temperature_c,
                temperature_limit_c=temperature_limit_c,
            )
        }
        with suppress(OSError):
            loads |= read_nvidia_loads({process.pid for process in own})
        return loads
