"""Faults of links and nodes: two hosts as network name spaces, with Ray over both and a relay between them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.chaos.faults.base import Fault, NoTarget
from outrider_lab.chaos.hosts import TUN, order_cable, restart_head
from outrider_lab.chaos.schedule import Shape
from outrider_lab.chaos.service import Layout, WorkerSeen


class LinkFault(Fault):
    """A fault that needs a second host."""

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        if layout.runtime != "ray":
            return "it needs two hosts: --runtime ray"
        return find_host_obstacle()

    @property
    def hosts(self) -> BenchHosts:
        """The two hosts. Raises NoTarget."""
        if self.arena.hosts is None:
            raise NoTarget("there are no two hosts")
        return self.arena.hosts

    def list_far(self) -> list[WorkerSeen]:
        return [one for one in self.arena.kept_workers if one.host == self.hosts.hosts[1].address]


def find_host_obstacle() -> str:
    """Return why hosts cannot be made here; "" where they can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network name spaces need Linux, root and iproute2"
    return "" if TUN.exists() else f"the relay between hosts needs {TUN}"


class CutLink(LinkFault):
    """The cable between the hosts is out: nothing passes, and nobody is told."""

    kind = "cut-link"
    group = "cut-link"
    description = "nothing passes between the two hosts during the hold"
    shape = Shape(1, 4.0, 15.0)

    async def inject(self) -> None:
        self.blame(*self.list_far(), detail=f"no frame passes for {self.planned.hold_s:.1f} s")
        order_cable(self.hosts, "cut")

    async def heal(self) -> None:
        order_cable(self.hosts, "up")


class SlowLink(LinkFault):
    """The link is slow. That costs speed, and nobody may be restarted for it."""

    kind = "slow-link"
    group = "slow-link"
    description = "each frame between the two hosts takes 20 to 200 ms longer during the hold"
    shape = Shape(1, 5.0, 12.0)

    async def inject(self) -> None:
        delay_ms = 20 + int(180 * self.planned.pick)
        self.blame(detail=f"frames take {delay_ms} ms longer")
        order_cable(self.hosts, f"delay {delay_ms}")

    async def heal(self) -> None:
        order_cable(self.hosts, "delay 0")


class RayNode(LinkFault):
    """A node of Ray is gone with all its workers, and comes back."""

    kind = "ray-node"
    group = "ray"
    description = "all processes of Ray on the far host are killed; the node joins again after the hold"
    shape = Shape(1, 3.0, 10.0)

    async def inject(self) -> None:
        self.blame(*self.list_far(), detail="Ray's node on the far host is killed")
        self.gone += [one.pid for one in self.list_far()]
        await asyncio.to_thread(self.hosts.leave, 1)

    async def heal(self) -> None:
        await asyncio.to_thread(self.hosts.join, 1)


class RayHead(Fault):
    """Ray's head is gone: with hosts of our own it is started again, in the daemon's own Ray that is the daemon's."""

    kind = "ray-head"
    group = "ray"
    description = "Ray's head is killed; with two hosts it is started again after the hold"
    shape = Shape(1, 3.0, 8.0)

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        return "" if layout.runtime == "ray" else "it needs --runtime ray"

    async def inject(self) -> None:
        everybody = self.arena.kept_workers
        if self.arena.hosts is None:
            self._kill_embedded()
        else:
            await asyncio.to_thread(self.arena.hosts.leave, 0)
        self.blame(*everybody, detail="Ray's head is killed")
        near = "" if self.arena.hosts is None else self.arena.hosts.hosts[0].address
        self.gone += [one.pid for one in everybody if near in ("", one.host)]

    def _kill_embedded(self) -> None:
        import psutil

        children = psutil.Process(self.arena.service.pid).children(recursive=True)
        alive = (child for child in children if child.status() != psutil.STATUS_ZOMBIE)
        heads = [child for child in alive if "gcs_server" in child.name()]
        if not heads:
            raise NoTarget("the daemon has no gcs_server")
        for head in heads:
            head.kill()

    async def heal(self) -> None:
        if self.arena.hosts is not None:
            await asyncio.to_thread(restart_head, self.arena.hosts)
