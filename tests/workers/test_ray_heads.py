"""A Ray of two hosts: what its workers do, and what is said, when a host or the head is away and comes back."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from orchestrator.errors import ClusterAway, WorkerLost
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.ready import Ready
from tests.support import engines
from tests.support.hosts import Hosts, RayNodes, ray_over, two_hosts
from tests.support.workers import is_gone, start_on, tokens_until

PROMPT = [1, 2, 3]


@pytest.mark.ray
def test_a_host_that_is_cut_off_and_a_head_that_is_away() -> None:
    # Nodes wait for their head as long as docs/configuration.md advises, or the far one would end in 60 s.
    with two_hosts() as hosts, ray_over(hosts, RAY_gcs_rpc_server_reconnect_timeout_s="3600") as nodes:
        hosts.on_near(lambda: asyncio.run(fail_and_recover(hosts, nodes)))


async def fail_and_recover(hosts: Hosts, nodes: RayNodes) -> None:
    cluster = RayCluster(hosts.address)
    await cluster.open()
    try:
        assert set(await cluster.nodes()) == {hosts.near_ip, hosts.far_ip}
        await lose_the_far_host(cluster, hosts)
        await lose_the_head(cluster, hosts, nodes)
    finally:
        await cluster.close()


async def lose_the_far_host(cluster: RayCluster, hosts: Hosts) -> None:
    worker = await cluster.start(far_spec(hosts))
    events = worker.events()
    ready = await anext(event async for event in events if isinstance(event, Ready))
    worker.send(Submit("a", PROMPT, max_tokens=100_000))
    assert await tokens_until(events, 10) == engines.tokens(PROMPT, 10)
    hosts.cable("down")
    cut_s = time.monotonic()
    with pytest.raises(WorkerLost, match=f"host {hosts.far_ip} is cut off, it has not answered for") as lost:
        await tokens_until(events, 100_000)
    assert lost.value.kind == "host"
    lost_s = time.monotonic()
    assert lost_s - cut_s < 16.0
    await worker.stop(5.0)
    assert time.monotonic() - lost_s < 3.0  # nobody waits for a process that cannot be reached
    with pytest.raises(ClusterAway, match=f"host {hosts.far_ip} "):
        await cluster.start(far_spec(hosts))
    hosts.cable("up")
    assert await is_gone(ready.pid, within_s=120.0)


async def lose_the_head(cluster: RayCluster, hosts: Hosts, nodes: RayNodes) -> None:
    worker = await start_on(cluster, 60.0, node=hosts.far_ip)
    events = worker.events()
    ready = await anext(event async for event in events if isinstance(event, Ready))
    worker.send(Submit("a", PROMPT, max_tokens=100_000))
    assert await tokens_until(events, 10) == engines.tokens(PROMPT, 10)
    assert cluster.away == ""
    nodes.kill_head()
    began_s = time.monotonic()
    with pytest.raises(ClusterAway, match=r"(has not answered for \d+ s|does not answer); is it running"):
        await cluster.start(msgspec.structs.replace(engines.spec(), node=hosts.near_ip))
    assert time.monotonic() - began_s < 15.0
    assert "is it running (ray start --head)?" in await asyncio.to_thread(lambda: cluster.away)
    began_s = time.monotonic()
    with pytest.raises(ClusterAway) as refused:
        await cluster.start(engines.spec())
    assert refused.value.kind == "host"  # which spends no worker's restarts
    assert time.monotonic() - began_s < 1.0
    assert await tokens_until(events, 200) == engines.tokens(PROMPT, 210)[10:]
    nodes.start_head()
    other = await start_on(cluster, 60.0, node=hosts.near_ip)
    assert cluster.away == ""
    assert (await cluster.nodes()) == [hosts.near_ip]
    await asyncio.sleep(2.0)  # what waited for the old head has heard of the new one
    assert await tokens_until(events, 600) == engines.tokens(PROMPT, 810)[210:]
    began_s = time.monotonic()
    await asyncio.gather(worker.stop(5.0), other.stop(5.0))
    assert time.monotonic() - began_s < 12.0
    assert await is_gone(ready.pid)


def far_spec(hosts: Hosts) -> WorkerSpec:
    return msgspec.structs.replace(engines.spec(step_s=0.005), node=hosts.far_ip)
