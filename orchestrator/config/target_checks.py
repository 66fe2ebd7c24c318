"""What the keys of one target may not say together: what contradicts itself, and what would change nothing."""

from __future__ import annotations

import os

from adapters.contract import ModelRefused, cut_layers
from adapters.decoder.spec import DecoderSizes, DecoderSpec, describe_too_many
from adapters.head_facts import check_head, read_head
from adapters.hf_facts import LOADED_WHOLE, DirectoryFacts
from adapters.model_checks import refuse_whole
from adapters.names import HEAD_ADAPTERS, LLAMA_CPP, OWN_ADAPTERS, SHARDING_ADAPTERS
from adapters.vocabulary import vocabulary_at_hand
from device_profiles.device_names import CUDA_KIND, find_index, is_processor, list_rank_devices, split_device
from orchestrator.config.adapter_names import describe_whole, list_sharding
from orchestrator.config.draft_store import check_stores
from orchestrator.config.drafts import DraftWorkersSection, HeadDraft, ModelDraft, SuffixDraft
from orchestrator.config.endpoint_checks import check_endpoint
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Place, SourceFile, format_place
from orchestrator.config.target import AUTO, SPLITTING_KEYS, OwnTarget, ReplicaBounds, ReplicaTarget, Target
from policies.models.vocabulary import Match, compare, refusal

ONLY_ON_RAY = "goes with Ray, which cluster.address or cluster.runtime: ray asks for; others run on this machine"
_OF_OWN_PROCESS = {"host", "cores", "overlap", "max_wait_ms", "answer_timeout_s", "workers"}
_SPLITTING = "torch_device"
_PLANNED = "the plan chooses how replicas compute; leave it out, or name model.adapter and model.device"
_PLACED = (
    "a plan chooses where replicas run; name hosts or devices in placement.pin_target, or adapter and device of model "
    "and drafts"
)
_ROOM = "a second replica would compute on the same"


def check_speculation(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse a least depth above the most, and keys of a tolerance that is learned where one is fixed. Raises
    ConfigError."""
    speculation, pid = config.speculation, config.speculation.pid
    most = ("num_speculative_tokens", speculation.num_speculative_tokens)
    deepest = ("pid.max_depth", pid.max_depth) if pid.max_depth else most
    bounds: list[tuple[Place, int, tuple[str, int]]] = [
        (("min_speculative_tokens",), speculation.min_speculative_tokens, most),
        (("pid", "max_depth"), pid.max_depth, most),
        (("pid", "min_depth"), pid.min_depth if "min_depth" in pid.model_fields_set else 0, deepest),
    ]
    for key, depth, (bound, limit) in bounds:
        if depth > limit:
            place = config.find_place("speculation", *key)
            why = f"{depth} is above {format_place(place[: -len(key)])}.{bound}, which is {limit}"
            raise file.refuse(place, why)
    for name in ("tolerance_acceptance_rate", "tolerance_warmup_tokens", "tolerance_max_delta"):
        if speculation.tolerance_delta and name in speculation.model_fields_set:
            why = "is of a tolerance that is learned, and tolerance_delta fixes it; leave one of them out"
            raise file.refuse(config.find_place("speculation", name), why)


def check_residency(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse what a model that comes and goes cannot have: what would stay in memory without it, and what is decided
    by how its workers do. Raises ConfigError."""
    model = config.model
    if model.keep == "always":
        if "idle_s" in model.model_fields_set:
            why = "goes with keep: while_used or keep: on_demand; add one, or leave the key out"
            raise file.refuse(config.find_place("model", "idle_s"), why)
        return
    place, why = config.find_place("model", "keep"), ""
    if config.planned:
        why = "a plan is made with all models in memory; name the model's adapter and device, and those of its drafts"
    elif model.bounds is not None:
        why = "load decides on the replicas, and none are there while it is unloaded; write a number of replicas"
    elif config.failover.standby:
        why = "a standby would stay in memory without it; leave failover.standby out"
    elif not model.name:
        why = "requests ask for it before it is loaded, by its name; give it one"
    if why:
        raise file.refuse(place, f"{model.keep}: {why}")


def check_drafts(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse keys of drafts that would change nothing, and draft stores that cannot be used. Raises ConfigError."""
    own = [at for at, _ in config.own_drafts]
    for at, draft in _list_models(config):
        if at in own and (key := _find_auto(draft)):
            raise file.refuse((*at, key), "no plan chooses for one replica's drafts; name one")
        for key in sorted(draft.model_fields_set & _OF_OWN_PROCESS):
            why = ""
            if draft.process == "target":
                why = "goes with process: own; add that, or leave the key out"
            elif key == "host" and draft.host and not config.cluster.on_ray:
                why = ONLY_ON_RAY
            elif key == "workers" and at in own:
                why = "is a key of `drafts`, whose workers an item shares that names the same draft; leave it out"
            elif key == "workers":
                why = _refuse_workers(draft.workers)
            if why:
                raise file.refuse((*at, key), why)
    stores = [
        (at, draft.store, draft.store_options if "store_options" in draft.model_fields_set else None)
        for at, draft in config.all_drafts
        if isinstance(draft, SuffixDraft)
    ]
    check_stores(stores, file)


def check_canary(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse a canary that is no other than the rest, and what cannot be tried that way. Raises ConfigError."""
    canary, place = config.canary, ("canary",)
    ours_off, theirs_off = not config.speculation.depth, not config.canary_speculation.depth
    shared = bool(canary.share) and not canary.drafts and ours_off  # nobody else has them loaded
    for at, draft in _list_models(config):
        for key in ("adapter", "device"):  # plans are made for the others
            if (at[0] == "canary" or shared) and getattr(draft, key) == AUTO:
                raise file.refuse((*at, key), "no plan chooses for it; name one")
    if not canary.share:
        return
    if canary.least_requests > canary.most_requests:
        why = f"must be at least least_requests, which is {canary.least_requests}"
        raise file.refuse(("canary", "most_requests"), why)
    if theirs_off and canary.drafts:
        raise file.refuse(place, "its drafts are never asked where its speculation is off; leave one of them out")
    drafts = config.drafts or config.own_drafts
    if theirs_off and (ours_off or not drafts):
        raise file.refuse(place, "speculation is off for everybody; give the canary a speculation.method")
    if not theirs_off and not canary.drafts and not drafts:
        raise file.refuse(place, "nobody has a drafter; give it canary.drafts")
    if config.speculation == config.canary_speculation and not config.canary_drafts:
        why = (
            "is no other than the rest; set canary.drafts, canary.speculation.method, "
            "canary.speculation.num_speculative_tokens or canary.speculation.acceptance, or share: 0"
        )
        raise file.refuse(place, why)


def check_target(config: ClusterConfig, decoder: DecoderSizes | None, file: SourceFile) -> None:
    """Refuse what cannot be of a target's places, objectives, vocabularies and parts; of its shape where that is known
    (`decoder`). Raises ConfigError."""
    _check_replicas(config, file)
    _check_cores(config, file)
    needs = {"ttft_percentile": "ttft_ms", "late": "ttft_ms", "tpot_percentile": "tpot_ms"}
    for key, needed in needs.items():
        if key in config.slo.model_fields_set and not getattr(config.slo, needed):
            raise file.refuse(config.find_place("slo", key), f"goes with slo.{needed}; set that, or leave the key out")
    _check_vocabularies(config, file)
    placement = config.find_place("placement")
    if placement != ("placement",) and not config.planned:
        way_out = f"set {format_place((*placement[:-1], 'adapter'))} or device to auto, or leave it out"
        raise file.refuse(placement, f"goes with a plan; {way_out}")
    for at, model in list_split(config):
        _check_shards(at, model, config, decoder, file)
        if model.tensor_parallel > 1 and (why := _refuse_ranks(model, decoder) or _find_missing_rank(config, model)):
            raise file.refuse((*at, "tensor_parallel"), why)
    _check_device_layers(config, file)
    _check_heads(config, decoder, file)


def _list_models(config: ClusterConfig) -> list[tuple[Place, ModelDraft]]:
    """Return the drafts that are models, with their places."""
    return [(at, draft) for at, draft in config.all_drafts if isinstance(draft, ModelDraft)]


def _list_placements(config: ClusterConfig) -> list[tuple[Place, OwnTarget]]:
    """Return where replicas may run, as far as that is written, with its place in the file."""
    bounds = config.model.bounds
    at: Place = ("model", "replicas") if bounds is None else ("model", "replicas", "places")
    placements = config.model.placements if bounds is None else bounds.places
    return [(config.find_place(*at, index), placement) for index, placement in enumerate(placements)]


def list_split(config: ClusterConfig) -> list[tuple[Place, Target]]:
    """Return the target, and those of its replicas that are on several devices in a way of their own, with their
    places."""
    own = [(at, placement) for at, placement in _list_placements(config) if placement.own_model.keys() & SPLITTING_KEYS]
    model = (config.find_place("model", "shards")[:-1], config.model)
    return [model, *((at, config.model.with_own(placement)) for at, placement in own)]


def _refuse_workers(workers: DraftWorkersSection) -> str:
    """Return why bounds of draft workers contradict each other or would change nothing; "" where they do not."""
    if workers.max and not workers.min:
        return "max goes with min, which is 0: one for each replica; set min, or leave max out"
    if workers.max and workers.max < workers.min:
        return f"max must be at least min, which is {workers.min}"
    if "idle_s" in workers.model_fields_set and workers.max <= workers.min:
        return "idle_s goes with a max above min; set that, or leave the key out"
    return ""


def _check_replicas(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse bounds between which load could change nothing, what one replica can have and several cannot, and hosts
    that are none."""
    if config.model.replicas == AUTO and not config.planned:
        way_out = f"set {format_place(config.find_place('model', 'adapter'))} or device to auto, or write a number"
        raise file.refuse(config.find_place("model", "replicas"), f"goes with a plan; {way_out}")
    if (bounds := config.model.bounds) is not None:
        for key, why in (("max", _refuse_most(bounds)), ("places", _refuse_places(config, bounds))):
            if why:
                raise file.refuse(config.find_place("model", "replicas", key), why)
    placements = _list_placements(config)
    computing = sum(not placement.is_endpoint for _, placement in placements)
    several = (computing if placements else config.model.most_replicas) > 1
    if config.devices.cores and (several or any(placement.cores for _, placement in placements)):
        replicas = format_place(config.find_place("model", "replicas"))
        why = f"are one worker's; give each replica its own in {replicas}, as in [{{cores: [0, 1]}}, {{cores: [2, 3]}}]"
        raise file.refuse(config.find_place("devices", "cores"), why)
    for at, placement in placements:
        _check_placement(config, at, placement, file, several=several)


def _check_placement(
    config: ClusterConfig, at: Place, placement: OwnTarget, file: SourceFile, *, several: bool
) -> None:
    """Refuse what a replica cannot have of its own, and what the plan decides. Raises ConfigError."""
    if placement.host and not config.cluster.on_ray:
        raise file.refuse((*at, "host"), ONLY_ON_RAY)
    if isinstance(placement, ReplicaTarget):
        check_endpoint(at, placement, file, planned=config.planned, alike=config.model.alike)
    if config.planned and placement.own_drafts is not None:
        raise file.refuse((*at, "drafts"), _PLANNED)
    placing = placement.model_fields_set & ({"host", "cores", "threads"} if several else {"host"})
    if config.planned and placing:
        raise file.refuse((*at, min(placing)), _PLACED)
    for key in placement.own_model:
        if why := _refuse_own(config, key, getattr(placement, key)):
            raise file.refuse((*at, key), why)


def _refuse_own(config: ClusterConfig, key: str, value: object) -> str:
    """Return why a replica may not have a key of `model` of its own; "" where it may."""
    if config.planned:
        return _PLANNED
    common = getattr(config.model, key)
    if config.model.alike and key not in ("device", "shards") and value != common:
        return f"{value} has other bits than {common}, and model.alike is true; leave one of the two out"
    return ""


def _refuse_most(bounds: ReplicaBounds) -> str:
    if bounds.max < bounds.min:
        return f"must be at least min, which is {bounds.min}"
    if bounds.max == bounds.min:
        return f"is min, so that load decides nothing; raise it, or write replicas: {bounds.min}"
    return ""


def _refuse_places(config: ClusterConfig, bounds: ReplicaBounds) -> str:
    if bounds.places:
        if config.planned:
            return "the plan chooses them; leave them out, and name devices or hosts in placement.pin_target"
        if len(bounds.places) != bounds.max:
            return f"must be one for each of max, which is {bounds.max}, not {len(bounds.places)}"
        return ""
    if config.planned or config.cluster.address:
        return ""
    if not is_processor(config.model.device):
        return f"is missing: {_ROOM} device, {config.model.device}; name a place for each, as in [{{}}, {{}}]"
    if not config.devices.threads:
        way_out = "set devices.threads, or name a place for each, as in [{cores: [0, 1]}, {cores: [2, 3]}]"
        return f"is missing: {_ROOM} cores, for each takes all of them; {way_out}"
    return ""


def _check_cores(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse cores that are named twice, or that this host lacks where workers run on it."""
    named = [(config.find_place("devices", "cores"), config.devices.cores)]
    named += [((*at, "cores"), placement.cores) for at, placement in _list_placements(config)]
    named += [((*at, "cores"), draft.cores) for at, draft in _list_models(config)]
    for at, model in list_split(config):
        named += [((*at, "shards", number, "cores"), shard.cores) for number, shard in enumerate(model.shards)]
    is_told = not config.cluster.across_hosts and hasattr(os, "sched_getaffinity")
    usable = os.sched_getaffinity(0) if is_told else None
    for place, cores in named:
        if len(set(cores)) < len(cores):
            raise file.refuse(place, "names a core twice")
        if usable is not None and (missing := sorted(set(cores) - usable)):
            has = ", ".join(map(str, sorted(usable)))
            raise file.refuse(place, f"this machine has no core {missing[0]} for workers; it has {has}")


def _check_vocabularies(config: ClusterConfig, file: SourceFile) -> None:
    """Compare the drafts' vocabularies with the target's, where both models are at hand."""
    wary = [(at, draft) for at, draft in _list_models(config) if draft.mismatched_vocabulary == "refuse"]
    ours = vocabulary_at_hand(config.model.source, file.base) if wary else None
    if ours is None:
        return
    for at, draft in wary:
        place = (*at, "source")
        try:
            theirs = vocabulary_at_hand(draft.source, file.base, ours)
        except ModelRefused as error:
            raise file.refuse(place, error) from error
        if theirs is not None and (comparison := compare(ours, theirs)).match is Match.DIFFERS:
            raise file.refuse(place, refusal(draft.source, comparison))  # else the worker compares them, too


def _check_shards(
    at: Place, model: Target, config: ClusterConfig, decoder: DecoderSizes | None, file: SourceFile
) -> None:
    """Refuse layer shards that contradict the model's other keys, or its shape where that is known. `at`: of whose
    they are."""
    place = (*at, "shards")
    if not model.shards:
        return
    if len(model.shards) == 1:
        raise file.refuse(place, "one shard is the whole target; name two or more, or leave it out")
    for number, shard in enumerate(model.shards):
        if shard.host and not config.cluster.on_ray:
            raise file.refuse((*place, number, "host"), ONLY_ON_RAY)
    whole = model.adapter in OWN_ADAPTERS and model.adapter not in SHARDING_ADAPTERS
    if whole and not all(shard.adapter for shard in model.shards):
        way_out = f"set adapter: {list_sharding()}, or leave shards out"
        raise file.refuse(place, f"{describe_whole(model.adapter)}; {way_out}")
    if key := _find_auto(model):
        raise file.refuse(place, f"a plan chooses shards where the {key} is {AUTO!r}; name it, or leave shards out")
    for at, draft in _list_models(config):
        if _find_auto(draft):
            why = f"no plan is made beside {format_place(place)}; name the draft's adapter and device"
            raise file.refuse(at, why)
    if model.static_shapes == "on":
        why = "graphs of fixed shape hold whole targets; leave one of static_shapes and this out"
        raise file.refuse(place, why)
    if decoder is not None:
        try:
            refuse_whole(decoder, model.source)
            cut_layers([shard.layers for shard in model.shards], decoder.layers, model.source)
        except ModelRefused as error:
            raise file.refuse(place, error) from error


def _find_auto(model: Target | ModelDraft) -> str:
    """Return which key of a model is left to a plan; "" where none is."""
    return "adapter" if model.adapter == AUTO else "device" if model.device == AUTO else ""


def _refuse_ranks(model: Target, decoder: DecoderSizes | None) -> str:
    """Return why a target's layers cannot be split over its ranks; "" where they can."""
    if key := _find_auto(model):
        return f"a plan chooses ranks where the {key} is {AUTO!r}; name it, or leave tensor_parallel out"
    if model.adapter in OWN_ADAPTERS and model.adapter != _SPLITTING:
        return f"{model.adapter} cannot split layers; set adapter: {_SPLITTING}, or leave tensor_parallel out"
    if model.static_shapes == "on":
        return "graphs of fixed shape hold whole targets; leave one of static_shapes and tensor_parallel out"
    if model.shards:
        return "a target is in layer shards or its layers are split, not both; leave one of shards and this out"
    if isinstance(decoder, DirectoryFacts):
        return f"{LOADED_WHOLE}; leave tensor_parallel out"
    if isinstance(decoder, DecoderSpec) and model.tensor_parallel > decoder.most_ranks:
        return describe_too_many(decoder, model.tensor_parallel)
    return ""


def _find_missing_rank(config: ClusterConfig, model: Target) -> str:
    """Return why this machine has no device for the last rank; "" where it has, or nobody here can tell."""
    last = list_rank_devices(model.device, model.tensor_parallel)[-1]
    if config.cluster.across_hosts or split_device(last)[0] != CUDA_KIND:
        return ""
    from adapters.device_memory import list_nvidia_memory  # loaded where ranks are on GPUs

    count, index = len(list_nvidia_memory()), find_index(last)
    if not count or index is None or index < count:
        return ""
    return f"{model.tensor_parallel} ranks from {model.device} on need {last}, and this machine has {count} such GPUs"


def _check_heads(config: ClusterConfig, decoder: DecoderSizes | None, file: SourceFile) -> None:
    """Refuse heads where the target's runtime keeps no hidden states, and heads of another model."""
    targets = [config.model, *(config.model.with_own(own) for _, own in _list_placements(config) if own.own_model)]
    for at, draft in config.all_drafts:
        if not isinstance(draft, HeadDraft):
            continue
        for target in targets:
            if target.adapter == AUTO or (target.adapter in OWN_ADAPTERS and target.adapter not in HEAD_ADAPTERS):
                which = "the plan may choose a runtime that" if target.adapter == AUTO else target.adapter
                why = f"{which} gives no hidden states; set the target's adapter: {' or '.join(HEAD_ADAPTERS)}"
                raise file.refuse((*at, "method"), why)
            if target.shards or target.tensor_parallel > 1:
                why = "needs all layers of its target in one process; leave shards and tensor_parallel out"
                raise file.refuse((*at, "method"), why)
        if config.cluster.across_hosts:
            continue  # each host has a directory of its own, and says so when it loads it
        try:
            head = read_head(file.resolve(draft.source))
            if decoder is not None:
                sizes = {"hidden": decoder.hidden, "vocabulary": decoder.vocabulary_size, "layers": decoder.layers}
                check_head(head, config.model.source, **sizes)
        except ModelRefused as error:
            raise file.refuse((*at, "source"), error) from error


def _check_device_layers(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse a number of layers for a device that holds all of them or nothing."""
    models: list[tuple[Place, Target | ModelDraft]] = [(config.find_place("model"), config.model)]
    for at, model in (*models, *_list_models(config)):
        fits = model.adapter not in OWN_ADAPTERS or (model.adapter == LLAMA_CPP and not is_processor(model.device))
        if model.device_layers != "all" and (not fits or _find_auto(model)):
            why = f"{model.adapter} on {model.device} has all layers there"
            way_out = f"Set adapter: {LLAMA_CPP} and a GPU as the device, or leave the key out."
            raise file.refuse((*at, "device_layers"), f"{why}. {way_out}")
