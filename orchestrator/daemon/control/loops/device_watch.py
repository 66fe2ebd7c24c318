"""Samples this host's devices each second, and hands that to control: one source of live state among others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from device_profiles.device_load import DeviceLoad
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.machine.device_sampler import DeviceSampler

# ADR 0057: a sample costs 2.8 ms of processor time.
EVERY_S: Final = 1.0

_log = logging.getLogger(__name__)


class LoadObserver(Protocol):
    """Who takes samples of devices, and knows our workers: control.controller.TargetControl."""

    def observe_load(self, samples: Mapping[str, DeviceLoad]) -> None: ...

    def list_workers(self) -> Iterable[int]: ...


async def watch_devices(control: LoadObserver, others: Sequence[LoadObserver] = ()) -> None:
    """Sample, for ever. What goes wrong is said once, until it works again: then the last samples become stale. What
    workers of the `others` take is taken by other programs."""
    workers: list[int] = []
    strangers: list[int] = []
    sampler, failed = DeviceSampler(lambda: workers, lambda: strangers), False
    while True:
        workers = list(control.list_workers())
        strangers = [pid for other in others for pid in other.list_workers()]
        try:
            loads = await asyncio.to_thread(sampler.sample)
        except Exception as error:
            if not failed:
                _log.warning("the devices of this host cannot be sampled: %s", error)
            failed = True
        else:
            failed = False
            control.observe_load({f"{THIS_NODE}/{name}": load for name, load in loads.items()})
        await asyncio.sleep(EVERY_S)
