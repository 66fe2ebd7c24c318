"""Whether the models of a cluster.yaml fit into this machine's memory with their KV caches, each and all together, and
whether a fixed context is one that they have. What does not fit is told by its key, with a value that would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adapters.contract import AdapterError
from adapters.device_memory import list_nvidia_memory, read_host_memory, read_nvidia_memory
from adapters.hf_hub import HUB_PREFIX, find_cached, parse_id
from adapters.model_source import ModelSource, check_model, resolve
from adapters.names import LLAMA_CPP, OWN_ADAPTERS
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.device_names import CUDA_KIND, find_index, is_processor, split_device
from device_profiles.profile import Precision
from device_profiles.units import MIB, human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import Lines, Place, describe_place
from orchestrator.config.target import AUTO, Target
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import sizes_of
from orchestrator.planning.estimates import KV_BYTES
from policies.models.kv_shares import SHARES, choose_share, name_share
from policies.models.quantization import AS_FILE, weights_bytes

# A KV cache below this is no way out: it holds a thousand tokens of a model of 1.5B, and is what tests take. Not tuned.
_USEFUL_KV_BYTES = 32 * MIB

_LOWER_BOTH = "lower it, and take a smaller model or another device"


class MemoryMisfit(NamedTuple):
    """What does not fit, by its key. `fatal`: its model cannot be loaded with a part of its KV cache either."""

    place: Place
    text: str
    fatal: bool


class _Room(NamedTuple):
    total_bytes: int
    whose: str


class _Load(NamedTuple):
    """A model in this machine's memory, of which `weights_bytes` are the least that it may take, and the KV cache as
    configured. `place`: of its section."""

    place: Place
    kv_place: Place
    source: str
    title: str
    weights_bytes: int
    kv_cache_bytes: int

    @property
    def least_kv_bytes(self) -> int:
        return self.kv_cache_bytes // SHARES[-1]


def list_memory_misfits(config: ClusterConfig, base: Path) -> list[MemoryMisfit]:
    """Return what no worker on this machine can have whole. What is free now does not count: another program may end.
    Relative sources start from `base`."""
    misfits = []
    for place, source_place, model, kv_cache_bytes in _list_caches(config):
        room = _find_room(model) if _is_here(config, model) else None
        if room is not None and (misfit := _compare((place, source_place), model, kv_cache_bytes, room, base)):
            misfits.append(misfit)
    for target in config.targets:
        misfits += _compare_context(target, base)
    if not any(misfit.fatal for misfit in misfits):
        misfits += _compare_together(config, base)
    return list(dict.fromkeys(misfits))


def refuse_misfits(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Raise ConfigError with a line for each thing that cannot be loaded here."""
    misfits = list_memory_misfits(config, path.resolve().parent)
    if fatal := [f"{describe_place(path, lines, misfit.place)} {misfit.text}" for misfit in misfits if misfit.fatal]:
        raise ConfigError("\n".join(fatal))


def _is_here(config: ClusterConfig, model: Target | ModelDraft) -> bool:
    hosts = {placement.host for placement in model.placements} if isinstance(model, Target) else {model.host}
    return not config.cluster.across_hosts or THIS_NODE in hosts


def list_memory_notes(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each KV cache that will be halved."""
    misfits = list_memory_misfits(config, path.resolve().parent)
    return [f"{describe_place(path, lines, misfit.place)} {misfit.text}" for misfit in misfits if not misfit.fatal]


def _list_caches(config: ClusterConfig) -> Iterator[tuple[Place, Place, Target | ModelDraft, int]]:
    """Yield each KV cache: its place and that of its model's source, the model, and its bytes."""
    for target in config.targets:
        for at, own in target.own_targets:
            its, place = target.model.with_own(own), target.find_place("limits", "kv_cache")
            if not its.shards and its.tensor_parallel == 1:  # several devices share one
                cache = int(own.kv_cache or target.limits.kv_cache)
                yield (*at, "kv_cache") if own.kv_cache else place, target.find_place("model", "source"), its, cache
        for at, draft in target.all_drafts:
            if isinstance(draft, ModelDraft):
                yield (*at, "kv_cache"), (*at, "source"), draft, int(draft.kv_cache)


def _find_room(model: Target | ModelDraft) -> _Room | None:
    if model.source.startswith(SIMULATED_PREFIX) or model.adapter not in (AUTO, *OWN_ADAPTERS):
        return None
    index = find_index(model.device)
    own = _read_host_room()
    if is_processor(model.device):
        return own
    if model.adapter == LLAMA_CPP:
        return None  # the host's memory may have a part of it
    if AUTO in (model.adapter, model.device):
        sizes = [memory.total_bytes for memory in list_nvidia_memory()]
        return max([own, *(_Room(size, f"{human_bytes(size)} of the largest device") for size in sizes)])
    is_cuda = split_device(model.device)[0] == CUDA_KIND
    device = read_nvidia_memory(index) if is_cuda and index is not None else None
    return None if device is None else _Room(device.total_bytes, f"{human_bytes(device.total_bytes)} of {model.device}")


def _read_host_room() -> _Room:
    host = read_host_memory()
    limit = f" that {host.limit_file} allows" if host.limit_file else " of this machine's memory"
    return _Room(host.total_bytes, f"{human_bytes(host.total_bytes)}{limit}")


def _compare(
    places: tuple[Place, Place], model: Target | ModelDraft, kv_cache_bytes: int, room: _Room, base: Path
) -> MemoryMisfit | None:
    """Return what is too large of a model: its KV cache, or its weights. `places`: of both."""
    weights = _find_least_weights(model, base)
    share = choose_share(kv_cache_bytes, weights, room.total_bytes)
    if share == 1:
        return None
    beside = f" beside {human_bytes(weights)} of weights" if weights else ""
    text = f"a KV cache of {human_bytes(kv_cache_bytes)}{beside} does not fit into the {room.whose}"
    if share is None:
        least = f"{name_share(SHARES[-1])} of it ({human_bytes(kv_cache_bytes // SHARES[-1])})"
        text += f", and nor does {least}"
    else:
        text += f": {name_share(share)} of it is loaded ({human_bytes(kv_cache_bytes // share)})"
    most = room.total_bytes - weights
    if most >= _USEFUL_KV_BYTES:
        return MemoryMisfit(places[0], f"{text}; set {_format_size(most)} or less", share is None)
    most = room.total_bytes - kv_cache_bytes // SHARES[-1]
    way = f"take a model with {_format_size(most)} of weights or less, or another device"
    if most <= 0:  # neither is anything near
        return MemoryMisfit(places[0], f"{text}; {_LOWER_BOTH}", share is None)
    return MemoryMisfit(places[1], f"{text}; {way}", share is None)


def _compare_together(config: ClusterConfig, base: Path) -> Iterator[MemoryMisfit]:
    """Yield where all that stays in this machine's memory is more than it has, each model with the least part of its KV
    cache. Replicas count once, and so does a file: what is mapped may be shared."""
    loads: list[_Load] = []
    for load in _list_resident(config, base):
        is_shared = any(load.source == other.source for other in loads)
        loads.append(load._replace(weights_bytes=0) if is_shared else load)
    room = _read_host_room()
    needed = sum(load.weights_bytes + load.least_kv_bytes for load in loads)
    if len(loads) < 2 or needed <= room.total_bytes:
        return
    parts = [f"{load.title} ({human_bytes(load.weights_bytes)} of weights)" for load in loads]
    text = f"{' and '.join(parts)} need {human_bytes(needed)} with a quarter of their KV caches; there are {room.whose}"
    largest = max(loads, key=lambda load: load.kv_cache_bytes)
    most = room.total_bytes - needed + largest.least_kv_bytes
    last = loads[-1]
    if most >= _USEFUL_KV_BYTES:
        yield MemoryMisfit(largest.kv_place, f"{text}; set {_format_size(most)} or less", fatal=True)
    else:
        most = room.total_bytes - needed + last.weights_bytes
        way = f"take one with {_format_size(most)} of weights or less" if most > 0 else "leave it out"
        if last.place[0] == "models":
            way += ", or let both come and go (keep: on_demand)"
        yield MemoryMisfit((*last.place, "source"), f"{text}; {way}", fatal=True)


def _list_resident(config: ClusterConfig, base: Path) -> Iterator[_Load]:
    for target in config.targets:
        model, at = target.model, target.find_place("model", "source")[:-1]
        if model.keep != "always" or not _is_here(config, model):
            continue
        for own_at, own in target.own_replicas[:1]:
            its = model.with_own(own)
            if not its.shards and its.tensor_parallel == 1 and _is_in_host_memory(its):
                place = (*own_at, "kv_cache") if own.kv_cache else target.find_place("limits", "kv_cache")
                cache = int(own.kv_cache or target.limits.kv_cache)
                yield _Load(at, place, model.source, model.name, _find_least_weights(its, base), cache)
        for number, draft in enumerate(target.drafts if target.speculation.depth else ()):
            if isinstance(draft, ModelDraft) and _is_here(config, draft) and _is_in_host_memory(draft):
                place = target.find_place("drafts", number)
                title, weights = f"the draft {draft.source}", _find_least_weights(draft, base)
                yield _Load(place, (*place, "kv_cache"), draft.source, title, weights, int(draft.kv_cache))


def _is_in_host_memory(model: Target | ModelDraft) -> bool:
    if model.source.startswith(SIMULATED_PREFIX) or model.adapter not in (AUTO, *OWN_ADAPTERS):
        return False
    return is_processor(model.device) or (AUTO in (model.adapter, model.device) and not list_nvidia_memory())


def _compare_context(target: ClusterConfig, base: Path) -> Iterator[MemoryMisfit]:
    """Yield where graphs of a fixed context have more positions than the model reads, or its KV cache holds."""
    wanted = target.model.static_context_tokens
    path = find_files(target.model, base) if wanted else None
    if path is None:
        return
    try:
        facts = check_model(path, target.model.adapter)
    except AdapterError:
        return  # told by those who check models
    place = target.find_place("model", "static_context_tokens")
    text = f"{wanted:,} positions are more than"
    token_bytes = KV_BYTES * facts.count_kv_elements(facts.all_layers)
    held = int(target.limits.kv_cache) // token_bytes
    if wanted > facts.context_length:
        most = min(facts.context_length, held)
        yield MemoryMisfit(
            place, f"{text} the {facts.context_length:,} that the model reads; set {most} or less", fatal=True
        )
    elif wanted > held:
        cache = human_bytes(target.limits.kv_cache)
        yield MemoryMisfit(
            place, f"{text} the {held:,} that a KV cache of {cache} holds; set {held} or less", fatal=True
        )


def _format_size(size_bytes: int) -> str:
    """Return a size as cluster.yaml takes it, rounded down: what is told to fit does."""
    return f"{size_bytes // MIB} MiB"


def _find_least_weights(model: Target | ModelDraft, base: Path) -> int:
    """Return what a model's weights take at least, 0 where its files are not at hand."""
    file = find_files(model, base)
    try:
        sizes = sizes_of(file) if file is not None else None
    except (AdapterError, OSError):
        return 0  # told by those who check models, and by the load
    if sizes is None:
        return 0
    formats = (AS_FILE, Precision.INT4) if model.weights == AUTO else (model.weights,)
    return min(weights_bytes(sizes, weights) for weights in formats)


def find_files(model: Target | ModelDraft, base: Path) -> ModelSource | None:
    try:
        if not model.source.startswith(HUB_PREFIX):
            return None if model.source.startswith(SIMULATED_PREFIX) else resolve(model.source, base)
        path = find_cached(parse_id(model.source))
        return None if path is None else resolve(str(path), base)
    except (AdapterError, OSError):
        return None
