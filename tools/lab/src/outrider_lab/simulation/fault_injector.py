"""Lets things go wrong in a simulation. What follows from it is control's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.daemon.control.events import WorkerSaid
from orchestrator.protocol.events import Failed
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.processes import Processes, SimulatedProcess


class FaultInjector:
    """Acts on `processes`. `lost` hears of the requests that a worker had when it was lost or stopped."""

    def __init__(self, processes: Processes, lost: Callable[[list[str]], None]) -> None:
        self._world, self._processes, self._lost = processes.world, processes, lost
        self._kinds: dict[str, Callable[[Fault], None]] = {
            "kill_worker": self._kill_worker,
            "lose_device": self._lose_device,
            "kill_draft": self._kill_draft,
            "freeze_worker": self._freeze_worker,
            "kill_host": self._take_host_away,
            "cut_link": self._take_host_away,
            "slow_device": self._slow_device,
        }

    def happen(self, fault: Fault) -> None:
        self._kinds[fault.kind](fault)

    def _find_workers(self, fault: Fault) -> list[tuple[int, SimulatedProcess]]:
        return [
            (number, one)
            for number, one in self._processes.list_running()
            if one.target is not None and one.target.replica.name == fault.name
        ]

    def _kill_worker(self, fault: Fault) -> None:
        for number, process in self._find_workers(fault):
            self._note_lost(process)
            self._processes.end(number, "it was killed", "killed")

    def _lose_device(self, fault: Fault) -> None:
        for number, process in self._find_workers(fault):
            self._note_lost(process)
            failed = Failed("the device is lost", restartable=True, kind="device_lost")
            self._world.post(WorkerSaid(number, failed))
            self._processes.end(number, "it ended", "device")

    def _kill_draft(self, fault: Fault) -> None:
        hosts = {one.draft_host for one in self._world.fleet.replicas if one.name == fault.name}
        for number, process in self._processes.list_running():
            if process.draft is not None and process.host in hosts:
                self._processes.end(number, "it was killed", "killed")

    def _freeze_worker(self, fault: Fault) -> None:
        for _, process in self._find_workers(fault):
            self._note_lost(process)
            if process.target is not None:
                process.target.freeze()
            if fault.seconds:
                self._world.after(fault.seconds, _thaw, process)

    def _take_host_away(self, fault: Fault) -> None:
        for number, process in self._processes.list_running():
            if process.host == fault.name:
                self._note_lost(process)
                self._processes.end(number, "its host is away", "host", seen_s=self._world.timing.host_seen_s)
        self._processes.away.add(fault.name)
        if fault.seconds:
            self._world.after(fault.seconds, self._processes.away.discard, fault.name)

    def _slow_device(self, fault: Fault) -> None:
        self._set_slowness((fault, fault.factor))
        if fault.seconds:
            self._world.after(fault.seconds, self._set_slowness, (fault, 1.0))

    def _set_slowness(self, told: tuple[Fault, float]) -> None:
        fault, factor = told
        self._processes.slowness[fault.name] = factor
        for _, process in self._find_workers(fault):
            if process.target is not None:
                process.target.slow_down(factor)

    def _note_lost(self, process: SimulatedProcess) -> None:
        """What was decoded until now was told; what runs there waits from now on."""
        if process.target is not None:
            process.target.tell_progress()
            self._lost(process.target.list_keys())


def _thaw(process: Any) -> None:
    if process.target is not None:
        process.target.thaw()
