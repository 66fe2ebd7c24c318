"""How fast the dashboard loads and draws in a real Chromium, with the devices of a large cluster.

    python -m outrider_lab.measure.dashboard [--devices 100] [--seconds 10] [--json OUT]

Control takes a sample of each device once a second, as agents send them. A browser without a GPU opens the page, and
counts frames while it is scrolled. The browser draws in software: with a GPU it is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from playwright.async_api import async_playwright

from adapters.hardware import processor
from device_profiles.device_load import DeviceLoad
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.app import ApiSettings, create_app
from orchestrator.daemon.api.dashboard.routes import install_dashboard
from orchestrator.daemon.api.listening import listen_tcp, serving
from orchestrator.daemon.api.served import ServedTarget
from orchestrator.daemon.bootstrap.clusters import local_cluster
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.streams.admission import ControlLimits
from outrider_lab.measure.status import list_hosts

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_COUNT_FRAMES = """async (seconds) => {
  const times = [];
  const end = performance.now() + seconds * 1000;
  let down = true;
  await new Promise((done) => {
    const step = (now) => {
      times.push(now);
      if (scrollY <= 0) down = true;
      if (scrollY + innerHeight >= document.documentElement.scrollHeight - 2) down = false;
      scrollBy(0, down ? 4 : -4);
      if (now < end) requestAnimationFrame(step); else done();
    };
    requestAnimationFrame(step);
  });
  return times.slice(1).map((now, index) => now - times[index]);
}"""
_READ_TIMES = """() => {
  const [page] = performance.getEntriesByType("navigation");
  return { load_ms: page.loadEventEnd, first_state_ms: performance.getEntriesByName("first-state")[0].startTime };
}"""


@asynccontextmanager
async def serve_dashboard(devices: int) -> AsyncIterator[tuple[str, TargetControl]]:
    """Serve the dashboard of a control that knows so many devices; gives the daemon's address and the control."""
    clock = SystemClock()
    control = TargetControl(local_cluster(), (), ControlLimits(16, 256, 5), clock)
    app = create_app([ServedTarget(control, lambda: None, lambda: "toy")], ApiSettings(65_536), clock)
    dashboard = install_dashboard(
        app, [AdminTarget(control, lambda: "toy")], list(app.state.models), app.state.lives, clock
    )
    observe_devices(control, list_hosts(devices))
    with listen_tcp("127.0.0.1", 0) as tcp:
        async with serving(app, tcp), dashboard.follow():
            yield f"http://127.0.0.1:{tcp.getsockname()[1]}", control


def observe_devices(control: TargetControl, hosts: list[dict[str, DeviceLoad]]) -> None:
    """Let control take a sample of every device, each a little different from the last."""
    for host in hosts:
        control.observe_load({name: replace(load, utilisation=random.random()) for name, load in host.items()})  # noqa: S311


async def measure(devices: int, seconds: float) -> dict[str, float]:
    """Return times of loading in ms, and of frames."""
    async with serve_dashboard(devices) as (url, control), async_playwright() as playwright:
        sampling = asyncio.create_task(_sample(control, devices))
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_OPTIONS))
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(f"{url}/dashboard")
        await page.wait_for_selector("#content[data-number]")
        found: dict[str, float] = await page.evaluate(_READ_TIMES)
        frames_ms: list[float] = await page.evaluate(_COUNT_FRAMES, seconds)
        sampling.cancel()
        await browser.close()
    return {
        "devices": devices,
        **found,
        "frames_per_s": 1000.0 / statistics.mean(frames_ms),
        "frame_p50_ms": statistics.median(frames_ms),
        "frame_p99_ms": statistics.quantiles(frames_ms, n=100)[98],
        "frame_max_ms": max(frames_ms),
    }


async def _sample(control: TargetControl, devices: int) -> None:
    hosts = list_hosts(devices)
    while True:
        observe_devices(control, hosts)
        await asyncio.sleep(1.0)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    found = asyncio.run(measure(asked.devices, asked.seconds))
    print(processor().name)
    for name, value in found.items():
        print(f"{name:>16} {value:10.1f}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
