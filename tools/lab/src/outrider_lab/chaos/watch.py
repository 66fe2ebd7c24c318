"""Watches the daemon's workers over its admin socket: who serves, and who was started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from outrider_lab.chaos.records import DAEMON, Restart
from outrider_lab.chaos.service import Service, WorkerSeen, read_workers

LOOK_EVERY_S = 0.2


class Watch:
    """What was seen of the workers, and when. `now_s` counts from the start of the run."""

    def __init__(self, service: Service, now_s: Callable[[], float]) -> None:
        self._service = service
        self._now_s = now_s
        self._told_by = 0
        self._exits = 0
        self.workers: dict[str, WorkerSeen] = {}
        self.restarts: list[Restart] = []
        self._before: set[int] = set()
        self._adopted: set[tuple[int, int]] = set()
        self.silent_since_s: float | None = None

    @property
    def adopted(self) -> int:
        """How many workers daemons took over from the daemon before them."""
        return len(self._adopted)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        asked, asked_s = self._service.pid, self._now_s()
        status = await self._service.status()
        for at_s, code in self._service.exits[self._exits :]:
            self.restarts.append(Restart(at_s, DAEMON, 1, f"exited with {code}"))
        self._exits = len(self._service.exits)
        if status is None or asked != self._service.pid:
            self.silent_since_s = asked_s if self.silent_since_s is None else self.silent_since_s
            return
        self.silent_since_s = None
        seen = {one.title: one for one in read_workers(status)}
        self._service.remember([one.pid for one in seen.values()])
        if asked == self._told_by:
            self._note_restarts(seen)
        else:
            self._before = {one.pid for one in self.workers.values()} - {0}
        self._adopted |= {(asked, one.pid) for one in seen.values() if one.pid in self._before}
        self._told_by = asked
        self.workers = seen

    def _note_restarts(self, seen: dict[str, WorkerSeen]) -> None:
        for title, one in seen.items():
            before = self.workers.get(title)
            if before is not None and one.restarts > before.restarts:
                count = one.restarts - before.restarts
                self.restarts.append(Restart(self._now_s(), title, count, one.detail or before.detail))

    def serving(self, role: str = "", host: str = "") -> list[WorkerSeen]:
        """Return the workers that serve now, in the order of their names."""
        return [
            one
            for _, one in sorted(self.workers.items())
            if one.phase == "ready" and one.pid and role in ("", one.role) and host in ("", one.host)
        ]

    async def until_ready(self, titles: Collection[str], gone: Collection[int], limit_s: float) -> bool:
        """Wait until these workers serve, with processes other than those that are gone. False: they never did."""
        deadline = self._now_s() + limit_s
        while self._now_s() < deadline:
            found = [self.workers.get(title) for title in titles if title != DAEMON]
            heard = self.silent_since_s is None and self._told_by == self._service.pid
            if heard and all(one is not None and one.phase == "ready" and one.pid not in gone for one in found):
                return True
            await asyncio.sleep(LOOK_EVERY_S / 2)
        return False
