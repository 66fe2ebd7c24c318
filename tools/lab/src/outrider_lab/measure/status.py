"""How long the status page of control takes, and the samples that it tells of, in a large cluster.

    python -m outrider_lab.measure.status [--devices 10000] [--rounds 10] [--json OUT]

Control takes a sample of each device, as the hosts' agents send them each second: of a processor with 32 cores, or of a
GPU. The admin API tells of all of them over its real socket, while samples come in. `outrider status` is run against it
in a process of its own: its whole time counts, with that of starting Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from adapters.hardware import processor
from device_profiles.device_load import CoreLoad, DeviceLoad
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.listening import listen_unix, serving
from orchestrator.daemon.bootstrap.clusters import local_cluster
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.streams.admission import ControlLimits

_PER_HOST = 8
_CORES = 32
_GPU = DeviceLoad(0.9, 0.1, memory_total_bytes=80 << 30, memory_free_bytes=20 << 30, temperature_c=61.0, power_w=400.0)
_CPU = DeviceLoad(0.5, 0.1, {core: CoreLoad(0.4, 0.1) for core in range(_CORES)}, 512 << 30, 300 << 30)
_MS_PER_S = 1000.0


def list_hosts(devices: int) -> list[dict[str, DeviceLoad]]:
    """Return a sample of each host's devices: a processor, and GPUs beside it."""
    hosts = []
    for host in range(-(-devices // _PER_HOST)):
        names = ["CPU", *(f"CUDA:{number}" for number in range(_PER_HOST - 1))][: devices - host * _PER_HOST]
        hosts.append({f"10.1.{host // 250}.{host % 250}/{name}": _CPU if name == "CPU" else _GPU for name in names})
    return hosts


async def measure(devices: int, rounds: int, directory: Path) -> dict[str, float]:
    """Return times in ms: of the page, and of taking in a sample of every device."""
    control = TargetControl(local_cluster(), (), ControlLimits(16, 256, 5), SystemClock())
    app = create_admin_app([AdminTarget(control)], "http://127.0.0.1:8000/v1", "bench")
    hosts, pages_ms, samples_ms, size = list_hosts(devices), [], [], 0
    commands_ms: dict[str, list[float]] = {"table": [], "json": []}
    with listen_unix(directory / "admin.sock") as unix:
        async with serving(app, unix):
            transport = httpx.AsyncHTTPTransport(uds=str(directory / "admin.sock"))
            async with httpx.AsyncClient(transport=transport, base_url="http://outrider", timeout=60.0) as client:
                for _ in range(rounds):
                    began_s = time.perf_counter()
                    for host in hosts:
                        control.observe_load(host)
                    samples_ms.append((time.perf_counter() - began_s) * _MS_PER_S)
                    await asyncio.sleep(1.0)
                    began_s = time.perf_counter()
                    answer = await client.get("/admin/status")
                    pages_ms.append((time.perf_counter() - began_s) * _MS_PER_S)
                    size = len(answer.raise_for_status().content)
                    for kind, taken_ms in commands_ms.items():
                        taken_ms.append(await time_command(directory / "admin.sock", as_json=kind == "json"))
    return {
        "devices": devices,
        "page_p50_ms": statistics.median(pages_ms),
        "page_max_ms": max(pages_ms),
        "page_bytes": size,
        "samples_p50_ms": statistics.median(samples_ms),
        **{f"command_{kind}_p50_ms": statistics.median(taken_ms) for kind, taken_ms in commands_ms.items()},
        **{f"command_{kind}_max_ms": max(taken_ms) for kind, taken_ms in commands_ms.items()},
    }


async def time_command(socket: Path, *, as_json: bool) -> float:
    """Return how long `outrider status` takes, in ms, in a process of its own."""
    arguments = ["-P", "-m", "orchestrator.cli.entry", "status", "--socket", str(socket), *(["--json"] * as_json)]
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL)
    code = await process.wait()
    taken_ms = (time.perf_counter() - began_s) * _MS_PER_S
    if code:
        raise SystemExit(f"outrider status ended with exit code {code}")
    return taken_ms


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(asked.devices, asked.rounds, Path(directory)))
    print(processor().name)
    for name, value in found.items():
        print(f"{name:>20} {value:10.1f}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
