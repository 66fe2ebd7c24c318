"""What every kind of fault is: something that is done to a running daemon, and undone."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.chaos.records import FaultRecord
from outrider_lab.chaos.schedule import PlannedFault, Shape
from outrider_lab.chaos.service import Layout, Service, WorkerSeen
from outrider_lab.chaos.watch import Watch


class NoTarget(Exception):
    """There is nothing that the fault could strike now; the text says what was looked for."""


@dataclass(frozen=True, slots=True)
class Arena:
    """What a fault may reach. `clock` is the file that the wall clock's shim reads, where there is one."""

    service: Service
    watch: Watch
    layout: Layout
    state: Path
    now_s: Callable[[], float]
    clock: Path | None = None
    hosts: BenchHosts | None = None

    @property
    def kept_workers(self) -> list[WorkerSeen]:
        return list(self.watch.workers.values())


class Fault(ABC):
    """One fault of a kind. `disrupts`: clients may see a pause, which counts as its recovery. Of one `group` only one
    fault holds at a time, as healing the first would heal the second; "" is none."""

    kind: ClassVar[str]
    description: ClassVar[str]
    shape: ClassVar[Shape] = Shape()
    disrupts: ClassVar[bool] = True
    group: ClassVar[str] = ""
    role: ClassVar[str] = "target"

    def __init__(self, arena: Arena, planned: PlannedFault, record: FaultRecord) -> None:
        self.arena = arena
        self.planned = planned
        self.record = record
        self.gone: list[int] = []

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        """Return why this kind cannot be made here; "" where it can."""
        return ""

    @abstractmethod
    async def inject(self) -> None:
        """Break something, and write down what. Raises NoTarget."""

    async def heal(self) -> None:
        """Undo what can be undone, after the hold."""
        return

    async def hold(self) -> None:
        """Wait until it is to be healed."""
        await asyncio.sleep(self.planned.hold_s)

    def choose(self, role: str, host: str = "") -> WorkerSeen:
        serving = self.arena.watch.serving(role, host)
        if not serving:
            raise NoTarget(f"no {role or 'worker'} serves")
        return serving[int(self.planned.pick * len(serving))]

    def send_signal(self, number: signal.Signals) -> WorkerSeen:
        """Send a signal to a worker of the `role` that serves now. Raises NoTarget."""
        victim = self.choose(self.role)
        self.blame(victim, detail=f"{number.name} of {victim.title}, pid {victim.pid}")
        if not self.arena.service.send_signal(victim.pid, number):
            raise NoTarget(f"{victim.title} had ended already")
        return victim

    def blame(self, *workers: WorkerSeen, detail: str) -> None:
        """Write down which workers the fault may cost."""
        self.record.victims = tuple(dict.fromkeys((*self.record.victims, *(one.title for one in workers))))
        self.record.detail = "; ".join(filter(None, (self.record.detail, detail)))
