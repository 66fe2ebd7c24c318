"""What this host's devices do, as metrics: a moving mean of their load, and nothing that they do not tell."""

from __future__ import annotations

import pytest

from adapters.device_facts import DeviceFacts
from orchestrator.api.device_watch import ALPHA, DeviceWatch
from orchestrator.api.metrics.collector import Metrics
from orchestrator.clock import SystemClock
from tests.api.support import ScriptedControl

OF = {"model_name": "toy", "engine": "0", "device": "CUDA:0"}


def facts(load: float | None, used: int = 5) -> DeviceFacts:
    return DeviceFacts("CUDA:0 Some Device", 8, used, load, temperature_c=61.0)


def test_load_is_a_moving_mean_and_the_rest_as_it_is_now() -> None:
    watch = DeviceWatch()
    metrics = Metrics(ScriptedControl(), SystemClock(), devices=watch)
    watch.observe([facts(0.0)])
    watch.observe([facts(1.0, used=7)])
    metrics.render()
    sample = metrics.registry.get_sample_value
    assert sample("outrider_device_utilisation", OF) == pytest.approx(ALPHA)
    assert sample("outrider_device_memory_bytes", OF | {"kind": "used"}) == 7
    assert sample("outrider_device_temperature_celsius", OF) == 61.0
    assert sample("outrider_device_power_watts", OF) is None
    watch.observe([])
    metrics.render()
    assert sample("outrider_device_utilisation", OF) is None, "a device that is gone has no series"


async def test_the_processor_is_watched_for_real() -> None:
    watch = DeviceWatch()
    await watch.sample()
    assert 0.0 <= (watch.devices["CPU"].utilisation or 0.0) <= 1.0
