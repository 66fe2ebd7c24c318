"""Where the figures of a device come from: measured or stated, the planner takes both alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from device_profiles.datasheet import Datasheet
from device_profiles.measured import DeviceRates
from device_profiles.profile import Exactness
from orchestrator.planning.models import PlannedModel
from policies.planning.plan import Option


class DeviceSource(Protocol):
    """A kind of device. `memory_bytes` is its own, 0 where it works in the host's memory. `cores` are those of a
    processor, else 0. Rates and power are 0 or empty where not known. `sheet` states them; it is None where they are
    measured."""

    @property
    def kind(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def cores(self) -> int: ...

    @property
    def power_w(self) -> float: ...

    @property
    def rates(self) -> DeviceRates: ...

    @property
    def sheet(self) -> Datasheet | None: ...

    def device_for(self, adapter: str) -> str:
        """Return what that runtime calls it, "" where that is not known."""
        ...

    def options(
        self, target: PlannedModel, drafts: Sequence[PlannedModel], exactness: Exactness, cores: int
    ) -> list[Option]:
        """Return how these models run on it, on a host with so many cores; their `profile` is still to be named."""
        ...
