"""Builds the drafters of a worker, in order of cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters.contract import AdapterError, DeviceLost, ModelRefused
from adapters.model_store import ModelReplaced
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import AttachDraft, DrafterState, DraftLink
from orchestrator.protocol.load_options import (
    DraftOptions,
    EngineOptions,
    IndexOptions,
    ModelDraftOptions,
    RemoteOptions,
    SuffixOptions,
)
from orchestrator.worker.drafting.cascade import Cascade, ContinuingDrafter, count_draft_rows
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.guard import FailedDrafter, GuardedDrafter
from orchestrator.worker.drafting.index import IndexDrafter
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.loading.models import LoadedSource, load_model
from orchestrator.worker.loading.prepared import OnProgress, silent
from orchestrator.worker.loading.statistics import NO_STATISTICS, FoundStatistics, find_statistics
from orchestrator.worker.loading.vocabularies import (
    VocabularyPair,
    compare_vocabularies,
    prepare_tokenizer,
    remote_pair,
    translating,
)
from orchestrator.worker.measuring.slots import SomeSlots
from policies.models.vocabulary import Match
from policies.serving.canary import CanaryVariant


class Remotes:
    """The drafters of a target's worker that are in other processes, by name: one for each flight, with a connection of
    its own. `report` hears how they do."""

    def __init__(self, report: Callable[[DraftLink], None]) -> None:
        self._report = report
        self._drafters: dict[str, list[RemoteDrafter]] = {}

    def build(
        self, options: ModelDraftOptions, remote: RemoteOptions, target: LoadedSource, pair: VocabularyPair
    ) -> Drafter:
        """Return a drafter that waits to be attached. Raises what preparing its tokenizer does."""
        tokenizer_dir = prepare_tokenizer(options) if pair.match is Match.DIFFERS else ""
        drafter = RemoteDrafter(
            options.name,
            fingerprint=pair.draft_fingerprint,
            device=target.model.capabilities.device,
            limits=RemoteLimits(remote.max_wait_ms, remote.answer_timeout_s),
            clock=SystemClock(),
            report=self._report,
        )
        self._drafters.setdefault(options.name, []).append(drafter)
        return drafter if pair.match is not Match.DIFFERS else translating(drafter, target, tokenizer_dir)

    def attach(self, command: AttachDraft) -> None:
        """Connect a drafter to its process; one that was exchanged meanwhile is ignored."""
        for drafter in self._drafters.get(command.name, ()):
            drafter.attach(command.door)


class BuiltDrafters(NamedTuple):
    """Of a worker: the one that its loop asks, the one of requests that are not the canary's, and the one that tells
    both apart. None: there is no such drafter."""

    whole: Drafter | None
    default: ChainDrafter | None
    by_variant: VariantDrafter | None = None


@dataclass(slots=True)
class _Flight:
    """Which of `count` flights is built for, and what all of them share: draft models, stores of outputs, and which
    variant requests are in."""

    number: int = 0
    count: int = 1
    models: dict[str, LoadedSource] = field(default_factory=dict)
    suffixes: dict[str, SuffixDrafter] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)


def build_drafter(
    options: EngineOptions, target: LoadedSource, progress: OnProgress = silent, remotes: Remotes | None = None
) -> ChainDrafter | None:
    """Return the drafter, with nothing remembered; None where speculation is off. A canary has no part in it.

    Without `remotes` every draft model runs in this process, wherever the configuration puts it. Raises what adapters
    raise for a draft model that cannot be used; a device that fails while it loads one costs the draft only.
    """
    return _build_chain(options.drafters, options, target, progress, remotes, _Flight())


def build_variant_drafters(
    options: EngineOptions, target: LoadedSource, progress: OnProgress, remotes: Remotes, flights: int = 1
) -> list[BuiltDrafters]:
    """Return the drafters of a worker, the canary's among them, for each of so many flights. They share the models, in
    slots of their own, and what is remembered of outputs. Raises as `build_drafter`."""
    every: list[BuiltDrafters] = []
    flight = _Flight(count=flights)
    try:
        for flight.number in range(flights):
            every.append(_build_variants(options, target, progress, remotes, flight))
    except BaseException:
        for built in every:
            if built.whole is not None:
                built.whole.close()
        raise
    return every


def _build_variants(
    options: EngineOptions, target: LoadedSource, progress: OnProgress, remotes: Remotes, flight: _Flight
) -> BuiltDrafters:
    default = _build_chain(options.drafters, options, target, progress, remotes, flight)
    canary = options.canary
    if canary is None or not canary.drafters:
        return BuiltDrafters(default, default)
    try:
        own = _build_chain(canary.drafters, options, target, progress, remotes, flight)
    except BaseException:
        if default is not None:
            default.close()
        raise
    variants = VariantDrafter(default, {} if own is None else {CanaryVariant.CANARY.value: own}, flight.joined)
    return BuiltDrafters(variants, default, variants)


def _build_chain(
    drafters: Sequence[DraftOptions],
    options: EngineOptions,
    target: LoadedSource,
    progress: OnProgress,
    remotes: Remotes | None,
    flight: _Flight,
) -> ChainDrafter | None:
    if not target.model.capabilities.rewinds:
        return None
    built: list[Drafter] = []
    cheaper: list[ContinuingDrafter] = []
    try:
        for draft in drafters:
            if remotes is not None and isinstance(draft, ModelDraftOptions) and draft.remote is not None:
                built.append(_build_remote(draft, draft.remote, options, target, remotes))
                continue
            drafter = _build(draft, options, target, progress, flight, cheaper)
            built.append(guarded := GuardedDrafter(drafter))
            if isinstance(drafter, ContinuingDrafter):
                cheaper.append(guarded)
    except BaseException:
        for drafter in built:
            drafter.close()
        raise
    # One alone, too: its word is calibrated there.
    return ChainDrafter(built, PredictionDrafter(SystemClock())) if built else None


def _build_remote(
    options: ModelDraftOptions, remote: RemoteOptions, engine: EngineOptions, target: LoadedSource, remotes: Remotes
) -> Drafter:
    try:
        return remotes.build(options, remote, target, remote_pair(options, engine.model, target))
    except ModelReplaced as error:
        return _build_failed(options, error)


def _build(
    options: DraftOptions,
    engine: EngineOptions,
    target: LoadedSource,
    progress: OnProgress,
    flight: _Flight,
    cheaper: Sequence[ContinuingDrafter],
) -> Drafter:
    if isinstance(options, SuffixOptions):
        statistics = find_statistics(options, engine.model, target)
        drafter = build_suffix(options, flight.suffixes.get(options.name), statistics)
        flight.suffixes.setdefault(options.name, drafter)
        return drafter
    if isinstance(options, IndexOptions):
        return _build_index(options, target)
    return _build_model(options, engine, target, progress, flight, cheaper)


def _build_index(options: IndexOptions, target: LoadedSource) -> IndexDrafter:
    """Return a drafter from a store. Raises ModelRefused where the store cannot be used."""
    vocabulary = target.model.spec.vocabulary_fingerprint
    try:
        return IndexDrafter(
            Path(options.path),
            options.store,
            SystemClock(),
            name=options.name,
            vocabulary=vocabulary,
            most_bytes=options.most_bytes,
        )
    except MappedFileUnusable as error:
        raise ModelRefused(f"{options.place}.path: {error}") from error


def build_suffix(
    options: SuffixOptions, beside: SuffixDrafter | None = None, statistics: FoundStatistics = NO_STATISTICS
) -> SuffixDrafter:
    """Return a suffix drafter with nothing remembered, or what the one `beside` it remembers."""
    return SuffixDrafter(
        max_match=options.max_match,
        memory_bytes=options.memory_bytes,
        clock=SystemClock(),
        name=options.name,
        beside=beside,
        statistics=statistics.statistics,
        reason=statistics.reason,
    )


def _build_model(
    options: ModelDraftOptions,
    engine: EngineOptions,
    target: LoadedSource,
    progress: OnProgress,
    flight: _Flight,
    cheaper: Sequence[ContinuingDrafter],
) -> Drafter:
    wanted = options.model

    def report_stage(stage: str, fraction: float) -> None:
        progress(f"{options.name}: {stage}", fraction)

    try:
        pair = compare_vocabularies(options, engine.model, report_stage)
        tokenizer_dir = prepare_tokenizer(options) if pair.match is Match.DIFFERS else ""
        if options.name not in flight.models:
            slots = engine.max_running * flight.count
            rows = count_draft_rows(slots)
            flight.models[options.name] = load_model(wanted, slots, report_stage, logits_rows=rows)
        loaded = flight.models[options.name]
    except (DeviceLost, ModelReplaced) as error:
        return _build_failed(options, error)
    state = msgspec.structs.replace(draft_state(options, loaded), vocabulary=pair.match.value)
    judge = loaded if pair.match is Match.DIFFERS else target  # whose tokens it may propose
    vocabulary = judge.model.spec.vocabulary_size
    model = loaded.model
    if flight.count > 1:
        model = SomeSlots(model, engine.max_running * flight.number, engine.max_running)
    clock = SystemClock()
    own = Cascade(tuple(cheaper) if options.cascade and pair.match is not Match.DIFFERS else (), clock)
    drafter = ModelDrafter(model, state, clock, vocabulary=vocabulary, prefill_ms=options.prefill_ms, cascade=own)
    drafter.measure()
    return drafter if pair.match is not Match.DIFFERS else translating(drafter, target, tokenizer_dir)


def _build_failed(options: ModelDraftOptions, error: AdapterError) -> FailedDrafter:
    """Return what stands for a draft that cannot be loaded: it costs the drafts only."""
    wanted = options.model
    return FailedDrafter(
        DrafterState(options.name, "model", "failed", str(error), wanted.source, wanted.adapter, wanted.device)
    )


def draft_state(options: ModelDraftOptions, loaded: LoadedSource) -> DrafterState:
    caps = loaded.model.capabilities
    return DrafterState(
        name=options.name,
        method="model",
        source=loaded.source,
        adapter=options.model.adapter,
        device=caps.device,
        weights=caps.weights,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        static_widths=list(caps.static_widths),
        planned_memory_bytes=loaded.plan.total - loaded.plan.process if loaded.plan else 0,
        identity=loaded.identity,
    )
