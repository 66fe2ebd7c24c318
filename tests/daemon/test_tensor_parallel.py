"""A target whose layers are split over two ranks, from cluster.yaml to status, in a real daemon that loses a rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil

from tests.daemon.test_life import collect
from tests.daemon.test_shards import list_texts
from tests.support import tiny_models
from tests.support.daemon import running

LONG: dict[str, Any] = {"model": "tiny", "prompt": "hello the hello the hello", "max_tokens": 120, "temperature": 0} | {
    "extra_body": {"ignore_eos": True}
}


def write_split(directory: Path, store: Path, keys: str) -> Path:
    tiny_models.write_model(directory / "tiny", "qwen3", kind="BF16")
    path = directory / "c.yaml"
    path.write_text(
        f"model: {{source: tiny, name: tiny, weights: as_file, {keys}}}\n"
        "cluster: {runtime: local}\ndevices: {threads: 1}\nlimits: {kv_cache: 16 MiB, max_running: 3}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
    )
    return path


def list_ranks(worker: int) -> list[psutil.Process]:
    found = psutil.Process(worker).children(recursive=True)
    return [one for one in found if "adapters.torch_device.rank" in one.cmdline()]


def test_a_split_target_serves_and_a_killed_rank_costs_no_token(tmp_path, shared_store, outrider):
    config = write_split(tmp_path, shared_store, "adapter: torch_device, tensor_parallel: 2")
    with running(config) as daemon:
        list_texts(daemon)
        ready = daemon.status()["ready"]
        assert ready["split"] == "tensor parallel over 2 ranks: CPU, 1 thread + CPU, 1 thread"
        assert ready["row_invariant"]
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].replace("│", " ").split())
        assert ready["split"] in shown
        [rank] = list_ranks(ready["pid"])
        held = daemon.status()["gauges"]["rss_bytes"]
        assert held > 1.2 * psutil.Process(ready["pid"]).memory_info().rss, "both processes are counted"
        expected = daemon.client.completions.create(**LONG).choices[0].text
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**LONG, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(120)
        rank.kill()
        reader.join(240)
        assert "".join(pieces) == expected
        daemon.wait_for("totals", restarts=1)
        again = list_ranks(daemon.status()["ready"]["pid"])
        assert len(again) == 1
        assert again[0].pid != rank.pid
        assert not psutil.pid_exists(ready["pid"])
        assert daemon.stop() == 0
        assert not again[0].is_running()
