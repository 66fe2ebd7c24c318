"""What keeping a plan needs of others: a plan with its workers, who makes one, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.planning.correction import Corrections, Key
from orchestrator.planning.proposal import PlanProposal
from orchestrator.protocol.contract import WorkerSpec


@dataclass(frozen=True, slots=True)
class StartPlan:
    """A plan, and how its workers are started: each replica's target, its draft workers, and standbys."""

    proposal: PlanProposal
    targets: tuple[WorkerSpec, ...]
    drafts: tuple[tuple[WorkerSpec, ...], ...] = ()
    standbys: tuple[StandbySpec, ...] = ()


class PlanExecutor(Protocol):
    """What executes a plan's changes: control.controller.TargetControl."""

    async def change(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] | None = None,
    ) -> list[int]: ...


class Planner(Protocol):
    """How plans are made; both calls may take their time, and run in a thread."""

    def again(
        self,
        first: PlanProposal,
        corrections: Corrections,
        running: Sequence[WorkerSpec],
        health: Mapping[str, tuple[float, str]],
        loads: Mapping[str, DeviceLoad],
    ) -> StartPlan:
        """Return another plan, by the factors by which costs turned out to differ from the first one's, and by the
        `health` and the `loads` of devices and hosts (planning.correction). What it needs of the `running` targets has
        their very specs."""
        ...

    def mark_drifted(self, first: PlanProposal, key: Key, ratio: float) -> str:
        """Note that a target's profile does not hold: rounds take `ratio` times what it predicts. Returns that in a
        line, with when it is measured again."""
        ...
