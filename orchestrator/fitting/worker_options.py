"""From a configuration to what workers are started and loaded by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import StaticShapes
from adapters.names import normalise_device
from device_profiles.device_names import list_rank_devices
from device_profiles.profile import Exactness
from orchestrator.config.drafts import (
    Draft,
    EndpointDraft,
    HeadDraft,
    IndexDraft,
    ModelDraft,
    SuffixDraft,
    draft_names,
    own_draft_names,
)
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.routing import SloSection
from orchestrator.config.source_text import Place, format_place
from orchestrator.config.target import OwnTarget, ReplicaTarget, Target
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.load_options import (
    CanaryOptions,
    DraftOptions,
    DraftWorkerOptions,
    EndpointDraftOptions,
    EndpointOptions,
    EngineOptions,
    HeadOptions,
    IndexOptions,
    LoraOptions,
    ModelDraftOptions,
    ModelOptions,
    RemoteOptions,
    ShardOptions,
    ShardWorkerOptions,
    SuffixOptions,
)
from policies.sampling import ToleranceGoal
from policies.serving.draft_pool import PoolSize
from policies.serving.slo import Objective, Objectives
from policies.speculation.pid import PidSettings

ENGINE_ENTRY = "orchestrator.worker.loading.engine:build_engine"
ENDPOINT_ENTRY = "orchestrator.worker.endpoint.engine:build_endpoint_engine"
DRAFT_ENTRY = "orchestrator.worker.loading.draft_worker:build_draft_engine"
SHARD_ENTRY = "orchestrator.worker.loading.shard_worker:build_shard_engine"

CANARY_PREFIX = "canary-"
"""What the names of the canary's own drafters begin with."""


def engine_options(config: ClusterConfig, base: Path) -> EngineOptions:
    """Return what the target's worker needs; `base` is the directory that relative sources start from.

    A model of the hub is pinned to a commit here, so that a worker that starts again loads the same one. Raises
    ModelRefused or DownloadFailed when that is not possible.
    """
    target, depth = config.model, config.speculation.depth
    return EngineOptions(
        model=_model_options(
            target,
            config,
            base,
            name=target.name,
            device=target.device,
            exactness=target.exactness.value,
            threads=config.devices.threads or len(config.devices.cores),
            kv_cache_bytes=int(config.limits.kv_cache),
            shards=_list_shards(target),
            tensor_parallel=target.tensor_parallel,
            loras=[LoraOptions(lora.name, lora.source) for lora in target.adapters],
        ),
        max_running=config.limits.max_running,
        max_itl_ms=config.limits.max_itl_ms,
        prefix_reuse=config.limits.prefix_reuse,
        max_depth=depth,
        tolerance=ToleranceGoal(
            config.speculation.tolerance_acceptance_rate,
            config.speculation.tolerance_warmup_tokens,
            config.speculation.tolerance_max_delta,
            config.speculation.tolerance_delta or None,
        ),
        drafters=_drafters(config, base) if depth else [],
        fixed_depth=config.speculation.method == "fixed",
        canary=_canary(config, base) if config.canary.share else None,
        pid=PidSettings(**config.speculation.pid.model_dump()),
        low_acceptance_rate=config.speculation.low_acceptance_rate,
        objectives=objectives_of(config.slo),
        across_hosts=config.cluster.across_hosts,
        predicted_depth=config.speculation.max_predicted_tokens,
        kv_disk_bytes=int(config.limits.kv_disk),
    )


def _list_shards(target: Target) -> list[ShardOptions]:
    return [
        ShardOptions(
            shard.adapter or target.adapter,
            normalise_device(shard.adapter or target.adapter, shard.device or target.device),
            shard.layers,
            shard.threads or len(shard.cores),
            own=shard.in_own_process,
            host=shard.host,
            cores=shard.cores,
        )
        for shard in target.shards
    ]


def _model_options(model: Target | ModelDraft, config: ClusterConfig, base: Path, **own: Any) -> ModelOptions:
    """Return how a model is loaded. `own`: fields that targets and drafts have of different keys."""
    source = config.sources.bind(model.source)
    return ModelOptions(
        source=source,
        base=str(base),
        store=str(store_directory(config)),
        store_max_bytes=int(config.store.max_size or 0),
        adapter=model.adapter,
        weights=model.weights,
        activations=model.activations,
        kv_cache_precision=model.kv_cache_precision,
        max_batch_rows=config.limits.max_batch_rows,
        static=read_static_shapes(model),
        device_layers=None if model.device_layers == "all" else model.device_layers,
        identity=config.sources.identities.get(source),
        **own,
    )


def objectives_of(slo: SloSection) -> Objectives:
    return Objectives(
        Objective(slo.ttft_ms or None, slo.ttft_percentile),
        Objective(slo.tpot_ms or None, slo.tpot_percentile),
        slo.max_round_ms,
    )


def _canary(config: ClusterConfig, base: Path) -> CanaryOptions:
    speculation = config.canary_speculation
    depth, own = speculation.depth, None
    if depth and config.canary_drafts:
        names = draft_names(config.canary_drafts, CANARY_PREFIX)
        own = _drafters_of(config.canary_drafts, ("canary", "drafts"), names, config, base)
    elif depth and not config.speculation.depth:
        own = _drafters(config, base)  # nobody else has them loaded
    return CanaryOptions(depth, speculation.method == "fixed", own)


def worker_specs(options: EngineOptions, config: ClusterConfig) -> list[WorkerSpec]:
    """Return how the target's workers are started: one for each replica."""
    alone = config.model.most_replicas == 1
    return [
        _worker_spec("target" if alone else f"target-{number}", _choose_own(options, number, config), config, placement)
        for number, placement in enumerate(config.model.placements)
    ]


def _choose_own(options: EngineOptions, number: int, config: ClusterConfig) -> EngineOptions:
    """Return the options with what the replica or standby of this number has of its own."""
    own = config.model.placements[number]
    if own.is_endpoint:
        return options
    its = config.model.with_own(own)
    changes: dict[str, object] = {name: getattr(its, name) for name in own.own_model}
    changes |= {"device": its.device, "shards": _list_shards(its), "tensor_parallel": its.tensor_parallel}
    if own.exactness is not None:
        changes["exactness"] = own.exactness.value
    if own.is_elsewhere:
        changes["device_layers"] = None
    if own.kv_cache is not None:
        changes["kv_cache_bytes"] = int(own.kv_cache)
    if own.max_batch_rows is not None:
        changes["max_batch_rows"] = own.max_batch_rows
    placed = msgspec.structs.replace(options.with_model(**changes), max_running=own.max_running or options.max_running)
    if own.own_drafts is None:
        return placed
    return _choose_own_drafts(placed, own.own_drafts, own.host, number, config)


def list_own_drafters(options: EngineOptions, config: ClusterConfig) -> list[tuple[str, DraftOptions]]:
    """Return the drafters that replicas have of their own, each with the host that its replica is bound to ("":
    none)."""
    return [
        (placement.host, drafter)
        for number, placement in enumerate(config.model.placements)
        if placement.own_drafts
        for drafter in _choose_own(options, number, config).drafters
    ]


def place_drafts(drafts: Sequence[Draft], host: str) -> tuple[Draft, ...]:
    """Return drafts that run on this host, beside their target, where nothing says where they do."""

    def place(draft: Draft) -> Draft:
        if not isinstance(draft, ModelDraft) or draft.process != "own" or draft.host:
            return draft
        return draft.model_copy(update={"host": host})

    return tuple(map(place, drafts))


def _choose_own_drafts(
    options: EngineOptions, drafts: Sequence[Draft], host: str, number: int, config: ClusterConfig
) -> EngineOptions:
    base, place = Path(options.model.base), config.find_place("model", "replicas", number, "drafts")
    names = own_draft_names(drafts, number, config.drafts)
    drafters = _drafters_of(place_drafts(drafts, host), place, names, config, base)
    canary = options.canary
    if canary is not None and canary.drafters is not None and not config.canary_drafts:  # it has those of the rest
        canary = msgspec.structs.replace(canary, drafters=drafters)
    return msgspec.structs.replace(options, drafters=drafters if options.max_depth else [], canary=canary)


def _endpoint_spec(name: str, options: EngineOptions, config: ClusterConfig, replica: ReplicaTarget) -> WorkerSpec:
    """Return how the worker of a replica is started that is another engine's server: on the daemon's host, where the
    key is."""
    key_file = str(Path(options.model.base) / Path(replica.api_key_file).expanduser()) if replica.api_key_file else ""
    endpoint = EndpointOptions(
        model=options.model,
        url=replica.endpoint,
        name=replica.model,
        engine=replica.engine,
        key_file=key_file,
        exactness=(replica.exactness or Exactness.KERNEL).value,
        max_running=replica.max_running or options.max_running,
    )
    node = THIS_NODE if config.cluster.across_hosts else ""
    return WorkerSpec(name, ENDPOINT_ENTRY, msgspec.to_builtins(endpoint), node=node, device=replica.endpoint)


def _worker_spec(name: str, options: EngineOptions, config: ClusterConfig, placement: OwnTarget) -> WorkerSpec:
    if isinstance(placement, ReplicaTarget) and placement.is_endpoint:
        return _endpoint_spec(name, options, config, placement)
    cores = placement.cores or config.devices.cores
    threads = placement.threads or len(placement.cores) or options.model.threads
    own = {format_place(at) for at, draft in config.all_drafts if getattr(draft, "threads", 0)}

    def place_drafts(drafters: list[DraftOptions]) -> list[DraftOptions]:
        return [
            msgspec.structs.replace(draft, model=msgspec.structs.replace(draft.model, threads=threads))
            if isinstance(draft, ModelDraftOptions) and draft.remote is None and draft.place not in own
            else draft
            for draft in drafters
        ]

    placed = msgspec.structs.replace(options.with_model(threads=threads), drafters=place_drafts(options.drafters))
    if placed.canary is not None and placed.canary.drafters is not None:
        canary = msgspec.structs.replace(placed.canary, drafters=place_drafts(placed.canary.drafters))
        placed = msgspec.structs.replace(placed, canary=canary)
    return WorkerSpec(
        *(name, ENGINE_ENTRY, msgspec.to_builtins(placed)),
        node=placement.host,
        cores=list(cores),
        device=options.model.device,
        further_devices=_list_further_devices(placed),
        reserved_cpus=_count_reserved_cpus(config, threads),
        parts=_shard_specs(name, placed.model, config),
        endpoints_at=["model", "shard_endpoints"],
    )


def _shard_specs(target: str, model: ModelOptions, config: ClusterConfig) -> list[WorkerSpec]:
    """Return how the workers for layers of one replica are started: those that have processes of their own."""
    own = [(number, shard, shard.threads or model.threads) for number, shard in enumerate(model.shards) if shard.own]
    whole = msgspec.structs.replace(model, shards=[], static=StaticShapes())
    return [
        WorkerSpec(
            name=f"{target}-shard-{number}",
            entry=SHARD_ENTRY,
            options=msgspec.to_builtins(
                ShardWorkerOptions(
                    msgspec.structs.replace(whole, adapter=shard.adapter, device=shard.device, threads=threads),
                    config.cluster.across_hosts,
                )
            ),
            node=shard.host,
            cores=shard.cores,
            device=shard.device,
            reserved_cpus=_count_reserved_cpus(config, threads),
        )
        for number, shard, threads in own
    ]


def _list_further_devices(options: EngineOptions) -> list[str]:
    """Return the devices that a target's worker computes on beside its first one."""
    model = options.model
    devices = list_rank_devices(model.device, model.tensor_parallel)
    devices += [shard.device for shard in model.shards if not shard.own]
    inside = (draft for draft in options.all_drafters if isinstance(draft, ModelDraftOptions) and draft.remote is None)
    devices += [draft.model.device for draft in inside]
    return [device for device in dict.fromkeys(devices) if device != model.device]


def _count_reserved_cpus(config: ClusterConfig, threads: int) -> float:
    """Return what a worker keeps from other tenants of the Ray cluster that it joins: its threads, one where these are
    its runtime's choice."""
    return float(threads or 1) if config.cluster.across_hosts else 0.0


def draft_specs(options: EngineOptions, config: ClusterConfig) -> list[WorkerSpec]:
    """Return how the draft workers are started that replicas share: one for each draft that has a process of its own.
    One with a pool has slots for the sequences of all replicas: any number of them may be its own."""
    most_running = max(placement.max_running or options.max_running for placement in config.model.placements)
    return _draft_specs(options, config, most_running)


def replica_draft_specs(options: EngineOptions, config: ClusterConfig) -> list[list[WorkerSpec]]:
    """Return how the draft workers beside each replica are started: those of its own drafts, or those that it shares.
    Beside an endpoint there are none."""
    shared = {spec.name: spec for spec in draft_specs(options, config)}
    beside: list[list[WorkerSpec]] = []
    for number, placement in enumerate(config.model.placements):
        its = _choose_own(options, number, config)
        specs = [] if placement.is_endpoint else _draft_specs(its, config, its.max_running)
        beside.append([shared.get(spec.name, spec) for spec in specs])
    return beside


def _draft_specs(options: EngineOptions, config: ClusterConfig, most_running: int) -> list[WorkerSpec]:
    shares = dict.fromkeys(list_draft_pools(config), config.model.most_replicas)
    return [
        WorkerSpec(
            name=draft.name,
            entry=DRAFT_ENTRY,
            options=msgspec.to_builtins(
                DraftWorkerOptions(draft, most_running * shares.get(draft.name, 1), config.cluster.across_hosts)
            ),
            node=draft.remote.host,
            cores=draft.remote.cores,
            device=draft.model.device,
            reserved_cpus=_count_reserved_cpus(config, draft.model.threads),
        )
        for draft in options.all_drafters
        if isinstance(draft, ModelDraftOptions) and draft.remote is not None
    ]


def list_draft_pools(config: ClusterConfig) -> dict[str, PoolSize]:
    """Return how many workers there are of each draft that says so, by its name."""
    own = zip(config.canary_drafts, draft_names(config.canary_drafts, CANARY_PREFIX), strict=True)
    everybody = zip(config.drafts, draft_names(config.drafts), strict=True)
    return {
        name: PoolSize(draft.workers.min, draft.workers.max or draft.workers.min, draft.workers.idle_s)
        for draft, name in (*everybody, *own)
        if isinstance(draft, ModelDraft) and draft.process == "own" and draft.workers.min
    }


def _drafters(config: ClusterConfig, base: Path) -> list[DraftOptions]:
    return _drafters_of(config.drafts, config.find_place("drafts"), draft_names(config.drafts), config, base)


def _drafters_of(
    drafts: Sequence[Draft], at: Place, names: Sequence[str], config: ClusterConfig, base: Path
) -> list[DraftOptions]:
    named = enumerate(zip(drafts, names, strict=True))
    return [_draft(name, format_place((*at, index)), draft, config, base) for index, (draft, name) in named]


def _draft(name: str, place: str, draft: Draft, config: ClusterConfig, base: Path) -> DraftOptions:
    match draft:
        case SuffixDraft():
            statistics = draft.statistics
            if statistics not in ("auto", "none"):
                statistics = str(base / Path(statistics).expanduser())
            growth = "none" if statistics == "none" else draft.statistics_growth
            return SuffixOptions(name, draft.max_match, int(draft.memory), statistics, place, growth)
        case IndexDraft():
            path = base / Path(draft.path).expanduser()
            size = path.stat().st_size if path.exists() else 0
            return IndexOptions(name, draft.store, str(path), place, size, int(draft.memory))
        case HeadDraft():
            directory = base / Path(draft.source).expanduser()
            return HeadOptions(name, place, str(directory), config.limits.max_itl_ms / 2)
        case EndpointDraft():
            key_file = str(base / Path(draft.api_key_file).expanduser()) if draft.api_key_file else ""
            waits = (draft.overlap, draft.max_wait_ms, draft.answer_timeout_s)
            translates = draft.mismatched_vocabulary == "translate"
            tokenizer = config.sources.bind(draft.source) if translates else ""
            return EndpointDraftOptions(name, place, draft.endpoint, key_file, *waits, tokenizer)
        case _:
            return _model_draft(name, place, draft, config, base)


def _model_draft(name: str, place: str, draft: ModelDraft, config: ClusterConfig, base: Path) -> ModelDraftOptions:
    shared_cores = len(config.devices.cores) if draft.process == "target" else 0
    return ModelDraftOptions(
        name=name,
        place=place,
        model=_model_options(
            draft,
            config,
            base,
            name="",
            device=draft.device,
            exactness=Exactness.KERNEL.value,  # the target judges whatever it says
            threads=draft.threads or len(draft.cores) or config.devices.threads or shared_cores,
            kv_cache_bytes=int(draft.kv_cache),
            drafts=True,
        ),
        prefill_ms=config.limits.max_itl_ms / 2,
        remote=RemoteOptions(draft.host, draft.overlap, draft.max_wait_ms, draft.answer_timeout_s, draft.cores)
        if draft.process == "own"
        else None,
        translate=draft.mismatched_vocabulary == "translate",
    )


def read_static_shapes(model: Target | ModelDraft) -> StaticShapes:
    """Return how a model runs where shapes are static."""
    return StaticShapes(
        on=model.static_shapes == "on",
        context_tokens=model.static_context_tokens,
        prefill_rows=model.static_prefill_rows,
        verify_rows=tuple(model.static_verify_rows),
    )
