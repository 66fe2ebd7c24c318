"""Builds the drafters of a worker, in order of cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters import own_tokenizer
from adapters.borrowed_slots import cut_slots
from adapters.contract import DeviceLost, ModelRefused, TakesHeads, Unsupported, silent
from adapters.hf_hub import HUB_PREFIX
from adapters.model_store import ModelReplaced, ModelStore
from adapters.names import HEAD_ADAPTERS
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.vocabulary import SIMULATED_PREFIX, vocabulary_at_hand, vocabulary_from, vocabulary_in
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import AttachDraft, DrafterState, DraftLink
from orchestrator.protocol.load_options import (
    DraftOptions,
    EndpointDraftOptions,
    EngineOptions,
    HeadOptions,
    IndexOptions,
    ModelDraftOptions,
    ModelOptions,
    RemoteOptions,
    SuffixOptions,
)
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.grown import GrownStatistics
from orchestrator.worker.drafting.guard import FailedDrafter, GuardedDrafter
from orchestrator.worker.drafting.head import HeadDrafter
from orchestrator.worker.drafting.index import IndexDrafter
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.drafting.remote.connection import WorkerGreeter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from orchestrator.worker.drafting.retokenize import Bridge
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.drafting.translate import TranslatingDrafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.loading.models import LoadedSource, load_model
from orchestrator.worker.loading.prepared import OnProgress, find_model, prepare_own_tokenizer
from orchestrator.worker.loading.statistics import (
    NO_STATISTICS,
    FoundStatistics,
    find_statistics,
    open_grown_statistics,
)
from policies.models.vocabulary import Match, compare, refusal
from policies.serving.canary import CanaryVariant

_RETRY_S = 30.0  # until a server is tried again that cannot draft for the target: another model may be served there


@dataclass(frozen=True, slots=True)
class VocabularyPair:
    match: Match
    draft_fingerprint: str


def compare_vocabularies(
    draft: ModelDraftOptions, target: ModelOptions, progress: OnProgress = silent
) -> VocabularyPair:
    """Compare the vocabularies, downloading a model of the hub. Raises what `model_source.resolve` does, and
    ModelRefused where they differ and are not to be translated."""
    ours = _read_vocabulary(target, progress)
    theirs = _read_vocabulary(draft.model, progress, ours)
    return _pair(draft, ours, theirs)


def remote_pair(draft: ModelDraftOptions, target: ModelOptions, loaded: LoadedSource) -> VocabularyPair:
    """Compare the vocabularies of a target and a draft whose worker may be on another machine.

    Where the draft's files are not here and it is not to be translated, its worker has to say that its vocabulary is
    the target's own. Raises as `compare_vocabularies`.
    """
    ours, theirs = _read_vocabulary(target), None
    with nullcontext() if draft.translate else suppress(ModelRefused):
        theirs = _read_at_hand(draft.model, ours)
    if theirs is None and draft.translate:
        return compare_vocabularies(draft, target)
    if theirs is None:
        return VocabularyPair(Match.IDENTICAL, loaded.model.spec.vocabulary_fingerprint)
    return _pair(draft, ours, theirs)


def _read_at_hand(draft: ModelOptions, target: Sequence[str]) -> list[str] | None:
    """Return the vocabulary of a draft that another process loads, downloading no weights; None where a hub cannot be
    reached. Raises as `_read_vocabulary`."""
    if draft.identity is not None and not draft.source.startswith(HUB_PREFIX):
        return _read_vocabulary(draft, target=target)
    return vocabulary_at_hand(draft.source, Path(draft.base), target)


def translating(drafter: Drafter, target: LoadedSource, draft_tokenizer_dir: str) -> Drafter:
    """Put a drafter of another vocabulary behind a translation."""
    bridge = Bridge(load_tokenizer(target.tokenizer_dir), load_tokenizer(draft_tokenizer_dir))
    return TranslatingDrafter(drafter, bridge)


def prepare_tokenizer(draft: ModelDraftOptions) -> str:
    """Return the directory of a draft's tokenizer, where another process loads the model; "" for the simulated one."""
    model = draft.model
    if model.source.startswith(SIMULATED_PREFIX):
        return ""
    return prepare_own_tokenizer(model)


def _read_vocabulary(
    options: ModelOptions, progress: OnProgress = silent, target: Sequence[str] | None = None
) -> list[str]:
    """Return a model's vocabulary; `target`: what it is to be a draft of. Raises what `find_model` raises."""
    if options.identity is None:
        return vocabulary_from(options.source, Path(options.base), progress, target)
    return vocabulary_in(find_model(options, ModelStore(Path(options.store)), progress), target)


def _pair(draft: ModelDraftOptions, ours: list[str], theirs: list[str]) -> VocabularyPair:
    comparison = compare(ours, theirs)
    if comparison.match is Match.DIFFERS and not draft.translate:
        raise ModelRefused(f"{draft.place}: {refusal(draft.model.source, comparison)}")
    return VocabularyPair(comparison.match, vocabulary_fingerprint(theirs))


class Remotes:
    """The drafters of a target's worker that are in other processes, by name: one for each flight, with a connection of
    its own. `report` hears how they do."""

    def __init__(self, report: Callable[[DraftLink], None]) -> None:
        self._report = report
        self._drafters: dict[str, list[RemoteDrafter]] = {}

    def build(self, draft: ModelDraftOptions, remote: RemoteOptions, fingerprint: str, device: str) -> RemoteDrafter:
        drafter = RemoteDrafter(
            draft.name,
            greet=WorkerGreeter(fingerprint, device),
            limits=RemoteLimits(remote.max_wait_ms, remote.answer_timeout_s),
            clock=SystemClock(),
            report=self._report,
        )
        self._drafters.setdefault(draft.name, []).append(drafter)
        return drafter

    def connect(self, draft: EndpointDraftOptions, tokenizer: Tokenizer) -> RemoteDrafter:
        """Return a drafter that connects to its llama-server, which must have this tokenizer's vocabulary."""
        # Most workers ask nobody over HTTP: its client is loaded for those that do.
        from orchestrator.worker.drafting.llama_server.greeting import LlamaServer, ServerGreeter

        drafter = RemoteDrafter(
            draft.name,
            greet=ServerGreeter(draft.name, tokenizer, draft.overlap, draft.answer_timeout_s),
            limits=RemoteLimits(draft.max_wait_ms, draft.answer_timeout_s, _RETRY_S),
            clock=SystemClock(),
            report=self._report,
        )
        drafter.attach(LlamaServer(draft.endpoint, draft.api_key_file))
        return drafter

    def attach(self, command: AttachDraft) -> None:
        """Connect a drafter to its process, or let it rest; one that was exchanged meanwhile is ignored."""
        for drafter in self._drafters.get(command.name, ()):
            follow_attachment(drafter, command)


def follow_attachment(drafter: RemoteDrafter, command: AttachDraft) -> None:
    """Connect a drafter to the process that a command names, or let it rest where that names none."""
    if command.endpoint is None:
        drafter.let_rest(command.reason)
    else:
        drafter.attach(command.endpoint)


class BuiltDrafters(NamedTuple):
    """Of a worker: the one that its loop asks, the one of requests that are not the canary's, and the one that tells
    both apart. None: there is no such drafter."""

    whole: Drafter | None
    default: ChainDrafter | None
    by_variant: VariantDrafter | None = None


def build_drafter(
    options: EngineOptions, target: LoadedSource, progress: OnProgress = silent, remotes: Remotes | None = None
) -> ChainDrafter | None:
    """Return the drafter, with nothing remembered; None where speculation is off. A canary has no part in it.

    Without `remotes` every draft model runs in this process, wherever the configuration puts it. Raises what adapters
    raise for a draft model that cannot be used; a device that fails while it loads one costs the draft only.
    """
    return _DrafterBuilder(options, target, progress, remotes).build_chain(options.drafters)


def build_variant_drafters(
    options: EngineOptions, target: LoadedSource, progress: OnProgress, remotes: Remotes, flights: int = 1
) -> list[BuiltDrafters]:
    """Return the drafters of a worker, the canary's among them, for each of so many flights. They share the models, in
    slots of their own, and what is remembered of outputs. Raises as `build_drafter`."""
    builder = _DrafterBuilder(options, target, progress, remotes, flights, serves=True)
    with ExitStack() as until_built:
        every: list[BuiltDrafters] = []
        for builder.flight in range(flights):
            every.append(built := builder.build_variants())
            if built.whole is not None:
                until_built.callback(built.whole.close)
        until_built.pop_all()
    return every


@dataclass(slots=True)
class _DrafterBuilder:
    """Builds the drafters of one of several flights. All share draft models, stores of outputs, and which variant
    requests are in. `serves`: what the target says is counted."""

    options: EngineOptions
    target: LoadedSource
    progress: OnProgress
    remotes: Remotes | None
    flights: int = 1
    flight: int = 0
    serves: bool = False
    models: dict[str, LoadedSource] = field(default_factory=dict)
    suffixes: dict[str, SuffixDrafter] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)

    def build_variants(self) -> BuiltDrafters:
        default = self.build_chain(self.options.drafters)
        canary = self.options.canary
        if canary is None or not canary.drafters:
            return BuiltDrafters(default, default)
        with ExitStack() as until_built:
            if default is not None:
                until_built.callback(default.close)
            own = self.build_chain(canary.drafters)
            until_built.pop_all()
        variants = VariantDrafter(default, {} if own is None else {CanaryVariant.CANARY.value: own}, self.joined)
        return BuiltDrafters(variants, default, variants)

    def build_chain(self, drafts: Sequence[DraftOptions]) -> ChainDrafter | None:
        if not self.target.model.capabilities.rewinds:
            return None
        built: list[Drafter] = []
        with ExitStack() as until_built:
            for draft in drafts:
                drafter = self._build(draft)
                built.append(drafter if self._is_apart(draft) else GuardedDrafter(drafter))
                until_built.callback(built[-1].close)
            until_built.pop_all()
        # One alone, too: its word is calibrated there.
        return ChainDrafter(built, PredictionDrafter(SystemClock())) if built else None

    def _is_apart(self, draft: DraftOptions) -> bool:
        """Return whether a draft is made in another process."""
        if isinstance(draft, EndpointDraftOptions):
            return True
        return isinstance(draft, ModelDraftOptions) and draft.remote is not None and self.remotes is not None

    def _build(self, draft: DraftOptions) -> Drafter:
        if isinstance(draft, SuffixOptions):
            statistics = find_statistics(draft, self.options.model, self.target)
            grown = self._open_grown(draft) if statistics.statistics is None else None
            suffix = build_suffix(draft, self.suffixes.get(draft.name), statistics, grown)
            self.suffixes.setdefault(draft.name, suffix)
            return suffix
        if isinstance(draft, IndexOptions):
            return self._build_index(draft)
        if isinstance(draft, HeadOptions):
            return self._build_head(draft)
        if isinstance(draft, EndpointDraftOptions):
            return self._build_endpoint(draft)
        try:
            if draft.remote is not None and self.remotes is not None:
                return self._build_remote(draft, draft.remote, self.remotes)
            return self._build_model(draft)
        except (DeviceLost, ModelReplaced) as error:  # that costs the drafts only
            wanted = draft.model
            state = DrafterState(
                draft.name, "model", "failed", str(error), wanted.source, wanted.adapter, wanted.device
            )
            return FailedDrafter(state)

    def _open_grown(self, draft: SuffixOptions) -> GrownStatistics | None:
        """Return the statistics that grow, for the first of several flights; None where there are none."""
        if not self.serves or draft.name in self.suffixes:
            return None
        return open_grown_statistics(draft, self.options.model, self.target)

    def _build_index(self, draft: IndexOptions) -> IndexDrafter:
        vocabulary = self.target.model.spec.vocabulary_fingerprint
        try:
            return IndexDrafter(
                Path(draft.path),
                draft.store,
                SystemClock(),
                name=draft.name,
                vocabulary=vocabulary,
                most_bytes=draft.most_bytes,
            )
        except MappedFileUnusable as error:
            raise ModelRefused(f"{draft.place}.path: {error}") from error

    def _build_head(self, draft: HeadOptions) -> HeadDrafter:
        target, caps = self.target.model, self.target.model.capabilities
        if not isinstance(target, TakesHeads):
            why = f"{self.options.model.adapter} gives no hidden states; {', '.join(HEAD_ADAPTERS)} does"
            raise ModelRefused(f"{draft.place}.method: {why}")
        try:
            head = target.attach_head(Path(draft.directory), self.options.max_running)
        except (ModelRefused, Unsupported) as error:
            raise ModelRefused(f"{draft.place}.source: {error}") from error
        state = DrafterState(
            *(draft.name, "head"),
            source=draft.directory,
            adapter=self.options.model.adapter,
            device=caps.device,
            weights=head.capabilities.weights,
            activations=caps.activations.value,
            kv_cache=caps.kv_cache.value,
            planned_memory_bytes=head.memory_bytes,
        )
        vocabulary = target.spec.vocabulary_size
        drafter = HeadDrafter(head, state, SystemClock(), vocabulary=vocabulary, prefill_ms=draft.prefill_ms)
        drafter.measure()
        return drafter

    def _build_remote(self, draft: ModelDraftOptions, remote: RemoteOptions, remotes: Remotes) -> Drafter:
        pair = remote_pair(draft, self.options.model, self.target)
        tokenizer_dir = prepare_tokenizer(draft) if pair.match is Match.DIFFERS else ""
        drafter = remotes.build(draft, remote, pair.draft_fingerprint, self.target.model.capabilities.device)
        return drafter if pair.match is not Match.DIFFERS else translating(drafter, self.target, tokenizer_dir)

    def _build_endpoint(self, draft: EndpointDraftOptions) -> Drafter:
        remotes = self.remotes or Remotes(_tell_nobody)
        if not draft.tokenizer:
            return remotes.connect(draft, load_tokenizer(self.target.tokenizer_dir))
        model = self.options.model
        store, base = ModelStore(Path(model.store)), Path(model.base)
        directory = str(own_tokenizer.prepare_own_tokenizer(store, draft.tokenizer, base, None, self.progress))
        return translating(remotes.connect(draft, load_tokenizer(directory)), self.target, directory)

    def _build_model(self, draft: ModelDraftOptions) -> Drafter:
        def report_stage(stage: str, fraction: float) -> None:
            self.progress(f"{draft.name}: {stage}", fraction)

        pair = compare_vocabularies(draft, self.options.model, report_stage)
        differs = pair.match is Match.DIFFERS
        tokenizer_dir = prepare_tokenizer(draft) if differs else ""
        running = self.options.max_running
        if draft.name not in self.models:
            slots = running * self.flights
            self.models[draft.name] = load_model(draft.model, slots, report_stage, logits_rows=slots)
        loaded = self.models[draft.name]
        model = loaded.model if self.flights == 1 else cut_slots(loaded.model, running * self.flight, running)
        judge = loaded if differs else self.target  # whose tokens it may propose
        drafter = ModelDrafter(
            model,
            msgspec.structs.replace(draft_state(draft, loaded), vocabulary=pair.match.value),
            SystemClock(),
            vocabulary=judge.model.spec.vocabulary_size,
            prefill_ms=draft.prefill_ms,
        )
        drafter.measure()
        return translating(drafter, self.target, tokenizer_dir) if differs else drafter


def _tell_nobody(link: DraftLink) -> None:
    """How a link does is not asked where no daemon listens."""


def build_suffix(
    options: SuffixOptions,
    beside: SuffixDrafter | None = None,
    statistics: FoundStatistics = NO_STATISTICS,
    grown: GrownStatistics | None = None,
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
        grown=grown,
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
        precision_reason=loaded.choice.reason if loaded.choice is not None else "",
        static_widths=list(caps.static_widths),
        planned_memory_bytes=loaded.plan.total - loaded.plan.process if loaded.plan else 0,
        identity=loaded.identity,
    )
