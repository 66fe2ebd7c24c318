"""What a device does at one moment, as a value: who takes its time, its memory, its heat and its power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from device_profiles.device_names import CUDA_KIND, find_index, is_processor, split_device

PROCESSOR: Final = "CPU"
COUNTS_FROM: Final = 0.15
"""The share of a device's time from which on what other programs take counts. ADR 0057, 0108."""


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """The shares of a core's time, or of a device's, that our own processes and all other programs take: 0 to 1.
    `rivals`: how many threads of these programs want a core at one time; None where nobody knows."""

    ours: float = 0.0
    others: float = 0.0
    rivals: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """One device. What it does not tell is None, 0 or empty.

    `utilisation`: the share of its time in use, by whomever; `others`: by programs that are not ours. `rivals`: how
    many threads of theirs want a core at one time. `cores`: of a processor, by their numbers. `memory_free_bytes` can
    still be had; `memory_ours_bytes` is held by our workers. At the limits the device makes itself slower.
    `slowed_by`: why it says itself that it runs slower. `memory_errors`: of its memory, that could not be corrected,
    since its driver was loaded. `fault`: why it does not work any more, as its driver says it.
    `queue_depth`: requests that wait for our workers on it. `sampled_s`: when, by the clock of whoever keeps it.
    """

    utilisation: float | None = None
    others: float | None = None
    rivals: float | None = field(default=None, kw_only=True)
    cores: Mapping[int, CoreLoad] = field(default_factory=dict)
    memory_total_bytes: int = 0
    memory_free_bytes: int = 0
    memory_ours_bytes: int = 0
    temperature_c: float | None = None
    temperature_limit_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    slowed_by: str = ""
    memory_errors: int | None = None
    fault: str = ""
    queue_depth: float = 0.0
    sampled_s: float = 0.0

    @property
    def ours(self) -> float | None:
        """The share of its time that our own processes take."""
        if self.utilisation is None or self.others is None:
            return None
        return max(0.0, self.utilisation - self.others)

    def find_share(self, cores: Sequence[int] = ()) -> CoreLoad | None:
        """Return who takes the time of these cores, where each is known; else of the whole device."""
        known = [self.cores[core] for core in cores if core in self.cores]
        if known and len(known) == len(cores):
            counted = [load.rivals for load in known if load.rivals is not None]
            return CoreLoad(
                fmean(load.ours for load in known),
                fmean(load.others for load in known),
                fmean(counted) if len(counted) == len(known) else None,
            )
        if self.others is None:
            return None
        return CoreLoad(self.ours or 0.0, self.others, self.rivals)


def find_device_load(loads: Mapping[str, DeviceLoad], device: str) -> DeviceLoad | None:
    """Return the load of a device that is named "HOST/DEVICE", as any of its runtimes names it."""
    return loads.get(name_device_counters(device))


def name_device_counters(device: str) -> str:
    """Return whose counters tell of a device that is named "HOST/DEVICE"."""
    host, _, name = device.partition("/")
    return f"{host}/{name_counters(name)}"


def name_counters(device: str) -> str:
    if is_processor(device):
        return PROCESSOR
    index = find_index(device)
    return f"CUDA:{index}" if split_device(device)[0] == CUDA_KIND and index is not None else device
