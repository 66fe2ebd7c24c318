"""Builds the drafters of a worker, in order of cost."""

from __future__ import annotations

from adapters.contract import DeviceLost, LoadedModel, ModelRefused
from orchestrator.bootstrap.models import OnProgress, Target, load_model, silent
from orchestrator.bootstrap.options import DraftOptions, EngineOptions, ModelDraftOptions, SuffixOptions
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import DrafterState
from orchestrator.drafting.chain import ChainDrafter
from orchestrator.drafting.lost import LostDrafter
from orchestrator.drafting.model import ModelDrafter
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.suffix import SuffixDrafter


def build_drafter(options: EngineOptions, target: Target, progress: OnProgress = silent) -> Drafter | None:
    """Return the drafter, with nothing remembered; None where speculation is off.

    Raises what adapters raise for a draft model that cannot be used; a device that fails while it loads one costs the
    draft only.
    """
    built: list[Drafter] = []
    try:
        for draft in options.drafters:
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
    caps, spec = loaded.model.capabilities, loaded.model.spec
    if spec.vocabulary_fingerprint != target.spec.vocabulary_fingerprint:
        loaded.model.close()
        raise ModelRefused(
            f"{options.place}: {loaded.source} has another vocabulary than the target: its tokens mean other text; "
            "choose a draft of the target's family"
        )
    state = DrafterState(
        name=options.name,
        method="model",
        source=loaded.source,
        adapter=wanted.adapter,
        device=caps.device,
        weights=caps.weights,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        static_widths=list(caps.static_widths),
    )
    return ModelDrafter(
        loaded.model, state, SystemClock(), vocabulary=target.spec.vocabulary_size, prefill_ms=options.prefill_ms
    )
