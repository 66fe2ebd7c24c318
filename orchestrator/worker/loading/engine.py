"""Builds the engine of a target worker: its model, its drafters, its decode loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from adapters.borrowed_slots import borrow_slots
from adapters.contract import NO_REWIND, ForkableKv, LoadedModel, LoraSlots, StagedModel
from adapters.grammar import GrammarCompiler
from adapters.tokenizer import load_tokenizer
from device_profiles.cost import StepCost
from device_profiles.device_names import CPU_KIND, is_processor, name_compute_unit
from orchestrator.clock import Clock, SystemClock
from orchestrator.machine.cores import effective_cores
from orchestrator.machine.devices import device_name, effective_device
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.events import Event, PagesEndpoint, Progress
from orchestrator.protocol.links.endpoint import host_id
from orchestrator.protocol.load_options import EngineOptions, IndexOptions, ShardOptions, SuffixOptions
from orchestrator.protocol.ready import (
    ExpectedRounds,
    Ready,
    ReadyDevice,
    ReadyDrafting,
    ReadyKv,
    ReadyModel,
    ReadyPrecision,
    ReadyShards,
)
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.engine.flights import Flights
from orchestrator.worker.engine.grammar import Grammars
from orchestrator.worker.engine.kv_transfer.disk import KvDisk
from orchestrator.worker.engine.kv_transfer.mover import KvMover, describe_layout
from orchestrator.worker.engine.kv_transfer.page_inbox import PageInbox
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.engine.prefix_cache import KeptPrefixes
from orchestrator.worker.engine.variants import SpeculationVariants, VariantDepth
from orchestrator.worker.engine.worker_engine import LoadedEngine, WorkerEngine
from orchestrator.worker.loading.artefact_watch import ArtefactWatch
from orchestrator.worker.loading.class_words import describe_choice, describe_rejected
from orchestrator.worker.loading.drafters import Remotes, build_variant_drafters
from orchestrator.worker.loading.first_cost import FirstCost, find_stored_cost
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.loading.pipeline import list_planned_parts
from orchestrator.worker.loading.retuner import EngineRetuner, list_identities, list_whole
from orchestrator.worker.measuring.quick import quick_cost
from policies.models.device_layers import describe_layers
from policies.serving.canary import CanaryVariant
from policies.serving.slo import NO_OBJECTIVES
from policies.speculation.adaptive import Adaptive
from policies.speculation.branching import explain_branches
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import DepthPolicy

# ADR 0097: positions that a first guess is made for. Rounds correct it.
_CONTEXT_TOKENS: Final = 256
# ADR 0097, as above: a chunk of a short prompt.
_PROMPT_ROWS: Final = 64
Emit = Callable[[Event], None]

# ADR 0029: before serving, where no profile is stored; 0.4 s told a row's cost poorly (docs/benchmarks.md).
_MEASURING_S = 0.6
NOTHING_KNOWN: Final = FirstCost(TYPICAL, "nothing: no depth is chosen", known=False)


def expect_rounds(cost: StepCost, slots: int) -> ExpectedRounds:
    """Return what rounds without drafts take, with a context of some hundred tokens, and a row of a usual prompt."""
    return ExpectedRounds(
        alone_ms=cost.ms(1, 1, _CONTEXT_TOKENS),
        full_ms=cost.ms(slots, slots, _CONTEXT_TOKENS),
        prefill_row_ms=cost.chunk_ms(_PROMPT_ROWS, 0.0, beside=False) / _PROMPT_ROWS,
    )


def count_flights(model: LoadedModel, options: EngineOptions) -> int:
    """Return how many flights a target's worker has: no more than requests run, and one for a target of one stage."""
    if not isinstance(model, StagedModel):
        return 1
    return max(1, min(count_parallel_stages(options.model.shards), model.stages, options.max_running))


def count_parallel_stages(shards: Sequence[ShardOptions]) -> int:
    """Return how many shards can compute at the same time: two of them take turns on one device, or on the same cores
    of a processor, whatever the runtimes."""
    return len({_name_compute(shard) for shard in shards})


def _name_compute(shard: ShardOptions) -> tuple[str, str, tuple[int, ...]]:
    """Return what a shard computes with: host, device and cores. A device is another one to another runtime, as names
    of devices are the runtime's own; the processor is not."""
    device = effective_device(shard.adapter, shard.device)
    device = CPU_KIND if is_processor(device) else f"{shard.adapter} {name_compute_unit(device)}"
    return (shard.host, device, tuple(shard.cores)) if shard.own else ("", device, ())


def build_engine(options: dict[str, Any]) -> WorkerEngine:
    """Return the engine of a target worker. Called inside the worker process."""
    settings = msgspec.convert(options, EngineOptions)
    return WorkerEngine(lambda emit: _load_engine(settings, emit), SystemClock())


def build_loop(
    target: LoadedSource,
    options: EngineOptions,
    drafter: Drafter | None,
    policy: DepthPolicy | None = None,
    clock: Clock | None = None,
    grammars: Grammars | None = None,
    kept: KeptPrefixes | None = None,
) -> DecodeLoop:
    """Return a decode loop over a loaded target. `policy`: where it is not to be the adaptive one, which begins with
    `first_cost`; `clock`: where it is not to be the machine's; `grammars`: where other loops share them; `kept`: what
    requests may begin with. Raises what forwards raise."""
    if policy is None:
        policy = adaptive(first_cost(target, options, drafts=drafter is not None), options)
    return DecodeLoop(
        target.model,
        drafter,
        clock or SystemClock(),
        policy=policy,
        max_running=options.max_running,
        max_depth=options.max_depth,
        max_itl_ms=options.max_itl_ms,
        prefix_reuse=options.prefix_reuse,
        tolerance=options.tolerance,
        grammars=grammars or build_grammars(target),
        low_acceptance_rate=options.low_acceptance_rate,
        objectives=options.objectives,
        kept=kept,
    )


def build_flights(
    target: LoadedSource,
    options: EngineOptions,
    drafters: Sequence[Drafter | None],
    first: FirstCost,
    kept: KeptPrefixes | None = None,
) -> Flights:
    """Return the decode loops of a target, one for each of these drafters: as many as `count_flights` says."""
    model, grammars = target.model, build_grammars(target)
    views: Sequence[LoadedModel] = [model]
    if len(drafters) > 1 and isinstance(model, StagedModel):
        views = borrow_slots(model, len(drafters))
    loops = [
        build_loop(
            replace(target, model=view), options, drafter, adaptive(first, options), grammars=grammars, kept=kept
        )
        for view, drafter in zip(views, drafters, strict=True)
    ]
    return Flights(model, loops, max_running=options.max_running)


def first_cost(target: LoadedSource, options: EngineOptions, *, drafts: bool = True) -> FirstCost:
    """Return what is known of rounds before the first: the stored profile, else what a few forwards take. Raises what
    forwards raise."""
    known = find_stored_cost(target, options.model)
    if known is not None:
        return known
    if not drafts and options.objectives == NO_OBJECTIVES:
        return NOTHING_KNOWN
    cost = quick_cost(target.model, SystemClock(), budget_s=_MEASURING_S)
    if cost is not None:
        return FirstCost(cost, "a few forwards: no stored profile")
    return FirstCost(TYPICAL, "a typical model's shape: no stored profile, and no KV blocks for forwards", known=False)


def adaptive(first: FirstCost, options: EngineOptions) -> Adaptive:
    return Adaptive(start_cost_model(first.cost), options.pid, options.starting_depth)


def _describe_branches(model: LoadedModel, options: EngineOptions, first: FirstCost) -> str:
    if count_flights(model, options) > 1:
        return "none: its stages run several rounds at a time"
    if not isinstance(model, ForkableKv):
        return "none: its runtime cannot fork a sequence"
    return explain_branches(first.cost) if first.known else "none: what rows cost was not measured"


def build_grammars(target: LoadedSource) -> Grammars:
    """Return grammars over the target's tokens; its tokenizer is loaded for the first one."""
    return GrammarCompiler(lambda: load_tokenizer(target.tokenizer_dir), target.model.spec.vocabulary_size)


def _load_engine(options: EngineOptions, emit: Emit) -> LoadedEngine:
    def progress(stage: str, fraction: float) -> None:
        emit(Progress(stage, fraction))

    target = load_target(options, progress)
    if not target.model.capabilities.rewinds:
        options = options.without_drafts()
    remotes = Remotes(emit)
    try:
        built = build_variant_drafters(options, target, progress, remotes, count_flights(target.model, options))
    except BaseException:
        target.model.close()
        raise
    first = first_cost(target, options, drafts=built[0].whole is not None)
    deepest = msgspec.structs.replace(options, max_depth=options.deepest)
    mover = KvMover(target.model, describe_kv_format(target, options))
    loop = build_flights(target, deepest, [drafters.whole for drafters in built], first, _open_kv_disk(mover, options))
    _open_inbox(mover, options, emit)

    def describe(now: EngineOptions, its: Sequence[Drafter]) -> Ready:
        planned = sum_planned_bytes(target, now, its)
        if target.meter is not None and target.plan is not None:
            target.meter.beside_bytes = planned - target.plan.total
        return ready_of(target, now, loop.max_running, planned, first, its)

    retuner = EngineRetuner(
        *(target, options, (built, remotes), loop), report=emit, describe=describe, arrange=build_speculation_variants
    )
    watch = ArtefactWatch(Path(options.model.store), SystemClock(), max_bytes=options.model.store_max_bytes)
    ready = describe(options, list_whole(built))
    return LoadedEngine(
        loop, ready, retuner.close, retuner.attach, retuner.variants, mover, watch, retuner, target.meter
    )


def _open_kv_disk(mover: KvMover, options: EngineOptions) -> KvDisk | None:
    """Return what keeps beginnings of prompts on disk, where that was asked for and can be done."""
    if not options.kv_disk_bytes:
        return None
    if not mover.moves:
        sys.stderr.write("limits.kv_disk: nothing is kept, for the KV cache of this target cannot be moved\n")
        return None
    return KvDisk(mover, Path(options.model.store) / "kv", options.kv_disk_bytes)


def _open_inbox(mover: KvMover, options: EngineOptions, emit: Emit) -> None:
    """Let workers on other hosts send pages, where there may be such and this one can be reached."""
    host = os.environ.get(NODE_ADDRESS, "") if options.across_hosts else ""
    if not host or not mover.moves:
        return
    try:
        mover.inbox = PageInbox(host, mover.format)
    except OSError as error:
        sys.stderr.write(f"takes in no pages from other hosts at {host}: {error.strerror or error}\n")
        return
    emit(PagesEndpoint(mover.inbox.endpoint))


def build_speculation_variants(options: EngineOptions, by_variant: VariantDrafter | None = None) -> SpeculationVariants:
    """Return how a worker serves those who say nothing of speculation, and how the canary's requests."""
    canary = options.canary
    depths = {} if canary is None else {CanaryVariant.CANARY.value: VariantDepth(canary.max_depth, canary.fixed_depth)}
    default = VariantDepth(options.max_depth, options.fixed_depth)
    return SpeculationVariants(default, depths, by_variant, options.predicted_depth)


def sum_planned_bytes(target: LoadedSource, options: EngineOptions, drafters: Sequence[Drafter]) -> int:
    """Return what this process was announced to hold: the target's plan, the drafters' stores, and the draft
    models that are not in a process of their own. 0 where the target's costs are not known. `drafters` of flights share
    models and stores."""
    if target.plan is None:
        return 0
    suffix = sum(draft.memory_bytes for draft in options.all_drafters if isinstance(draft, SuffixOptions))
    suffix += sum(draft.size_bytes for draft in options.all_drafters if isinstance(draft, IndexOptions))
    states = drafters[0].states() if drafters else []
    return target.plan.total + suffix + sum(state.planned_memory_bytes for state in states if state.remote is None)


def describe_kv_format(target: LoadedSource, options: EngineOptions) -> str:
    """Return what decides that pages of a KV cache mean the same: the model, the class of its bits, and the layout.
    "" where they cannot be moved."""
    layout, _ = describe_layout(target.model)
    caps = target.model.capabilities
    parts = (_digest_of(target, options), target.class_fingerprint, caps.numerical_class, caps.weights, layout)
    return "; ".join(map(str, parts)) if layout else ""


def _digest_of(target: LoadedSource, options: EngineOptions) -> str:
    # The store keeps what is prepared from a file in a directory that is named after the file's content.
    return Path(target.tokenizer_dir).parent.name or options.model.source


def ready_of(
    target: LoadedSource,
    options: EngineOptions,
    slots: int,
    planned: int,
    first: FirstCost,
    drafters: Sequence[Drafter] = (),
) -> Ready:
    """Return what a worker says of itself once its target is loaded."""
    caps, spec, chosen = target.model.capabilities, target.model.spec, options.model
    parts = [(part.adapter.name, part.device, part.device_name) for part in target.parts]
    name = caps.device_name or device_name(chosen.adapter, caps.device)
    places = parts or [(chosen.adapter, caps.device, name)]
    layers, classes, canary = target.layers, target.classes, options.canary
    return Ready(
        ReadyModel(
            name=target.name,
            vocabulary_size=spec.vocabulary_size,
            vocabulary_fingerprint=spec.vocabulary_fingerprint,
            context_tokens=caps.max_context_tokens,
            digest=_digest_of(target, options),
            source=target.source,
            loras=list(target.model.loras) if isinstance(target.model, LoraSlots) else [],
            identities=list_identities(target, drafters),
        ),
        ReadyDevice(
            adapter="+".join(dict.fromkeys(adapter for adapter, _, _ in places)),
            name="+".join(device for _, device, _ in places),
            full_name=", ".join(dict.fromkeys(name for _, _, name in places)),
            cores=effective_cores(),
            static_widths=list(caps.static_widths),
            planned_memory_bytes=planned,
            planned_memory=target.plan.parts if target.plan else {},
            memory_reduced=list(target.failed),
            layers=describe_layers(layers, caps.device) if layers else "",
            layer_memory=layers.device.parts if layers else {},
        ),
        ReadyPrecision(
            weights=caps.weights,
            activations=caps.activations.value,
            kv_cache=caps.kv_cache.value,
            exactness=caps.exactness.value,
            row_invariant=target.row_invariant,
            reason=target.choice.reason if target.choice else "",
            rejected=[f"{other.what}: {other.why}" for other in target.choice.rejected] if target.choice else [],
            numerical_class=str(caps.numerical_class),
            class_fingerprint=target.class_fingerprint,
            class_reason=describe_choice(classes) if classes else "",
            classes_rejected=describe_rejected(classes) if classes else [],
        ),
        ReadyKv(
            blocks=caps.total_blocks,
            block_tokens=caps.block_tokens,
            format=describe_kv_format(target, options),
            page_bytes=describe_layout(target.model)[1],
        ),
        slots=slots,
        pid=os.getpid(),
        load_s=target.load_s,
        drafting=ReadyDrafting(
            drafters=[draft.name for draft in options.drafters],
            max_depth=options.max_depth,
            predicted_depth=options.predicted_depth,
            starting_depth=options.starting_depth,
            fixed_depth=options.fixed_depth,
            costs_from=first.source,
            branches=_describe_branches(target.model, options, first),
            no_drafts="" if caps.rewinds else NO_REWIND,
            canary_drafters=options.canary_drafters,
            canary_depth=options.canary_depth,
            canary_fixed=canary is not None and canary.fixed_depth,
        ),
        shards=ReadyShards(
            layers=list(target.shards),
            split=target.split,
            pids=[part.pid for part in target.parts if part.pid],
            planned_bytes=list_planned_parts(target.model),
        ),
        host=host_id(),
        expected_rounds=expect_rounds(first.cost, slots) if first.known else None,
    )
