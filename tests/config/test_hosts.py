"""The sections `hosts` and `links`: what a daemon cannot use is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError

MODEL = "model: {source: 'simulated:toy', adapter: simulated, device: auto}\n"
JOINED = MODEL + "cluster: {address: '10.0.0.1:6379'}\n"

WRONG = [
    (MODEL + "hosts:\n  - {name: a, address: 10.0.0.2}\n", 2, ["hosts: go with cluster.address"]),
    (MODEL + "links: {same_zone: {rtt_ms: 1, gbit_per_s: 1}}\n", 2, ["links: go with cluster.address"]),
    (JOINED + "hosts:\n  - {name: a}\n", 4, ["hosts[0].address: is missing", "outrider plan --cluster"]),
    (
        JOINED + "hosts:\n  - {name: a, address: b}\n  - {name: a, address: c}\n",
        5,
        ["hosts[1].name: 'a' is there twice"],
    ),
    (
        JOINED + "hosts:\n  - {name: a, address: b}\n  - {name: c, address: b}\n",
        5,
        ["hosts[1].address: b is there twice"],
    ),
    (
        JOINED + "hosts:\n  - {name: a, address: b, memory: 1 GiB}\n",
        4,
        ["hosts[0].memory: is for hosts that are not there"],
    ),
    (JOINED + "hosts:\n  - {name: a, address: b, roles: [target, drafts]}\n", 4, ["hosts[0].roles[1]", "'drafts'"]),
    (
        JOINED + "hosts:\n  - {name: a, address: b, devices: [{device: CPU, count: 2}]}\n",
        4,
        ["hosts[0].devices[0].count: is for hosts that are not there"],
    ),
    (
        JOINED + "links:\n  between: [{hosts: [a, b], rtt_ms: 1, gbit_per_s: 1}]\n",
        4,
        ["links.between[0].hosts: there is no host 'a'"],
    ),
    (
        JOINED.replace(", device: auto", "") + "hosts:\n  - {name: a, address: b}\n",
        3,
        ["hosts: goes with a plan; set model.adapter or model.device to auto"],
    ),
]


@pytest.mark.parametrize(("text", "line", "says"), WRONG)
def test_every_problem_names_its_line(tmp_path: Path, text: str, line: int, says: list[str]):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    told = [one for one in str(refused.value).splitlines() if one.startswith(f"{path}:{line}: ")]
    assert any(all(part in one for part in says) for one in told), str(refused.value)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("", True),
        ("hosts: [{name: a, address: here}]\n", True),
        ("cluster: {address: 'x:1', discover: false}\n", False),
        ("cluster: {address: 'x:1', discover: false}\nhosts: [{name: a, address: here}]\n", True),
    ],
)
def test_a_plan_over_hosts_is_made_where_a_cluster_is_joined_and_hosts_may_be_used(
    tmp_path: Path, extra: str, expected: bool
):
    path = tmp_path / "cluster.yaml"
    path.write_text((MODEL if "cluster:" in extra else JOINED) + extra)
    assert load_config(path).plans_hosts is expected


@pytest.mark.parametrize(
    ("replicas", "key"),
    [
        ("[{host: 10.0.0.2}]", "model.replicas[0].host"),
        ("[{host: here}, {host: 10.0.0.2}]", "model.replicas[0].host"),
        ("[{}, {cores: [1]}]", "model.replicas[1].cores"),
    ],
)
def test_replicas_that_say_where_they_run_do_not_go_with_a_plan(tmp_path: Path, replicas: str, key: str):
    """It would start as many as it found worth it, wherever that is, and nobody would hear of the others."""
    path = tmp_path / "cluster.yaml"
    path.write_text(JOINED.replace("device: auto", f"device: auto, replicas: {replicas}"))
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert all(part in str(refused.value) for part in ("cluster.yaml:", key, "placement.pin_target", "adapter and"))
