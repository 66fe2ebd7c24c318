"""Lets a target's worker go on by other options: its policies at once, its drafters once they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from adapters.contract import ModelRefused
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.variants import VariantDrafter
from orchestrator.engine.loop import DecodeLoop, LoopTuning
from orchestrator.engine.variants import SpeculationVariants
from orchestrator.loading.drafters import BuiltDrafters, Remotes, build_variant_drafters
from orchestrator.loading.models import LoadedTarget, silent
from orchestrator.loading.options import EngineOptions
from orchestrator.workers.draft_messages import AttachDraft, DraftLink
from orchestrator.workers.messages import Ready
from policies.speculation.adaptive import Adaptive
from policies.speculation.policy import DepthPolicy

_Drafters = tuple[BuiltDrafters, Remotes]


class EngineRetuner:
    """Implements engine.worker_engine.Retuner over one loaded target. `describe` says how the worker is with options
    and a drafter; `arrange` how it serves those who say nothing."""

    def __init__(
        self,
        target: LoadedTarget,
        options: EngineOptions,
        drafters: _Drafters,
        loop: DecodeLoop,
        *,
        report: Callable[[DraftLink], None],
        describe: Callable[[EngineOptions, Drafter | None], Ready],
        arrange: Callable[[EngineOptions, VariantDrafter | None], SpeculationVariants],
    ) -> None:
        self._target = target
        self._options = options
        self._built, self._remotes = drafters
        self._chosen: frozenset[str] | None = None
        self._loop = loop
        self._report = report
        self._describe = describe
        self._arrange = arrange
        self.variants = arrange(options, self._built.by_variant)

    def prepare(self, options: dict[str, Any]) -> Callable[[], Ready]:
        """See engine.worker_engine.Retuner. Drafters are loaded beside those that draft, where they are others."""
        wanted = msgspec.convert(options, EngineOptions)
        if (wanted.model, wanted.max_running) != (self._options.model, self._options.max_running):
            raise ModelRefused("its model cannot be another one while it runs")
        fresh: _Drafters | None = None
        if _list_drafters(wanted) != _list_drafters(self._options):
            remotes = Remotes(self._report)
            fresh = (build_variant_drafters(wanted, self._target, silent, remotes), remotes)
        return lambda: self._apply(wanted, fresh)

    def attach(self, command: AttachDraft) -> None:
        """Connect a drafter to its process."""
        self._remotes.attach(command)

    def choose(self, names: Collection[str] | None) -> None:
        """See engine.worker_engine.Retuner. Drafters that come later are chosen by it, too."""
        self._chosen = None if names is None else frozenset(names)
        if self._built.default is not None:
            self._built.default.choose(self._chosen)

    def close(self) -> None:
        """Give back the drafters and the model."""
        if self._built.whole is not None:
            self._built.whole.close()
        self._target.model.close()

    def _apply(self, options: EngineOptions, fresh: _Drafters | None) -> Ready:
        policy = self._choose_policy(options)
        self._options = options
        if fresh is not None:
            self._built, self._remotes = fresh
            self._loop.exchange(self._built.whole).close()
            self.choose(self._chosen)
        self._loop.retune(
            LoopTuning(
                policy,
                options.deepest,
                options.max_itl_ms,
                options.prefix_reuse,
                options.tolerance,
                options.low_acceptance_rate,
                options.objectives,
            ),
            drafts=self._built.whole is not None,
        )
        self.variants.take(self._arrange(options, self._built.by_variant))
        return self._describe(options, self._built.whole)

    def _choose_policy(self, options: EngineOptions) -> DepthPolicy:
        """Return the policy of other options. What it knows of costs stays; the rest is learned anew where drafters or
        settings are others."""
        before = self._options
        same = (options.pid, options.starting_depth) == (before.pid, before.starting_depth)
        if same and _list_drafters(options) == _list_drafters(before):
            return self._loop.policy
        return Adaptive(self._loop.policy.cost, options.pid, options.starting_depth)


def _list_drafters(options: EngineOptions) -> object:
    canary = options.canary
    return options.drafters, canary.drafters if canary is not None else None
