"""Hosts that a configuration lists are told while they are not in the cluster, or of no use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from orchestrator.config.hosts import ClusterHost
from orchestrator.daemon.cluster.agent import AgentOptions
from orchestrator.daemon.cluster.fleet import Fleet, FleetRules
from orchestrator.daemon.cluster.inventory import HostInventory
from orchestrator.errors import WorkerError
from orchestrator.protocol.commands import Command
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.events import Event, HostDescribed
from tests.support.waiting import until_async

OWN, FAR, BROKEN = "10.0.0.1", "10.0.0.2", "10.0.0.3"
LISTED = tuple(ClusterHost(name=name, address=address) for name, address in (("far", FAR), ("broken", BROKEN)))


@dataclass(eq=False)
class Agent:
    """Describes its host, and stays."""

    address: str
    where: str = "nowhere"
    pids: tuple[int, ...] = ()

    def send(self, command: Command) -> None:
        pass

    async def events(self) -> AsyncIterator[Event]:
        yield HostDescribed(
            msgspec.to_builtins(HostInventory(self.address, f"host of {self.address}", "1", "3.11", (0,), ()))
        )
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        pass


@dataclass
class Nodes:
    """A cluster of these nodes, one of which starts nothing."""

    present: list[str] = field(default_factory=lambda: [OWN, FAR, BROKEN])
    runtime: str = "ray"
    own_node: str = OWN
    away: str = ""
    members: None = None

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def nodes(self) -> list[str]:
        return list(self.present)

    async def start(self, spec: WorkerSpec) -> Worker:
        if spec.node == BROKEN:
            raise WorkerError("its disk is full")
        return Agent(OWN if spec.node == "here" else spec.node)


class Nobody:
    """Hears nothing of loads."""

    def observe_load(self, samples: object) -> None:
        pass

    def list_workers(self) -> tuple[int, ...]:
        return ()


async def test_a_listed_host_is_absent_until_it_joins_and_can_be_used() -> None:
    cluster = Nodes([OWN])
    fleet = Fleet(cluster, FleetRules(LISTED, discover=True), AgentOptions("", "", ""), Nobody())
    assert fleet.absent == {}, "nobody has looked yet"
    await fleet.open()
    try:
        assert fleet.absent == dict.fromkeys(("far", "broken"), "it is not in the cluster")
        cluster.present += [FAR, BROKEN]
        await until_async(lambda: fleet.absent == {"broken": "its disk is full"})
        cluster.present.remove(FAR)
        await until_async(lambda: "far" in fleet.absent)
    finally:
        await fleet.close()
