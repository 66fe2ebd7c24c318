"""Two hosts whose processors are not alike: one has no AVX-512. Both serve, and each keeps its own bits."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.hardware import processor
from tests.daemon.test_pools import Told, read_stream
from tests.daemon.test_replicas import replicas, until_all_serve
from tests.support.daemon import Daemon, running
from tests.support.hosts import Hosts, ray_over, two_hosts
from tests.support.waiting import until

STREAMS = 4


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.model
def test_hosts_of_unlike_processors_serve_together_and_streams_of_a_lost_one_go_on_marked(
    tmp_path: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not {"avx512f", "avx_vnni"} <= {*processor().isa}:
        pytest.skip("this processor has not both AVX-512, which is taken away, and AVX-VNNI, which is left")
    with two_hosts() as hosts, ray_over(hosts, far=False) as nodes:
        with monkeypatch.context() as capped:
            capped.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI")
            nodes.join_far()
        hosts.on_near(lambda: lose_each_in_turn(write(tmp_path, default_model_path, hosts), hosts))


def write(directory: Path, model: Path, hosts: Hosts) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{model}', adapter: openvino_rt, replicas: [{{host: {hosts.near_ip}}}, "
        f"{{host: {hosts.far_ip}}}]}}\n"
        f"cluster: {{runtime: ray, address: '{hosts.address}'}}\ndevices: {{threads: 1}}\n"
        "limits: {kv_cache: 64 MiB, max_running: 4}\nfailover: {after_s: 0}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\nlogging: {{format: json}}\n"
    )
    return path


def ask(daemon: Daemon, number: int, group: str = "") -> dict[str, Any]:
    return {
        "model": daemon.status()["model"],
        "prompt": f"The {number + 2} oldest cities of Italy, and what each is known for:",
        "max_tokens": 96,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True} | ({"system_fingerprint": group} if group else {}),
    }


def read_some(daemon: Daemon, **how: str) -> list[Told]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: read_stream(daemon, ask(daemon, number, **how)), range(STREAMS)))


def lose_each_in_turn(config: Path, hosts: Hosts) -> None:
    with running(config) as daemon:
        until_all_serve(daemon)
        for replica, host in zip(replicas(daemon), (hosts.near_ip, hosts.far_ip), strict=True):
            assert f"node {host} " in replica["worker"]
        groups = {stream.fingerprints[0] for _ in range(4) for stream in read_some(daemon)}
        assert len(groups) == 2, "both take requests, and their bits are not alike"
        alone = {group: read_some(daemon, group=group) for group in groups}
        for group, streams in alone.items():
            assert all(stream.fingerprints == [group] for stream in streams)
        for lost in range(2):
            check_a_loss(daemon, lost, alone)
            until_all_serve(daemon)


def check_a_loss(daemon: Daemon, lost: int, alone: dict[str, list[Told]]) -> None:
    """Kill a replica's worker while streams run. What one group said is what it says alone; each change is marked."""
    made = replicas(daemon)[lost]["totals"]["generated"]
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [pool.submit(read_stream, daemon, ask(daemon, number)) for number in range(STREAMS)]
        until(lambda: replicas(daemon)[lost]["totals"]["generated"] > made + 10 or all(each.done() for each in reading))
        os.kill(replicas(daemon)[lost]["ready"]["pid"], signal.SIGKILL)
        streams = [each.result() for each in reading]
    for number, stream in enumerate(streams):
        assert [mark["system_fingerprint"] for mark in stream.marks] == stream.fingerprints[1:]
        if not stream.marks:
            assert stream.text == alone[stream.fingerprints[0]][number].text
