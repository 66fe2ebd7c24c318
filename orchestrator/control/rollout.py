"""Other replicas in place of those that serve, while streams go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain

from orchestrator.control.draft_workers import DraftWorkers
from orchestrator.control.replica import Replica
from orchestrator.control.replica_diff import arrange_replicas
from orchestrator.control.replicas import Replicas
from orchestrator.control.router import Router
from orchestrator.control.state import FAILED
from orchestrator.workers.contract import WorkerSpec

_LEAVING_POLL_S = 0.05

_log = logging.getLogger(__name__)


class Rollout:
    """Changes `replicas` and the draft workers beside them, one change after the other."""

    def __init__(self, replicas: Replicas, router: Router, drafts: DraftWorkers) -> None:
        self._replicas = replicas
        self._router = router
        self._drafts = drafts
        self._changing = asyncio.Lock()

    async def change(self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]]) -> list[int]:
        """See controller.TargetControl.change."""
        async with self._changing:
            serving = self._replicas.serving
            made = arrange_replicas(serving, specs)
            stay = [replica for replica in serving if replica.engine in made.kept]
            leaving = [replica for replica in serving if replica not in stay]
            new = await self._replicas.all_ready(made.coming, stay)
            self._switch(leaving, new)
            self._drafts.run_these(list(chain.from_iterable(drafts)))
            await asyncio.gather(*(self._stop_retired(old) for old in leaving))
            return list(made.engines)

    def _switch(self, leaving: Sequence[Replica], coming: Sequence[Replica]) -> None:
        """Route to the new replicas and move the streams of those that leave, without waiting for anything."""
        self._replicas.exchange(leaving, coming)
        for old in leaving:
            heir, moved = self._replicas.bequeath(old), self._router.retire(old)
            if heir is not None:
                _log.info("worker %s takes the place of %s: %d streams move", heir.name, old.name, moved)
            else:
                _log.info("worker %s is not needed any more: %d streams move", old.name, moved)
        self._router.feed()
        for old in leaving:
            self._drafts.detach_target(old.name)
        for one in coming:
            if one.state.ready is not None:
                self._drafts.target_ready(one.name, one.state.ready.all_drafters)

    async def _stop_retired(self, old: Replica) -> None:
        """Stop a replica that is retiring when no stream needs it any more."""
        while not (self._replicas.closed or old.state.phase == FAILED or self._router.is_drained(old)):  # noqa: ASYNC110 -- rare
            await asyncio.sleep(_LEAVING_POLL_S)
        self._replicas.retiring.remove(old)
        await old.close()
