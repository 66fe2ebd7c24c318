"""All that control knows, in one place. Only control.step changes it. No effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from orchestrator.daemon.control.drafts.draft_workers import NO_POOLS, DraftWorkers
from orchestrator.daemon.control.health.blame import Blame
from orchestrator.daemon.control.health.health import HealthBoard, Part, PartHealth
from orchestrator.daemon.control.health.watch import Watch, Watched
from orchestrator.daemon.control.replicas.fleet import Fleet
from orchestrator.daemon.control.replicas.model_identities import ModelIdentities
from orchestrator.daemon.control.replicas.replicas import Replicas
from orchestrator.daemon.control.replicas.residency import Residency
from orchestrator.daemon.control.replicas.standbys import Standbys
from orchestrator.daemon.control.replicas.worker_life import WorkerLives
from orchestrator.daemon.control.rollout.retune import Retuning
from orchestrator.daemon.control.rollout.rollout import Rollout
from orchestrator.daemon.control.routing.router import Router
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.streams.steering import OperatorSteering
from orchestrator.daemon.control.streams.streams import Streams
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.blame import LossKind
from policies.serving.failover.health import Health


class State:
    """All that control knows. Whoever reads it changes nothing."""

    def __init__(
        self,
        max_restarts: int,
        least_depth: int = 0,
        quarantine_s: float = 0.0,
        surroundings: Surroundings | None = None,
        draft_pools: Mapping[str, PoolSize] = NO_POOLS,
    ) -> None:
        lives = WorkerLives(max_restarts)
        self.blame = Blame(quarantine_s)
        self.watch = Watch()
        self.identities = ModelIdentities()
        self.replicas = Replicas(lives)
        self.health = HealthBoard()
        self.around = surroundings or Surroundings()
        self.loads = self.around.loads
        self.fleet = Fleet(self.replicas, self.health, self.loads)
        self.streams = Streams(self.blame, self.fleet.count_stream)
        self.drafts = DraftWorkers(lives, draft_pools)
        self.around.list_drafts = self.drafts.list_specs
        self.router = Router(self.replicas, self.streams, self.fleet, self.health, least_depth, self.around)
        self.rollout = Rollout(self.replicas, self.router, self.drafts)
        self.retuning = Retuning()
        self.residency = Residency(self.replicas, self.streams, self.drafts)
        self.standbys = Standbys(self.replicas, self.router, self.drafts, self.health)
        self.steering = OperatorSteering(
            self.replicas, self.streams, self.router, self.health, self.standbys, self.blame
        )
        self.draining = False
        self.settled = False
        self.given_up = False
        self.unwell: dict[Part, PartHealth] = {}
        self.losses: Counter[tuple[int, LossKind]] = Counter()
        self.changed_groups: Counter[int] = Counter()

    def list_parts(self) -> set[Part]:
        """Return every part that a worker is, or is to be, on, and those that an operator holds."""
        replicas = [*self.replicas.with_streams, *self.standbys.list_idle()]
        parts = {part for replica in replicas for part in replica.parts}
        held = [*self.health.list_held(Health.DRAINING), *self.health.list_held(Health.CORDONED)]
        return parts.union((Part("worker", replica.name) for replica in replicas), held)

    def list_watched(self) -> list[Watched]:
        loading = [replica.life for replica in self.fleet.list_loading()] + self.drafts.list_loading()
        return [Watched(life, loading=True) for life in loading if life.running] + [
            Watched(replica.life, loading=False, since_s=replica.busy_s) for replica in self.fleet.list_busy()
        ]

    @property
    def works(self) -> bool:
        return self.fleet.works or self.drafts.loads
