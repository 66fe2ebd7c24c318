"""Faults of processes: killed, stopped for a while, all of them frozen, the daemon itself killed."""

from __future__ import annotations

import signal

from outrider_lab.chaos.faults.base import Fault
from outrider_lab.chaos.records import DAEMON
from outrider_lab.chaos.schedule import Shape

_SERVES_WITHIN_S = 120.0


class KillTarget(Fault):
    """A target's worker is gone at once."""

    kind = "kill-target"
    description = "SIGKILL of a target's worker"
    shape = Shape(weight=2)

    async def inject(self) -> None:
        self.gone.append(self.send_signal(signal.SIGKILL).pid)


class KillDraft(KillTarget):
    """A draft's worker is gone at once."""

    kind = "kill-draft"
    description = "SIGKILL of a draft worker"
    role = "draft"


class StopTarget(Fault):
    """A target's worker does nothing for a while, and is not gone: a hang."""

    kind = "stop-target"
    group = "stop-target"
    description = "SIGSTOP of a target's worker; SIGCONT after the hold, if the process is still there"
    shape = Shape(1, 12.0, 25.0)

    async def inject(self) -> None:
        self.pid = self.send_signal(signal.SIGSTOP).pid

    async def heal(self) -> None:
        there = self.arena.service.send_signal(self.pid, signal.SIGCONT)
        self.record.detail += "; it was still there" if there else "; it had been ended"


class StopDraft(StopTarget):
    """A draft's worker does nothing for a while."""

    kind = "stop-draft"
    group = "stop-draft"
    description = "SIGSTOP of a draft worker; SIGCONT after the hold, if the process is still there"
    shape = Shape(1, 6.0, 15.0)
    role = "draft"


class Suspend(Fault):
    """The whole service stands still, as on a machine that was suspended. That is no hang of anybody."""

    kind = "suspend"
    group = "suspend"
    description = "SIGSTOP of the daemon and all workers, SIGCONT after the hold: nobody may be restarted for it"
    shape = Shape(1, 4.0, 12.0)

    async def inject(self) -> None:
        service = self.arena.service
        self.pids = [service.pid, *(one.pid for one in self.arena.kept_workers if one.pid)]
        self.blame(detail=f"SIGSTOP of {len(self.pids)} processes")
        for pid in self.pids:
            service.send_signal(pid, signal.SIGSTOP)

    async def heal(self) -> None:
        for pid in reversed(self.pids):
            self.arena.service.send_signal(pid, signal.SIGCONT)


class KillDaemon(Fault):
    """The daemon is gone at once, and is started again as by its unit. Clients resume their streams."""

    kind = "daemon"
    group = "daemon"
    description = "SIGKILL of the daemon, which is started again at once; clients resume by Last-Event-ID"

    async def inject(self) -> None:
        self.blame(*self.arena.kept_workers, detail=f"SIGKILL of the daemon, pid {self.arena.service.pid}")
        self.record.victims += (DAEMON,)
        await self.arena.service.kill_daemon()

    async def hold(self) -> None:
        """Wait until the new daemon serves: the next one is not to be killed while it starts."""
        await self.arena.watch.until_ready(self.record.victims, (), _SERVES_WITHIN_S)
