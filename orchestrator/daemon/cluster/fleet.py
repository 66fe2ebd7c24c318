"""The hosts of a Ray cluster as the daemon knows them: an agent on each, and who joins and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from orchestrator.config.hosts import ClusterHost
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.cluster.agent import AgentOptions, agent_spec
from orchestrator.daemon.cluster.inventory import HostInventory, describe_skew, list_differences
from orchestrator.daemon.control.loops.device_watch import LoadObserver
from orchestrator.errors import ClusterAway, WorkerError, WorkerLost
from orchestrator.protocol.commands import CountAsOurs
from orchestrator.protocol.contract import Cluster, Worker
from orchestrator.protocol.events import DevicesSampled, Failed, HostDescribed
from orchestrator.telemetry import get_logger

# Who joined and left (ADR 0060). Not tuned.
_LOOK_EVERY_S = 1.0
# ADR 0060: asking runtimes for devices imports them. Not tuned.
_DESCRIBED_WITHIN_S = 60.0
_AGAIN_AFTER_S = 2.0  # until an agent that ended is started again. Not tuned.
_STOP_GRACE_S = 1.0  # an agent has nothing to finish. Not tuned.

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetRules:
    """`listed`: what cluster.yaml says of hosts. `discover`: whether hosts that it does not list are used."""

    listed: tuple[ClusterHost, ...]
    discover: bool

    def find_listed(self, address: str, *, own: bool) -> ClusterHost | None:
        """Return what is said of the host at an address; None for nothing."""
        names = (address, THIS_NODE) if own else (address,)
        return next((host for host in self.listed if host.address in names), None)

    def allows(self, address: str, *, own: bool) -> bool:
        return self.discover or self.find_listed(address, own=own) is not None


class Fleet:
    """Keeps an agent on every node that may be used. `loads` hears what the devices of other hosts do. All methods are
    for the event loop that made it."""

    def __init__(self, cluster: Cluster, rules: FleetRules, options: AgentOptions, loads: LoadObserver) -> None:
        self._loads = loads
        self._cluster = cluster
        self._rules = rules
        self._options = options
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._hosts: dict[str, HostInventory] = {}
        self._left_out: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._own = ""

    @property
    def hosts(self) -> Mapping[str, HostInventory]:
        """The hosts that may be used, by node: the address, THIS_NODE for the daemon's own. A host's memory is as it
        was when it was seen first, before anything of ours ran there."""
        own = self._hosts.get(self._own)
        return {
            THIS_NODE if address == self._own else address: host
            for address, host in sorted(self._hosts.items())
            if own is None or not describe_skew(host, own)
        }

    @property
    def addresses(self) -> Mapping[str, str]:
        """The addresses of these hosts, by node."""
        return {node: self._own if node == THIS_NODE else node for node in self.hosts}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Hosts that cannot be used, by address, and why."""
        own = self._hosts.get(self._own)
        skewed = {address: describe_skew(host, own) for address, host in self._hosts.items()} if own else {}
        return {**self._left_out, **{address: why for address, why in skewed.items() if why}}

    @property
    def absent(self) -> Mapping[str, str]:
        """The listed hosts that cannot be used, by name, and why. None before it is known who is there."""
        if self._watching is None:
            return {}
        present, left_out = self.addresses.values(), self.left_out
        addresses = {host.name: self._own if host.address == THIS_NODE else host.address for host in self._rules.listed}
        return {
            name: left_out.get(address, "it is not in the cluster")
            for name, address in addresses.items()
            if address not in present
        }

    def describe_listed(self, node: str) -> ClusterHost | None:
        """Return what cluster.yaml says of a node; None for nothing."""
        own = node == THIS_NODE
        return self._rules.find_listed(self._own if own else node, own=own)

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return the hosts as plain data: what is used of them, and why the rest is left out."""
        views: list[dict[str, Any]] = []
        own = self._hosts.get(self._own)
        for node, host in self.hosts.items():
            listed = self.describe_listed(node)
            views.append(
                {
                    "host": node,
                    "name": listed.name if listed is not None else "",
                    "zone": listed.zone if listed is not None else "",
                    "roles": list(listed.roles) if listed is not None else ["target", "draft"],
                    "address": host.address,
                    "hostname": host.hostname,
                    "version": host.version,
                    "cores": list(host.cores),
                    "devices": [msgspec.to_builtins(device) for device in host.devices],
                    "failed": host.problems,
                    "differs": list_differences(host, own) if own is not None else [],
                    "left_out": "",
                }
            )
        return views + [
            {
                "host": address,
                "name": "",
                "zone": "",
                "roles": [],
                "address": address,
                "devices": [],
                "differs": [],
                "left_out": why,
            }
            for address, why in self.left_out.items()
        ]

    async def open(self) -> None:
        """Start the agents, and wait until each has described its host or cannot. Raises WorkerError."""
        await self._cluster.open()
        self._own = self._cluster.own_node
        await self._look()
        try:
            async with asyncio.timeout(_DESCRIBED_WITHIN_S):
                while not self._agents.keys() <= self._hosts.keys() | self._left_out.keys():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for address in self._agents.keys() - self._hosts.keys():
                self._leave_out(address, f"it has not been described within {_DESCRIBED_WITHIN_S:g} s")
        self._watching = asyncio.create_task(self._watch(), name="watch the cluster's hosts")

    async def wait_changed(self) -> None:
        """Wait until a host has come or gone since the last call, or since `open`."""
        await self._changed.wait()
        self._changed.clear()

    def note_change(self) -> None:
        """Let `wait_changed` return: what came of the last change is to be tried again."""
        self._changed.set()

    async def close(self) -> None:
        tasks = [*self._agents.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._agents.clear()
        self._watching = None

    async def _watch(self) -> None:
        self._changed.clear()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        """Start agents on nodes that came, and forget nodes that left."""
        try:
            nodes = await self._cluster.nodes()
        except ClusterAway:
            return  # whatever runs goes on, and who is there is known when the head is back
        allowed = {address for address in nodes if self._rules.allows(address, own=address == self._own)}
        for address in allowed - self._agents.keys():
            self._agents[address] = asyncio.create_task(self._keep_agent(address), name=f"agent {address}")
        for address in self._agents.keys() - allowed:
            self._agents.pop(address).cancel()
            self._left_out.pop(address, None)
            if self._hosts.pop(address, None) is not None:
                _log.warning("host left", host=address)
                self._changed.set()

    async def _keep_agent(self, address: str) -> None:
        """Have an agent on a node as long as that is there."""
        while True:
            worker: Worker | None = None
            try:
                node = THIS_NODE if address == self._own else address
                listed = self.describe_listed(node)
                stated = listed.stated_bytes if listed is not None else {}
                options = msgspec.structs.replace(self._options, stated_bytes=stated)
                worker = await self._cluster.start(agent_spec(node, options))
                await self._hear(address, worker)
            except ClusterAway as error:
                _log.debug("no agent", host=address, reason=str(error))
            except WorkerError as error:
                if address not in self._hosts:
                    self._leave_out(address, str(error))
            finally:
                if worker is not None:
                    await worker.stop(_STOP_GRACE_S)
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _hear(self, address: str, worker: Worker) -> None:
        async for event in worker.events():
            if isinstance(event, Failed):
                raise WorkerLost(event.message)
            if isinstance(event, HostDescribed):
                self._take(address, msgspec.convert(event.inventory, HostInventory))
            elif isinstance(event, DevicesSampled) and address != self._own:  # the daemon samples its own host
                self._loads.observe_load({f"{address}/{name}": load for name, load in event.loads.items()})
                worker.send(CountAsOurs(list(self._loads.list_workers())))

    def _take(self, address: str, host: HostInventory) -> None:
        if address in self._hosts:  # an agent that was started again: what is free now is less what we hold
            return
        self._hosts[address] = host
        self._left_out.pop(address, None)
        own = self._hosts.get(self._own)
        devices = sorted({f"{device.adapter}:{device.device}" for device in host.devices})
        _log.info("host found", host=address, hostname=host.hostname, cores=len(host.cores), devices=devices)
        if own is not None and (why := describe_skew(host, own)):
            _log.warning("host left out", host=address, reason=why)
        for line in host.problems:
            _log.info("host lacks", host=address, what=line)
        for line in list_differences(host, own) if own is not None else ():
            _log.warning("host has another version", host=address, what=line)
        self._changed.set()

    def _leave_out(self, address: str, reason: str) -> None:
        if self._left_out.get(address) != reason:
            self._left_out[address] = reason
            _log.warning("host left out", host=address, reason=reason)
            self._changed.set()
