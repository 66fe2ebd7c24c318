"""Lets a target's worker go on by other options: its policies at once, its drafters once they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from adapters.contract import ModelRefused, silent
from adapters.model_identity import ModelIdentity
from orchestrator.protocol.draft_messages import AttachDraft, DraftLink
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.protocol.model_pins import list_pinned, pin_options
from orchestrator.protocol.ready import Ready
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.engine.flights import Flights
from orchestrator.worker.engine.loop import DecodeLoop, LoopTuning
from orchestrator.worker.engine.variants import SpeculationVariants
from orchestrator.worker.loading.drafters import BuiltDrafters, Remotes, build_variant_drafters
from orchestrator.worker.loading.models import LoadedSource
from policies.speculation.adaptive import Adaptive
from policies.speculation.policy import DepthPolicy

_Drafters = tuple[list[BuiltDrafters], Remotes]


class EngineRetuner:
    """Implements engine.worker_engine.Retuner over one loaded target. `drafters`: of each flight. `describe` says how
    the worker is with options and drafters; `arrange` how it serves those who say nothing."""

    def __init__(
        self,
        target: LoadedSource,
        options: EngineOptions,
        drafters: _Drafters,
        loop: Flights,
        *,
        report: Callable[[DraftLink], None],
        describe: Callable[[EngineOptions, Sequence[Drafter]], Ready],
        arrange: Callable[[EngineOptions, VariantDrafter | None], SpeculationVariants],
    ) -> None:
        self._target = target
        self._built, self._remotes = drafters
        self._options = self._as_loaded(msgspec.to_builtins(options))
        self._chosen: frozenset[str] | None = None
        self._loop = loop
        self._report = report
        self._describe = describe
        self._arrange = arrange
        self.variants = arrange(options, self._built[0].by_variant)
        loop.joins = self.variants.join_drafter

    def prepare(self, options: dict[str, Any]) -> Callable[[], Ready]:
        """Drafters are loaded beside those that draft, where they are others."""
        wanted = self._as_loaded(options)
        # What another process loads is no other model to this one.
        running = _pin(msgspec.to_builtins(self._options), list_pinned(msgspec.to_builtins(wanted)))
        if (wanted.model, wanted.max_running) != (running.model, running.max_running):
            raise ModelRefused("its model cannot be another one while it runs")
        fresh: _Drafters | None = None
        if _list_drafters(wanted) != _list_drafters(running):
            remotes = Remotes(self._report)
            fresh = (build_variant_drafters(wanted, self._target, silent, remotes, len(self._built)), remotes)
        return lambda: self._apply(wanted, fresh)

    def attach(self, command: AttachDraft) -> None:
        self._remotes.attach(command)

    def choose(self, names: Collection[str] | None) -> None:
        """Drafters that come later are chosen by it, too."""
        self._chosen = None if names is None else frozenset(names)
        for built in self._built:
            if built.default is not None:
                built.default.choose(self._chosen)

    def close(self) -> None:
        for drafter in list_whole(self._built):
            drafter.close()
        self._target.model.close()

    def _apply(self, options: EngineOptions, fresh: _Drafters | None) -> Ready:
        self._loop.settle()
        policies = [self._choose_policy(options, loop) for loop in self._loop.loops]
        self._options = options
        if fresh is not None:
            self._built, self._remotes = fresh
            for loop, built in zip(self._loop.loops, self._built, strict=True):
                loop.exchange(built.whole).close()
            self.choose(self._chosen)
            self._options = self._as_loaded(msgspec.to_builtins(options))
        for loop, built, policy in zip(self._loop.loops, self._built, policies, strict=True):
            loop.retune(_tune(options, policy), drafts=built.whole is not None)
        self.variants.take(self._arrange(options, self._built[0].by_variant))
        return self._describe(options, list_whole(self._built))

    def _as_loaded(self, options: dict[str, Any]) -> EngineOptions:
        """Return options that say the content of all models that are loaded, so that others differ from them, and have
        no drafts where there can be none."""
        loaded = list_identities(self._target, list_whole(self._built))
        pinned = _pin(options, {identity.source: identity for identity in loaded})
        return pinned if self._target.model.capabilities.rewinds else pinned.without_drafts()

    def _choose_policy(self, options: EngineOptions, loop: DecodeLoop) -> DepthPolicy:
        """Return a loop's policy of other options. What it knows of costs stays; the rest is learned anew where
        drafters or settings are others."""
        before = self._options
        same = (options.pid, options.starting_depth) == (before.pid, before.starting_depth)
        if same and _list_drafters(options) == _list_drafters(before):
            return loop.policy
        return Adaptive(loop.policy.cost, options.pid, options.starting_depth)


def list_whole(built: Sequence[BuiltDrafters]) -> list[Drafter]:
    """Return the drafters that loops ask: one for each, or none."""
    return [drafters.whole for drafters in built if drafters.whole is not None]


def list_identities(target: LoadedSource, drafters: Sequence[Drafter]) -> list[ModelIdentity]:
    """Return the content of all models that this process has loaded, the target's first."""
    states = drafters[0].states() if drafters else []
    drafts = [state.identity for state in states if state.remote is None]
    return [identity for identity in (target.identity, *drafts) if identity is not None]


def _pin(options: dict[str, Any], known: Mapping[str, ModelIdentity]) -> EngineOptions:
    return msgspec.convert(pin_options(options, known), EngineOptions)


def _tune(options: EngineOptions, policy: DepthPolicy) -> LoopTuning:
    return LoopTuning(
        policy,
        options.deepest,
        options.max_itl_ms,
        options.prefix_reuse,
        options.tolerance,
        options.low_acceptance_rate,
        options.objectives,
    )


def _list_drafters(options: EngineOptions) -> object:
    canary = options.canary
    return options.drafters, canary.drafters if canary is not None else None
