"""Memory of a daemon under load, planned beside used: python -m outrider_lab.measure.memory --config FILE --json FILE.

Planned and the process's peak are the daemon's own figures (docs/metrics.md), a device's what its driver tells before
the daemon starts and while it serves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from adapters import registry
from adapters.device_memory import read_device_memory
from adapters.parent_process import end_with_parent
from device_profiles.device_names import is_processor
from device_profiles.profile import find_listed_device
from orchestrator.config.load import load_config
from outrider_lab.free_port import wait_until_served

# Requests together, and tokens of each: enough that caches and workspaces are used. Not tuned.
_REQUESTS: Final = 8
_TOKENS: Final = 64
# The part that this is of has a time limit of its own.
_ANSWER_S: Final = 3600.0
_GAUGES: Final = {"outrider_planned_memory_bytes": "planned", "outrider_peak_memory_bytes": "host's peak"}


def measure_memory(config: Path) -> dict[str, int]:
    """Return bytes by what they are. Raises RuntimeError where the daemon ends, and what httpx and the configuration
    raise."""
    loaded = load_config(config)
    adapter, url = loaded.model.adapter, f"http://127.0.0.1:{loaded.api.port}"
    device = find_listed_device(registry.list_devices(adapter), loaded.model.device)
    before = read_device_memory(device) if device is not None and not is_processor(device.name) else None
    command = [sys.executable, "-m", "orchestrator.cli.entry", "serve", "--config", str(config)]
    daemon = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509 -- nothing else runs between fork and exec
    )
    try:
        if not wait_until_served(daemon, f"{url}/ready"):
            raise RuntimeError(f"the daemon ended with {daemon.returncode} before it was ready")
        with ThreadPoolExecutor(_REQUESTS) as asking:
            list(asking.map(lambda number: _ask(url, number), range(_REQUESTS)))
        measured = _read_gauges(httpx.get(f"{url}/metrics").raise_for_status().text)
        if before is not None and device is not None:
            measured[f"{device.name}, more than before"] = before.free_bytes - read_device_memory(device).free_bytes
    finally:
        daemon.terminate()
        daemon.wait()
    return measured


def _ask(url: str, number: int) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    text = f"Tell a long story that begins on day {number}."
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_ANSWER_S).raise_for_status()


def _read_gauges(text: str) -> dict[str, int]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        f"{_GAUGES[sample.name]} of {sample.labels['worker']}": int(sample.value)
        for sample in samples
        if sample.name in _GAUGES
    }


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.json.write_text(json.dumps(measure_memory(arguments.config)), encoding="utf-8")


if __name__ == "__main__":
    main()
