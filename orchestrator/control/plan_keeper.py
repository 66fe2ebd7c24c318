"""Keeps the running plan true: compares its prediction with every round, and plans again when they part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.cluster.port import Round, WorkerSpec
from orchestrator.control.port import PlanView
from orchestrator.errors import OutriderError
from orchestrator.planning.correction import Corrections, Key, key_of, scaled
from orchestrator.planning.proposal import PlanError, Proposal
from policies import drift
from policies.drift import Drift
from policies.pairing import Part, context_tokens
from policies.plan import Option, Role, diff

_NEWEST = 0.05  # weight of the newest round in the measured tokens per second

_log = logging.getLogger(__name__)


class Planned(Protocol):
    """A plan, and how its workers are started: one target a replica, and the draft workers."""

    @property
    def proposal(self) -> Proposal: ...

    @property
    def targets(self) -> Sequence[WorkerSpec]: ...

    @property
    def drafts(self) -> Sequence[WorkerSpec]: ...


class Replacing(Protocol):
    """What executes a plan's changes: control.reconcile.TargetControl."""

    async def replace(self, engine: int, spec: WorkerSpec) -> None: ...


class PlanKeeper:
    """One running plan. `observe` is to be called with each round, in the event loop.

    `plan_again` takes the first proposal and the factors by which costs turned out to differ from it, and returns
    another plan.
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
        self._options = _options(running.proposal)
        self._corrections: dict[Key, float] = {}
        self._drifts = [Drift() for _ in self._options]
        self._tokens_per_s = [0.0 for _ in self._options]
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
        worst = max(self._drifts, key=lambda one: abs(one.log_ratio))
        return PlanView(
            predicted_tokens_per_s=self.proposal.plan.goodput_tokens_per_s,
            measured_tokens_per_s=sum(self._tokens_per_s),
            ratio=worst.ratio,
            rounds=sum(one.rounds for one in self._drifts),
            plans=self._plans,
            moves=self._moves,
            last=self._last,
        )

    def observe(self, done: Round) -> None:
        """Compare a round with its prediction. Rounds that read prompts say nothing: nobody knows their share."""
        engine, sequences, workload = done.engine, len(done.deltas), self.proposal.wanted.workload
        if not sequences or sequences != done.sequences or engine >= len(self._options):
            return
        option = self._options[engine]
        if done.rows > sequences * (workload.depth_bound + 1 + option.paid_rows):
            return
        held = [one.stats.prompt_tokens + one.stats.generated for one in done.deltas if one.stats is not None]
        context = sum(held) / len(held) if held else context_tokens(workload)
        predicted_ms = Part(option).ms(done.rows, sequences, context)
        measured_ms = done.round_ms - done.draft_ms
        self._drifts[engine] = drift.observed(self._drifts[engine], predicted_ms, measured_ms, self._tolerance)
        self._count(engine, sum(len(one.tokens) for one in done.deltas), done.round_ms)
        due = self._clock.monotonic_s() - self._planned_s >= drift.pause_s(self._plans)
        if due and self._task is None and drift.drifted(self._drifts[engine]):
            self._task = asyncio.get_running_loop().create_task(self._again(engine), name="plan again")
            self._task.add_done_callback(self._ended)

    def _count(self, engine: int, tokens: int, round_ms: float) -> None:
        if round_ms > 0.0:
            weight = _NEWEST if self._tokens_per_s[engine] else 1.0
            self._tokens_per_s[engine] += weight * (tokens / round_ms * MS_PER_S - self._tokens_per_s[engine])

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

    async def _again(self, engine: int) -> None:
        ratio, before = self._drifts[engine].ratio, self.proposal.plan
        shard = before.replicas[engine].shards[0]
        key = key_of(shard)
        self._corrections[key] = self._corrections.get(key, 1.0) * ratio
        self._plans += 1
        self._planned_s = self._clock.monotonic_s()
        _log.warning(
            "rounds on %s take %.2f times what was predicted (tolerance %g): planning again",
            *(shard.device, ratio, self._tolerance),
        )
        # What the running plan reaches, as far as it is known: replicas that run alike have drifted alike.
        reached = sum(
            one.prediction.goodput_tokens_per_s / (ratio if key_of(one.shards[0]) == key else 1.0)
            for one in before.replicas
        )
        try:
            found = await asyncio.to_thread(self._plan_again, self._first, dict(self._corrections))
            await self._take(found, reached)
        except OutriderError as error:  # go on as before, and compare with costs as they turned out to be
            self._options = [scaled(one, ratio) if key_of(one) == key else one for one in self._options]
            self._compared_anew(f"kept: {error}")

    async def _take(self, found: Planned, reached: float) -> None:
        """Run another plan where that is worth a move. Raises OutriderError, with the reason, where it is not, or its
        workers do not start."""
        before, after = self.proposal.plan, found.proposal.plan
        promised = after.goodput_tokens_per_s
        changes = "; ".join(
            f"{one.part}: {one.before or 'none'} -> {one.after or 'none'}"
            for one in diff(before, after).changes
            if one.restart
        )
        now = f"{reached:.1f} tokens/s with corrected costs"
        if not changes:
            self._adopt(found, f"kept: {now}, and still the best")
            return
        if not drift.worth_moving(reached, promised):
            raise PlanError(f"{now}, and the best other is predicted to reach {promised:.1f} only")
        if len(found.targets) != len(self._running.targets) or found.drafts != self._running.drafts:
            raise PlanError(f"{now}; {promised:.1f} need a restart of the daemon, for other workers: {changes}")
        for engine, (old, new) in enumerate(zip(self._running.targets, found.targets, strict=True)):
            if old != new:
                await self._control.replace(engine, new)
        self._moves += 1
        self._tokens_per_s = [0.0 for _ in self._options]
        self._adopt(found, f"changed, {reached:.1f} -> {promised:.1f} tokens/s predicted: {changes}")

    def _adopt(self, found: Planned, told: str) -> None:
        self._running, self._options = found, _options(found.proposal)
        self._compared_anew(told)

    def _compared_anew(self, told: str) -> None:
        self._drifts = [Drift() for _ in self._options]
        self._last = told
        _log.info("the plan is %s", told)


def _options(proposal: Proposal) -> list[Option]:
    """Return the option that each replica's target runs."""
    known = {key_of(one): one for one in proposal.cluster.options if one.role is Role.TARGET}
    return [known[key_of(replica.shards[0])] for replica in proposal.plan.replicas]
