"""What devices do, as metrics and in the status: whose their time is, and nothing that they do not tell."""

from __future__ import annotations

import httpx

from device_profiles.device_load import CoreLoad, DeviceLoad
from orchestrator.cli.status import device_line, list_rows
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.admin.routes import create_admin_app, describe_device
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.bootstrap.clusters import local_cluster
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.port import DeviceView
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.machine.device_sampler import DeviceSampler
from tests.api.support import ScriptedControl

OF = {"model_name": "toy", "engine": "0", "device": "CUDA:0"}
LOAD = DeviceLoad(0.75, 0.5, {}, 8, 3, 4, 61.0, 90.0, power_limit_w=300.0, queue_depth=2.0)


def test_whose_time_it_is_and_what_is_used_and_what_waits() -> None:
    control = ScriptedControl(devices=(DeviceView("here/CUDA:0", LOAD, "", 0.2), DeviceView("far/CPU", LOAD, "", 0.2)))
    metrics = Metrics(control, SystemClock())
    metrics.render()
    sample = metrics.registry.get_sample_value
    assert sample("outrider_device_utilisation", OF) == 0.75
    shares = {of: sample("outrider_device_time_share", OF | {"of": of}) for of in ("ours", "others", "idle")}
    assert shares == {"ours": 0.25, "others": 0.5, "idle": 0.25}
    memory = {kind: sample("outrider_device_memory_bytes", OF | {"kind": kind}) for kind in ("used", "ours", "total")}
    assert memory == {"used": 5.0, "ours": 4.0, "total": 8.0}
    assert sample("outrider_device_temperature_celsius", OF) == 61.0
    assert sample("outrider_device_temperature_limit_celsius", OF) == 90.0
    assert sample("outrider_device_power_watts", OF) is None
    assert sample("outrider_device_power_limit_watts", OF) == 300.0
    assert sample("outrider_device_queue_depth", OF) == 2.0
    assert sample("outrider_device_utilisation", OF | {"device": "far/CPU"}) == 0.75
    control.devices = ()
    metrics.render()
    assert sample("outrider_device_utilisation", OF) is None, "a device that nobody samples has no series"


def test_the_status_has_the_same_in_a_line() -> None:
    told = describe_device(DeviceView("here/CUDA:0", LOAD, "61 of 60 °C", 0.2))
    assert device_line(told) == (
        "ours 25%, other programs 50%, idle 25%; 3 B of 8 B free, 4 B held by workers; 61 of 90 °C; "
        "2.0 requests wait; SLOWS ITSELF DOWN: 61 of 60 °C"
    )
    assert device_line(describe_device(DeviceView("here/CPU", DeviceLoad(), "", 0.2))) == "it tells nothing yet"


def test_the_processor_is_sampled_for_real() -> None:
    sampler = DeviceSampler()
    assert sampler.sample()["CPU"].utilisation is None, "from the first call to the second"
    sum(number**2 for number in range(300_000))
    found = sampler.sample()["CPU"]
    assert found.utilisation is not None
    assert 0.0 <= (found.others or 0.0) <= found.utilisation <= 1.0
    assert 0 < found.memory_free_bytes < found.memory_total_bytes
    assert all(isinstance(one, CoreLoad) for one in found.cores.values())


async def test_of_very_many_devices_the_busiest_are_shown():
    control = TargetControl(local_cluster(), (), ControlLimits(4, 4, 1), SystemClock())
    control.observe_load({f"10.0.0.{number}/CPU": DeviceLoad(number / 100, 0.0) for number in range(60)})
    app = create_admin_app([AdminTarget(control)], "http://127.0.0.1:8000/v1", "1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        answer = (await client.get("/admin/status")).json()
    assert len(answer["devices"]) == 60
    rows = [(name, value) for name, value in list_rows(answer) if name.startswith("device ") or name == "..."]
    assert [name for name, _ in rows[:2]] == ["device 10.0.0.59/CPU", "device 10.0.0.58/CPU"]
    assert rows[-1] == ("...", "36 more devices, less busy: --json has all")
    assert len(rows) == 25
