"""Lets replicas decode by other options without another worker: who is asked, and who has answered. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.daemon.control.actions import Action, FinishRetune, LogLine, Send
from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.protocol.commands import Retune
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Retuned

_LOADED = ("model", "max_running")
"""The options that a worker takes when it loads, and keeps."""


class Retuning:
    """The one retune that is under way. `asked`: the workers that have not answered yet."""

    def __init__(self) -> None:
        self._asked: set[int] | None = None
        self._error = ""

    @property
    def under_way(self) -> bool:
        return self._asked is not None

    def ask(self, replicas: Sequence[Replica], specs: Mapping[int, WorkerSpec]) -> list[Action]:
        """Ask replicas, by their numbers. One that has no process takes its options with the next start."""
        self._asked, self._error = set(), ""
        actions: list[Action] = []
        for replica in replicas:
            spec = specs.get(replica.engine)
            if spec is None or spec.options == replica.spec.options:
                continue
            replica.life.spec = msgspec.structs.replace(spec, name=replica.spec.name)
            if replica.life.running:
                self._asked.add(replica.worker)
                actions.append(Send(replica.worker, Retune(spec.options)))
        return actions

    def observe_answer(self, replica: Replica, answer: Retuned) -> list[Action]:
        if answer.why:
            self._error = self._error or f"worker {replica.name}: {answer.why}"
            line = LogLine("error", "worker %s stays as it was: %s", (replica.name, answer.why))
        else:
            line = LogLine("info", "worker %s decodes by other options", (replica.name,))
        self.forget(replica.worker)
        return [line]

    def forget(self, worker: int) -> None:
        """A worker answers no more: the next one in its place begins with the options of the retune."""
        if self._asked is not None:
            self._asked.discard(worker)

    def advance(self) -> list[Action]:
        if self._asked is None or self._asked:
            return []
        self._asked = None
        return [FinishRetune(self._error)]


def match_retunable(replicas: Mapping[int, WorkerSpec], specs: Sequence[WorkerSpec]) -> dict[int, WorkerSpec] | None:
    """Return which of these specs each replica can take on without another worker, by the replicas' numbers; None where
    the workers have to be others, or more, or fewer. Pure."""
    left, matches = list(specs), dict[int, WorkerSpec]()
    for seen_as in (leave_name, _as_loaded):  # who runs as one of them is to run goes on as it is
        for engine, running in replicas.items():
            alike = (spec for spec in left if seen_as(spec) == seen_as(running))
            if engine not in matches and (mine := next(alike, None)) is not None:
                left.remove(mine)
                matches[engine] = mine
    return None if left or len(matches) < len(replicas) else matches


def _as_loaded(spec: WorkerSpec) -> WorkerSpec:
    kept = {name: spec.options[name] for name in _LOADED if name in spec.options}
    return msgspec.structs.replace(spec, name="", options=kept)
