"""Whether a target and its draft take compute from each other: decided by cores and devices, whatever runs on them.

Two workers share a host's processor where they may run on one core of it, and an accelerator where it is the same one.
Where the cores of one are not known, it may run on any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from device_profiles.device_names import CPU_KIND, name_compute_unit


@dataclass(frozen=True, slots=True)
class ComputePlace:
    """Where a worker computes. `host` tells machines apart, `device` is named as by its runtime. `cores` are those that
    it may run on (none: not known)."""

    host: str
    device: str
    cores: frozenset[int] = frozenset()

    @classmethod
    def of(cls, host: str, device: str, cores: Collection[int]) -> ComputePlace:
        return cls(host, device, frozenset(cores))


def shares_compute(place: ComputePlace, other: ComputePlace) -> bool:
    unit = name_compute_unit(place.device)
    if place.host != other.host or unit != name_compute_unit(other.device):
        return False
    if unit != CPU_KIND:
        return True
    return not place.cores or not other.cores or bool(place.cores & other.cores)
