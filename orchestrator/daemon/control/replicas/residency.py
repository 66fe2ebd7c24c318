"""Whether the target's model is in memory, where requests load it and it gives way to others. No effects.

Who comes and goes is decided over all models (policies.serving.residency). Here it is carried out for one: a model that
leaves has its requests to the end, holds those that come later, and then ends its workers; none follows until it is
loaded again, for whoever is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from orchestrator.daemon.control.actions import Action, EndStream, LogLine, StopWorker, TellStage
from orchestrator.daemon.control.drafts.draft_workers import DraftWorkers
from orchestrator.daemon.control.port import ResidencyView
from orchestrator.daemon.control.replicas.replicas import Replicas
from orchestrator.daemon.control.replicas.worker_life import Stage
from orchestrator.daemon.control.streams.streams import Streams
from orchestrator.errors import RequestError
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.residency import Keep, ModelStage

# Workers that one load may lose before whoever waits is told so, and others have their turn. Not tuned.
LOAD_TRIES: Final = 3
_RETRY_AFTER_S = 10  # behind a load that failed: another model's load may be over by then. Not tuned.
_CHANGING: Final = (ModelStage.LOADING, ModelStage.LEAVING, ModelStage.UNLOADING)
_NEVER_ASKED = "no request has asked for it yet"


@dataclass(frozen=True, slots=True)
class ResidencyTerms:
    """`keep` and `idle_s` as configured. `needs`: bytes by device, as they are known before it is loaded."""

    keep: Keep
    idle_s: float
    needs: dict[str, int] = field(default_factory=dict)


class Residency:
    """Of one target. Without `terms` its model stays loaded. `unloads` counts by why: "idle" or "room"."""

    def __init__(self, replicas: Replicas, streams: Streams, drafts: DraftWorkers) -> None:
        self.terms: ResidencyTerms | None = None
        self.stage = ModelStage.LOADED
        self.loads = 0
        self.failed_loads = 0
        self.load_s = 0.0
        self.unloads: Counter[str] = Counter()
        self.drafts: Sequence[WorkerSpec] = ()
        self._replicas = replicas
        self._streams = streams
        self._drafts = drafts
        self._opened = False
        self._rested = False
        self._lost = 0
        self._asked_s = 0.0
        self._why = _NEVER_ASKED
        self._gone_for = ""
        self._ending: set[int] = set()

    @property
    def managed(self) -> bool:
        return self.terms is not None

    @property
    def changes(self) -> bool:
        """Whether there is something to look at after each event."""
        return self.stage in _CHANGING

    def manage(self, terms: ResidencyTerms) -> None:
        self.terms, self.stage = terms, ModelStage.UNLOADED
        self.mark_unloaded()

    def open(self, now_s: float) -> list[Action]:
        self._opened = True
        return self._begin(now_s) if self.stage is not ModelStage.UNLOADED else []

    def load(self, now_s: float) -> list[Action]:
        if self.stage is ModelStage.LEAVING:
            self.stage = ModelStage.LOADED
            self._streams.release_later()
            return [self._tell()]
        if self.stage is not ModelStage.UNLOADED:
            return []
        self.stage, self._lost, self._asked_s, self._gone_for = ModelStage.LOADING, 0, now_s, ""
        self._streams.release_later()
        return [*(self._begin(now_s) if self._opened else []), self._tell()]

    def unload_when_idle(self, gone_for: str) -> list[Action]:
        """Unload the model once its requests are over. `gone_for`: the model that its room is for; "": it is idle."""
        if self.stage is not ModelStage.LOADED or not self.managed:
            return []
        self.stage, self._gone_for = ModelStage.LEAVING, gone_for
        self._streams.hold_later()
        return [self._tell()]

    def run_drafts(self, specs: Sequence[WorkerSpec]) -> list[Action]:
        self.drafts = specs
        return [] if self._rested else self._drafts.run_these(specs)

    def begin_anew(self, now_s: float) -> None:
        if self.stage is ModelStage.FAILED:
            self.stage, self._lost, self._asked_s = ModelStage.LOADING, 0, now_s

    def observe_loss(self) -> None:
        self._lost += 1

    def observe_ended(self, worker: int) -> None:
        self._ending.discard(worker)

    def advance_stage(self, now_s: float, *, failed: bool, exchanged: bool) -> list[Action]:
        """Go on where that is possible. `failed`: no worker can ever serve; `exchanged`: others take their place."""
        match self.stage:
            case ModelStage.LOADING if any(replica.serving for replica in self._replicas.serving):
                return self._finish_load(now_s)
            case ModelStage.LOADING if failed and not exchanged:
                self.stage, self.failed_loads = ModelStage.FAILED, self.failed_loads + 1
                return [self._tell()]
            case ModelStage.LOADING if self._lost >= LOAD_TRIES and not exchanged:
                return self._give_up_load(now_s)
            case ModelStage.LEAVING if not self._streams.has_earlier:
                return self._unload()
            case ModelStage.UNLOADING if self._is_gone():
                self.stage = ModelStage.UNLOADED
                self.mark_unloaded()
                return [self._tell()]
            case _:
                return []

    def mark_unloaded(self) -> None:
        for replica in self._replicas.serving:
            replica.state.mark_unloaded(self._why)

    def view_residency(self, unread: int) -> ResidencyView | None:
        """Return how it stands; None where it stays loaded anyhow. `unread`: requests that wait outside control."""
        if self.terms is None:
            return None
        why = "" if self.stage in (ModelStage.LOADED, ModelStage.LOADING) else self._why
        counts = (self.loads, self.failed_loads, dict(self.unloads))
        return ResidencyView(
            self.terms.keep,
            self.terms.idle_s,
            "evicted" if self.stage is ModelStage.UNLOADED and self._gone_for else self.stage.value,
            why,
            unread + (self._streams.held if self.stage is not ModelStage.LOADED else 0),
            self.load_s,
            *counts,
            dict(self.terms.needs),
        )

    def _begin(self, now_s: float) -> list[Action]:
        for replica in self._replicas.serving:
            replica.state.mark_loading()
        return [action for replica in self._replicas.serving for action in replica.begin(now_s)]

    def _finish_load(self, now_s: float) -> list[Action]:
        self.stage, self.load_s = ModelStage.LOADED, now_s - self._asked_s
        self.loads += 1
        drafts = self._drafts.run_these(self.drafts) if self._rested else []  # else they are there, and begin with it
        self._rested = False
        return [*drafts, self._tell()]

    def _give_up_load(self, now_s: float) -> list[Action]:
        """End whoever waits for a load that does not succeed, and leave the memory to others."""
        cause = next((replica.state.detail for replica in self._replicas.serving), "")
        self._why = f"it could not be loaded: {cause}"
        self.failed_loads += 1
        actions: list[Action] = [
            LogLine("error", "the model could not be loaded, and is not tried again: %s", (cause,))
        ]
        error = RequestError(
            f"the model {self._why}",
            status=503,
            code="model_not_loaded",
            retry_after_s=_RETRY_AFTER_S,
        )
        for stream in self._streams.live():
            self._streams.drop(stream, error.code or "error", now_s)
            actions.append(EndStream(stream.key, error))
        return [*actions, *self._rest(), self._tell()]

    def _unload(self) -> list[Action]:
        self._why = f"it gave way to {self._gone_for}" if self._gone_for else "it was not used"
        self.unloads["room" if self._gone_for else "idle"] += 1
        return [*self._rest(), self._tell()]

    def _rest(self) -> list[Action]:
        self.stage, self._rested = ModelStage.UNLOADING, True
        actions = [action for replica in self._replicas.serving for action in replica.life.rest()]
        for replica in self._replicas.serving:
            actions += self._drafts.detach_target(replica.name)
        actions += self._drafts.run_these([])
        self._ending |= {action.worker for action in actions if isinstance(action, StopWorker)}
        return actions

    def _is_gone(self) -> bool:
        lives = [replica.life for replica in self._replicas.serving]
        return not self._ending and all(life.stage is Stage.IDLE for life in lives)

    def _tell(self) -> TellStage:
        return TellStage(self.stage, self._why)
