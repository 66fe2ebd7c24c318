"""Keeps the running plan true: compares its prediction with every round, and plans again when they part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.cluster.port import Round, WorkerSpec
from orchestrator.control.port import PlanView
from orchestrator.errors import OutriderError
from orchestrator.planning.correction import Corrections, Key, key_of
from orchestrator.planning.proposal import Proposal
from policies import drift
from policies.drift import Drift
from policies.pairing import Part, context_tokens
from policies.plan import Option, Role, diff

_NEWEST = 0.05  # weight of the newest round in the measured tokens per second

_log = logging.getLogger(__name__)


class Planned(Protocol):
    """A plan and how its workers are started."""

    @property
    def proposal(self) -> Proposal: ...

    @property
    def targets(self) -> tuple[WorkerSpec, ...]: ...


class Replacing(Protocol):
    """What executes a plan's changes: control.reconcile.TargetControl."""

    async def replace(self, engine: int, spec: WorkerSpec) -> None: ...


class PlanKeeper:
    """One running plan. `observe` is to be called with each round, in the event loop.

    `plan_again` takes the running proposal and the factors by which costs differ, and returns another plan.
    """

    def __init__(
        self,
        running: Planned,
        control: Replacing,
        plan_again: Callable[[Proposal, Corrections], Planned],
        tolerance: float,
        clock: Clock,
    ) -> None:
        self._first = running.proposal
        self._running = running
        self._control = control
        self._plan_again = plan_again
        self._tolerance = tolerance
        self._clock = clock
        self._option = _option(running.proposal)
        self._corrections: dict[Key, float] = {}
        self._drift = Drift()
        self._tokens_per_s = 0.0
        self._plans = 0
        self._moves = 0
        self._planned_s = clock.monotonic_s()
        self._last = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def proposal(self) -> Proposal:
        """The running plan, and what it was made from."""
        return self._running.proposal

    def view(self) -> PlanView:
        """Return what was predicted and what is measured."""
        prediction = self.proposal.plan.replicas[0].prediction
        return PlanView(
            predicted_tokens_per_s=prediction.goodput_tokens_per_s,
            measured_tokens_per_s=self._tokens_per_s,
            ratio=self._drift.ratio,
            rounds=self._drift.rounds,
            plans=self._plans,
            moves=self._moves,
            last=self._last,
        )

    def observe(self, done: Round) -> None:
        """Compare a round with its prediction. Rounds that read prompts say nothing: nobody knows their share."""
        sequences = len(done.deltas)
        bound = self.proposal.wanted.workload.depth_bound
        if not sequences or sequences != done.sequences or done.rows > sequences * (bound + 1 + self._option.paid_rows):
            return
        held = [one.stats.prompt_tokens + one.stats.generated for one in done.deltas if one.stats is not None]
        context = sum(held) / len(held) if held else context_tokens(self.proposal.wanted.workload)
        predicted_ms = Part(self._option).ms(done.rows, sequences, context)
        measured_ms = done.round_ms - done.draft_ms
        self._drift = drift.observed(self._drift, predicted_ms, measured_ms, self._tolerance)
        tokens = sum(len(one.tokens) for one in done.deltas)
        if done.round_ms > 0.0:
            now = tokens / done.round_ms * MS_PER_S
            weight = _NEWEST if self._tokens_per_s else 1.0
            self._tokens_per_s += weight * (now - self._tokens_per_s)
        due = self._clock.monotonic_s() - self._planned_s >= drift.pause_s(self._plans)
        if due and self._task is None and drift.drifted(self._drift):
            self._task = asyncio.get_running_loop().create_task(self._again(), name="plan again")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End a change that is under way."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("planning again failed: %s", error, exc_info=error)

    async def _again(self) -> None:
        ratio = self._drift.ratio
        shard = self.proposal.plan.replicas[0].shards[0]
        key = key_of(shard)
        self._corrections[key] = self._corrections.get(key, 1.0) * ratio
        self._plans += 1
        self._planned_s = self._clock.monotonic_s()
        _log.warning(
            "rounds on %s take %.2f times what was predicted (tolerance %g): planning again",
            *(shard.device, ratio, self._tolerance),
        )
        try:
            found = await asyncio.to_thread(self._plan_again, self._first, dict(self._corrections))
        except OutriderError as error:
            self._told(f"kept: {error}")
            self._measured_anew(None)
            return
        reached = self.proposal.plan.replicas[0].prediction.goodput_tokens_per_s / ratio
        promised = found.proposal.plan.replicas[0].prediction.goodput_tokens_per_s
        same = key_of(found.proposal.plan.replicas[0].shards[0]) == key
        if same or not drift.worth_moving(reached, promised):
            why = "still the best" if same else f"another is predicted to reach {promised:.1f} tokens/s"
            self._told(f"kept, with corrected costs: {reached:.1f} tokens/s now, {why}")
            self._measured_anew(found if same else None)
            return
        await self._move(found, reached, promised)

    async def _move(self, found: Planned, reached: float, promised: float) -> None:
        changes = "; ".join(
            f"{one.part}: {one.before or 'none'} -> {one.after or 'none'}"
            for one in diff(self.proposal.plan, found.proposal.plan).changes
        )
        try:
            for engine, spec in enumerate(found.targets[: len(self._running.targets)]):
                await self._control.replace(engine, spec)
        except OutriderError as error:
            self._told(f"kept: {error}")
            self._measured_anew(None)
            return
        self._moves += 1
        self._running, self._option = found, _option(found.proposal)
        self._tokens_per_s = 0.0
        self._told(f"changed, {reached:.1f} -> {promised:.1f} tokens/s predicted: {changes}")
        self._measured_anew(found)

    def _measured_anew(self, found: Planned | None) -> None:
        """Compare from now on with corrected costs; the plan of a `found` has them already."""
        if found is not None:
            self._running, self._option = found, _option(found.proposal)
        else:
            factor = self._drift.ratio
            self._option = replace(
                self._option,
                cost=self._option.cost.scaled(factor),
                overhead_ms=factor * self._option.overhead_ms,
                overhead_sequence_ms=factor * self._option.overhead_sequence_ms,
            )
        self._drift = Drift()

    def _told(self, what: str) -> None:
        self._last = what
        _log.info("the plan is %s", what)


def _option(proposal: Proposal) -> Option:
    """Return the option that the plan's first target runs."""
    key = key_of(proposal.plan.replicas[0].shards[0])
    return next(one for one in proposal.cluster.options if one.role is Role.TARGET and key_of(one) == key)
