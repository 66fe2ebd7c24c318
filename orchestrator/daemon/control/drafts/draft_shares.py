"""Which replica of the target has which worker of each draft, and whether it is connected to it. No effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.daemon.control.actions import Action, Send
from orchestrator.daemon.control.drafts.draft_worker import DraftWorker
from orchestrator.protocol.draft_messages import AttachDraft, DraftLink
from orchestrator.protocol.ready import Ready
from policies.serving.draft_sharing import assign_drafts

_NOBODY: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(slots=True)
class _Target:
    """A replica that serves: its worker's number, its host, and the drafts that it knows."""

    worker: int
    host: str
    drafts: Sequence[str]


class DraftShares:
    """Who has which worker, by the numbers that workers have in their pools. Its length: replicas that serve."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._assigned: dict[str, dict[str, int]] = {}  # by draft and replica
        self._connected: dict[str, set[str]] = {}  # by replica: drafts that it says it is connected to
        self._targets_of: dict[tuple[str, int], list[str]] | None = None  # replicas by draft and worker's number

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def drafts(self) -> Iterable[str]:
        """Those of which somebody may have a worker."""
        return self._assigned

    def set_target(self, replica: str, number: int, ready: Ready) -> None:
        """A replica serves by a worker of this number, which is connected to nothing yet."""
        self._targets[replica] = _Target(number, ready.host, ready.drafting.all_drafters)
        self.forget_links(replica)

    def drop_target(self, replica: str) -> None:
        self._targets.pop(replica, None)
        self.forget_links(replica)

    def count_targets(self, draft: str) -> int:
        return sum(draft in target.drafts for target in self._targets.values())

    def forget_links(self, replica: str) -> None:
        """A replica's worker is another one, or none: it is connected to nothing."""
        self._connected.pop(replica, None)

    def note_link(self, replica: str, link: DraftLink) -> None:
        """A replica's worker said how its connection to a draft worker is."""
        if link.state == "connected":
            self._connected.setdefault(replica, set()).add(link.name)
        else:
            self._disconnect(replica, link.name)

    def find_assigned(self, draft: str) -> Mapping[str, int]:
        return self._assigned.get(draft, _NOBODY)

    def list_targets(self, worker: DraftWorker) -> list[str]:
        if worker.leaves:
            return []
        if self._targets_of is None:
            self._targets_of = {}
            for draft, assigned in self._assigned.items():
                for replica, number in assigned.items():
                    self._targets_of.setdefault((draft, number), []).append(replica)
        return self._targets_of.get((worker.name, worker.number), [])

    def list_connected(self, worker: DraftWorker) -> list[str]:
        if not worker.serving:
            return []
        return [replica for replica in self.list_targets(worker) if worker.name in self._connected.get(replica, ())]

    def attach(self, worker: DraftWorker, replicas: Iterable[str]) -> list[Action]:
        if not worker.serving or worker.ready is None:
            return []
        command = AttachDraft(worker.name, worker.ready.endpoint)
        return [Send(self._targets[replica].worker, command) for replica in replicas if replica in self._targets]

    def let_rest(self, worker: DraftWorker, why: str) -> list[Action]:
        replicas = [replica for replica in self.list_targets(worker) if replica in self._targets]
        for replica in replicas:
            self._disconnect(replica, worker.name)
        return [Send(self._targets[replica].worker, AttachDraft(worker.name, None, why)) for replica in replicas]

    def match(self, pools: Mapping[str, Sequence[DraftWorker]]) -> list[Action]:
        """Give each replica the worker that is to draft for it, of those that are of use, by draft."""
        actions: list[Action] = []
        before, self._assigned, self._targets_of = self._assigned, {}, None
        for name, usable in pools.items():
            replicas = {key: target.host for key, target in self._targets.items() if name in target.drafts}
            known = before.get(name, {})
            assigned = self._assigned[name] = assign_drafts(replicas, [worker.rate() for worker in usable], known)
            fresh: dict[int, list[str]] = {}
            for key, number in assigned.items():
                if number != known.get(key):
                    self._disconnect(key, name)
                    fresh.setdefault(number, []).append(key)
            for worker in usable:
                actions += self.attach(worker, fresh.get(worker.number, ()))
        return actions

    def _disconnect(self, replica: str, draft: str) -> None:
        connected = self._connected.get(replica)
        if connected is not None:
            connected.discard(draft)
            if not connected:
                del self._connected[replica]
