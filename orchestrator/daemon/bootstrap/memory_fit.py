"""Whether the KV caches of a cluster.yaml fit into this machine's memory, beside what is known of their models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adapters.contract import AdapterError
from adapters.device_memory import list_nvidia_memory, read_host_memory, read_nvidia_memory
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import resolve
from adapters.names import LLAMA_CPP, OWN_ADAPTERS
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.device_names import CUDA_KIND, find_index, is_processor, split_device
from device_profiles.profile import Precision
from device_profiles.units import human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import Lines, Place, describe_place
from orchestrator.config.target import AUTO, Target
from orchestrator.fitting.precision import sizes_of
from policies.models.kv_shares import SHARES, choose_share, name_share
from policies.models.quantization import AS_FILE, weights_bytes


class KvMisfit(NamedTuple):
    """A KV cache that is too large. `fatal`: its model cannot be loaded with a part of it either."""

    place: Place
    text: str
    fatal: bool


class _Room(NamedTuple):
    total_bytes: int
    whose: str


def list_kv_misfits(config: ClusterConfig, base: Path) -> list[KvMisfit]:
    """Return the KV caches that no worker on this machine can have whole. What is free now does not count: another
    program may end. Relative sources start from `base`."""
    misfits = []
    elsewhere = config.cluster.on_ray and bool(config.cluster.address)
    for place, model, kv_cache_bytes in _list_caches(config):
        hosts = {placement.host for placement in model.placements} if isinstance(model, Target) else {model.host}
        room = _find_room(model) if not elsewhere or THIS_NODE in hosts else None
        if room is not None and (misfit := _compare(place, model, kv_cache_bytes, room, base)):
            misfits.append(misfit)
    return list(dict.fromkeys(misfits))


def list_memory_notes(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each KV cache that will be halved."""
    misfits = list_kv_misfits(config, path.resolve().parent)
    return [f"{describe_place(path, lines, misfit.place)} {misfit.text}" for misfit in misfits if not misfit.fatal]


def _list_caches(config: ClusterConfig) -> Iterator[tuple[Place, Target | ModelDraft, int]]:
    for target in config.targets:
        for at, own in target.own_targets:
            its, place = target.model.with_own(own), target.find_place("limits", "kv_cache")
            if not its.shards and its.tensor_parallel == 1:  # several devices share one
                cache = int(own.kv_cache or target.limits.kv_cache)
                yield (*at, "kv_cache") if own.kv_cache else place, its, cache
        for at, draft in target.all_drafts:
            if isinstance(draft, ModelDraft):
                yield (*at, "kv_cache"), draft, int(draft.kv_cache)


def _find_room(model: Target | ModelDraft) -> _Room | None:
    """Return the most memory that a model can have here; None where nobody here can tell."""
    if model.source.startswith(SIMULATED_PREFIX) or model.adapter not in (AUTO, *OWN_ADAPTERS):
        return None
    index = find_index(model.device)
    host = read_host_memory()
    limit = f" that {host.limit_file} allows" if host.limit_file else " of this machine's memory"
    own = _Room(host.total_bytes, f"{human_bytes(host.total_bytes)}{limit}")
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


def _compare(place: Place, model: Target | ModelDraft, kv_cache_bytes: int, room: _Room, base: Path) -> KvMisfit | None:
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
    way = f"set {human_bytes(most)} or less" if most > 0 else "take a smaller model or another device"
    return KvMisfit(place, f"{text}; {way}", share is None)


def _find_least_weights(model: Target | ModelDraft, base: Path) -> int:
    """Return what a model's weights take at least, 0 where its files are not at hand."""
    if model.source.startswith(HUB_PREFIX):
        return 0
    try:
        sizes = sizes_of(resolve(model.source, base))
    except (AdapterError, OSError):
        return 0  # told by those who check models, and by the load
    formats = (AS_FILE, Precision.INT4) if model.weights == AUTO else (model.weights,)
    return min(weights_bytes(sizes, weights) for weights in formats)
