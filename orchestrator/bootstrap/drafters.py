"""Builds the drafters of a worker, in order of cost."""

from __future__ import annotations

from collections.abc import Callable

from adapters.contract import DeviceLost, LoadedModel, ModelRefused
from orchestrator.bootstrap.models import Loaded, OnProgress, Target, load_model, silent
from orchestrator.bootstrap.options import (
    DraftOptions,
    EngineOptions,
    ModelDraftOptions,
    RemoteOptions,
    SuffixOptions,
)
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import AttachDraft, DrafterState, DraftLink
from orchestrator.drafting.chain import ChainDrafter
from orchestrator.drafting.lost import LostDrafter
from orchestrator.drafting.model import ModelDrafter
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.remote import RemoteDrafter, RemoteLimits
from orchestrator.drafting.suffix import SuffixDrafter


class Remotes:
    """The drafters of a target's worker that are in other processes, by name. `report` hears how they do."""

    def __init__(self, report: Callable[[DraftLink], None]) -> None:
        self._report = report
        self._drafters: dict[str, RemoteDrafter] = {}

    def build(self, options: ModelDraftOptions, remote: RemoteOptions, target: LoadedModel) -> RemoteDrafter:
        """Return a drafter that waits to be attached."""
        drafter = self._drafters[options.name] = RemoteDrafter(
            options.name,
            fingerprint=target.spec.vocabulary_fingerprint,
            device=target.capabilities.device,
            limits=RemoteLimits(remote.max_wait_ms, remote.answer_timeout_s),
            clock=SystemClock(),
            report=self._report,
        )
        return drafter

    def attach(self, command: AttachDraft) -> None:
        """Connect a drafter to its process. Raises KeyError for a name that is none."""
        self._drafters[command.name].attach(command.door)


def build_drafter(
    options: EngineOptions, target: Target, progress: OnProgress = silent, remotes: Remotes | None = None
) -> Drafter | None:
    """Return the drafter, with nothing remembered; None where speculation is off.

    Without `remotes` every draft model runs in this process, wherever the configuration puts it. Raises what adapters
    raise for a draft model that cannot be used; a device that fails while it loads one costs the draft only.
    """
    built: list[Drafter] = []
    try:
        for draft in options.drafters:
            if remotes is not None and isinstance(draft, ModelDraftOptions) and draft.remote is not None:
                built.append(remotes.build(draft, draft.remote, target.model))
            else:
                built.append(_build(draft, options.max_running, target.model, progress))
    except BaseException:
        for drafter in built:
            drafter.close()
        raise
    return ChainDrafter(built) if len(built) > 1 else next(iter(built), None)


def _build(options: DraftOptions, slots: int, target: LoadedModel, progress: OnProgress) -> Drafter:
    if isinstance(options, SuffixOptions):
        return SuffixDrafter(
            max_match=options.max_match, memory_bytes=options.memory_bytes, clock=SystemClock(), name=options.name
        )
    return _build_model(options, slots, target, progress)


def _build_model(options: ModelDraftOptions, slots: int, target: LoadedModel, progress: OnProgress) -> Drafter:
    wanted = options.model
    try:
        loaded = load_model(wanted, slots, lambda stage, fraction: progress(f"{options.name}: {stage}", fraction))
    except DeviceLost as error:
        return LostDrafter(
            DrafterState(options.name, "model", "failed", str(error), wanted.source, wanted.adapter, wanted.device)
        )
    if loaded.model.spec.vocabulary_fingerprint != target.spec.vocabulary_fingerprint:
        loaded.model.close()
        raise ModelRefused(
            f"{options.place}: {loaded.source} has another vocabulary than the target: its tokens mean other text; "
            "choose a draft of the target's family"
        )
    state = draft_state(options, loaded)
    vocabulary = target.spec.vocabulary_size
    return ModelDrafter(loaded.model, state, SystemClock(), vocabulary=vocabulary, prefill_ms=options.prefill_ms)


def draft_state(options: ModelDraftOptions, loaded: Loaded) -> DrafterState:
    """Return what is to be said of a loaded draft model."""
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
    )
