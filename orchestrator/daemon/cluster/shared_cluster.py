"""One cluster for several users of it: opened for the first, closed behind the last."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

import msgspec

from orchestrator.daemon.cluster.group import start_group
from orchestrator.protocol.contract import AdoptingCluster, Cluster, ClusterMembers, Worker, WorkerSpec

# What a worker may take to end its rounds when the daemon closes. Not tuned.
_CLOSE_GRACE_S = 5.0


class SharedCluster:
    """A cluster that nobody else opens or closes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changing = asyncio.Lock()
        self._users: set[ClusterShare] = set()

    def share(self, prefix: str = "") -> ClusterShare:
        """Return the cluster for one more user. Its workers are called `prefix` and their own names, so that no two
        users' workers are taken for each other."""
        return ClusterShare(self, self._cluster, prefix)

    async def enter(self, user: ClusterShare) -> None:
        """One more uses the cluster. Raises WorkerError where it cannot be opened."""
        async with self._changing:
            if not self._users:
                await self._cluster.open()
            self._users.add(user)

    async def leave(self, user: ClusterShare) -> None:
        async with self._changing:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    await self._cluster.close()


class ClusterShare:
    """Implements protocol.contract.Cluster for one user: `close` stops its own workers, and leaves the others'."""

    def __init__(self, shared: SharedCluster, cluster: Cluster, prefix: str) -> None:
        self._shared = shared
        self._cluster = cluster
        self._prefix = prefix
        self._workers: WeakSet[Worker] = WeakSet()

    @property
    def runtime(self) -> str:
        return self._cluster.runtime

    @property
    def own_node(self) -> str:
        return self._cluster.own_node

    @property
    def away(self) -> str:
        return self._cluster.away

    @property
    def members(self) -> ClusterMembers | None:
        return self._cluster.members

    async def open(self) -> None:
        await self._shared.enter(self)

    async def nodes(self) -> list[str]:
        return await self._cluster.nodes()

    async def start(self, spec: WorkerSpec) -> Worker:
        named = self._name(spec)
        worker = await start_group(self._cluster.start, named) if named.parts else await self._cluster.start(named)
        self._workers.add(worker)
        return worker

    def is_left_behind(self, spec: WorkerSpec) -> bool:
        """See protocol.contract.AdoptingCluster. A group of workers is never left behind."""
        cluster = self._cluster
        return not spec.parts and isinstance(cluster, AdoptingCluster) and cluster.is_left_behind(self._name(spec))

    def _name(self, spec: WorkerSpec) -> WorkerSpec:
        """Return a spec, and its parts', with names of this user's."""
        if not self._prefix:
            return spec
        name, parts = f"{self._prefix}{spec.name}", [self._name(part) for part in spec.parts]
        return msgspec.structs.replace(spec, name=name, parts=parts)

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)))
        await self._shared.leave(self)
