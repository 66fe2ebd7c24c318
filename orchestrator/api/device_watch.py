"""What the devices of this host do: a moving mean of their own counters, for metrics and status."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from adapters.device_facts import DeviceFacts, device_facts

ALPHA: Final = 0.3
"""Weight of the newest sample in the mean of a device's load."""
_EVERY_S: Final = 1.0


class DeviceWatch:
    """`devices`: what each does, by its name, the utilisation a moving mean. Empty before the first sample."""

    def __init__(self) -> None:
        self.devices: dict[str, DeviceFacts] = {}

    async def run(self) -> None:
        """Sample, for ever."""
        while True:
            await self.sample()
            await asyncio.sleep(_EVERY_S)

    async def sample(self) -> None:
        """Ask all devices."""
        self.observe(await asyncio.to_thread(device_facts))

    def observe(self, found: list[DeviceFacts]) -> None:
        """Take a sample of all devices."""
        before, self.devices = self.devices, {}
        for facts in found:
            known = before.get(facts.name)
            load = facts.utilisation
            if load is not None and known is not None and known.utilisation is not None:
                load = known.utilisation + ALPHA * (load - known.utilisation)
            self.devices[facts.name] = replace(facts, utilisation=load)
