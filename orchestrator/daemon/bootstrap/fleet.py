"""Plans over the hosts of a Ray cluster: finds and measures them, and plans again where hosts come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError, Progress, silent
from device_profiles.device_load import DeviceLoad
from device_profiles.link import LinkProfile
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import read_text
from orchestrator.config.sources import FoundSources
from orchestrator.daemon.bootstrap.clusters import build_cluster
from orchestrator.daemon.bootstrap.planning import build_start_plan
from orchestrator.daemon.cluster.agent import AgentOptions
from orchestrator.daemon.cluster.fleet import Fleet, FleetRules
from orchestrator.daemon.cluster.measure import measure_links, profile_hosts
from orchestrator.daemon.control.loops.device_watch import LoadObserver
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.errors import OutriderError
from orchestrator.machine.devices import list_free_bytes
from orchestrator.planning.applied import build_option_filter
from orchestrator.planning.here import PresentHost, PresentLinks
from orchestrator.planning.neighbours import TakenPlace
from orchestrator.planning.profiling.work import measuring_alone, profile_store
from orchestrator.planning.proposal import PlanProposal, propose_hosts
from orchestrator.planning.sketched import build_default_links, build_stated_links
from orchestrator.planning.wanted import build_request_from_config
from orchestrator.protocol.contract import Cluster

_AGAIN_AFTER_S = 5.0  # behind a plan that failed. Not tuned.

_log = logging.getLogger(__name__)


class FleetPlanning:
    """The hosts of one target, and what is planned for them. `path`: of its cluster.yaml. `loads` hears what the
    devices of other hosts do. `list_taken`: what the daemon's other targets have of them."""

    def __init__(
        self,
        config: ClusterConfig,
        path: Path,
        cluster: Cluster,
        progress: Progress,
        loads: LoadObserver,
        list_taken: Callable[[], tuple[TakenPlace, ...]] = tuple,
    ) -> None:
        self._config = config
        self._base = path.resolve().parent
        self._cluster = cluster
        self._progress = progress
        self._store = profile_store(config)
        self._list_taken = list_taken
        options = AgentOptions(read_text(path), str(path.resolve()), str(store_directory(config)), config.number)
        self.fleet = Fleet(cluster, FleetRules(config.hosts, config.cluster.discover), options, loads)

    def take_sources(self, sources: FoundSources) -> None:
        self._config = self._config.with_sources(sources)

    async def make_plan(self) -> StartPlan:
        """Find the hosts, measure, and plan. Raises OutriderError, and what resolving the models raises."""
        self._progress("look for hosts", -1.0)
        await self.fleet.open()
        await self._measure()
        return await asyncio.to_thread(self._plan)

    async def propose(self) -> PlanProposal:
        """Find the hosts, and return what would be planned for them, by the profiles that there are. Raises
        OutriderError, and what resolving the models raises."""
        await self.fleet.open()
        return await asyncio.to_thread(self._propose)

    async def keep_plan(self, keeper: PlanKeeper) -> None:
        """Plan again whenever a host has come or gone; until cancelled."""
        while True:
            await self.fleet.wait_changed()
            try:
                await self._measure()
                proposal = await asyncio.to_thread(self._propose)
            except (OutriderError, AdapterError, OSError) as error:
                _log.warning("the plan is kept for now, though hosts have changed: %s", error)
                await asyncio.sleep(_AGAIN_AFTER_S)
                self.fleet.note_change()
            else:
                keeper.observe_hosts(proposal)

    async def close(self) -> None:
        await self.fleet.close()

    async def _measure(self) -> None:
        """Measure what has no profile, where that is wanted. Raises PlanError where somebody else is measuring."""
        if self._config.placement.profile == "never":
            return
        stated = {frozenset((link.left, link.right)) for link in self._list_stated_links(self.fleet.addresses)}
        with measuring_alone(self._store):
            addresses = list(self.fleet.addresses.values())
            await measure_links(self._cluster, addresses, stated, self._store, self._progress)
            budget_s = self._config.placement.profile_budget_s
            await profile_hosts(self._cluster, self.fleet.hosts, self._store, self._progress, budget_s)

    def _plan(self) -> StartPlan:
        cores = {node: [[core] for core in host.cores] for node, host in self.fleet.hosts.items()}
        return build_start_plan(self._config, self._base, self._propose(), cores)

    def _propose(self) -> PlanProposal:
        request = build_request_from_config(self._config, self._base)
        request = replace(request, taken=self._list_taken())
        allowed = build_option_filter(self._config, request)
        proposal = propose_hosts(request, self._store, self._list_hosts(), self._list_links(), allowed)
        left_out = [f"{address} is left out: {why}" for address, why in sorted(self.fleet.left_out.items())]
        for line in (*proposal.assumed, *left_out):
            _log.info("planned, %s", line)
        return replace(proposal, assumed=(*proposal.assumed, *left_out))

    def _list_hosts(self) -> list[PresentHost]:
        hosts = []
        for node, host in self.fleet.hosts.items():
            listed = self.fleet.describe_listed(node)
            own = self._config.devices.price_per_hour if node == THIS_NODE else 0.0
            present = PresentHost(
                node,
                host.hardware,
                list_free_bytes(host.devices),
                price_per_hour=own,
                seen=host.devices,
                lacks=host.lacks,
            )
            if listed is not None:
                present = replace(
                    present,
                    stated_bytes=listed.stated_bytes,
                    cores=listed.cores,
                    zone=listed.zone,
                    name=listed.name,
                    roles=listed.roles,
                    devices=tuple(device.device for device in listed.devices),
                    price_per_hour=listed.price_per_hour or own,
                    device_prices={device.device: device.price_per_hour for device in listed.devices},
                )
            hosts.append(present)
        return hosts

    def _list_links(self) -> PresentLinks:
        """Return the links between the hosts that are there. What is stated goes before what was measured."""
        nodes = {address: node for node, address in self.fleet.addresses.items()}
        stated = self._list_stated_links({node: node for node in self.fleet.hosts})
        known = {frozenset((link.left, link.right)) for link in stated}
        measured = [
            replace(link, left=nodes[link.left], right=nodes[link.right])
            for link in self._store.links()
            if link.left in nodes and link.right in nodes
        ]
        kept = [link for link in measured if frozenset((link.left, link.right)) not in known]
        return PresentLinks((*stated, *kept), build_default_links(self._config.links))

    def _list_stated_links(self, names: Mapping[str, str]) -> list[LinkProfile]:
        """Return the links that cluster.yaml states between nodes that are there. `names`: what to call each node."""
        nodes = {listed.name: node for node in names if (listed := self.fleet.describe_listed(node)) is not None}
        return [
            replace(link, left=names[nodes[link.left]], right=names[nodes[link.right]])
            for link in build_stated_links(self._config.links)
            if link.left in nodes and link.right in nodes
        ]


class _Nobody:
    """Hears nothing: whoever only looks has no workers, and moves nothing."""

    def observe_load(self, samples: Mapping[str, DeviceLoad]) -> None:
        """See control.loops.device_watch.LoadObserver."""

    def list_workers(self) -> Iterable[int]:
        return ()


async def describe_cluster(config: ClusterConfig, text: str, path: Path) -> list[dict[str, Any]]:
    """Join the cluster of a configuration, whose `text` need not stand at `path` yet, and return its hosts as
    `Fleet.describe_hosts` does. Raises OutriderError."""
    cluster = build_cluster(config)
    options = AgentOptions(text, str(path), str(store_directory(config)), config.number)
    fleet = Fleet(cluster, FleetRules(config.hosts, config.cluster.discover), options, _Nobody())
    try:
        await fleet.open()
        return fleet.describe_hosts()
    finally:
        await fleet.close()
        await cluster.close()


async def propose_for_hosts(config: ClusterConfig, path: Path, taken: tuple[TakenPlace, ...] = ()) -> PlanProposal:
    """Join the cluster of a configuration, look at its hosts, and return what would be planned for them by the profiles
    that there are, beside other targets that have what is `taken`. Raises OutriderError, and what resolving the models
    raises."""
    cluster = build_cluster(config)
    planning = FleetPlanning(config, path, cluster, silent, _Nobody(), lambda: taken)
    try:
        return await planning.propose()
    finally:
        await planning.close()
        await cluster.close()
