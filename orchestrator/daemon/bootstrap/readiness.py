"""Whether this machine can do what a cluster.yaml asks for, as far as that is known without loading a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from adapters import registry
from adapters.contract import AdapterUnavailable, Exactness, ModelRefused, StaticShapes, Unsupported
from adapters.device_check import check_device
from adapters.hf_hub import HUB_PREFIX
from adapters.model_checks import check_library
from adapters.model_source import resolve
from adapters.names import LLAMA_CPP, normalise_device
from device_profiles.device_names import list_rank_devices
from device_profiles.profile import find_listed_device
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import admin_socket_path, state_directory, store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import Lines, Place, format_place
from orchestrator.config.target import AUTO, OwnTarget, Target
from orchestrator.config.target_checks import list_split
from orchestrator.daemon.bootstrap.memory_fit import list_memory_misfits
from orchestrator.daemon.bootstrap.residency import list_residency_misfits
from orchestrator.daemon.bootstrap.tracing import INSTALL as INSTALL_OTEL
from orchestrator.daemon.bootstrap.tracing import LIBRARY as OTEL_LIBRARY
from orchestrator.errors import ConfigError, WorkerError
from orchestrator.fitting.precision import variant
from orchestrator.fitting.worker_options import read_static_shapes
from orchestrator.launch import ray_settings
from orchestrator.machine.devices import effective_device
from policies.models.quantization import AS_FILE, PrecisionRequest, list_unmet

_FORMATS: Final = ("weights", "activations", "kv_cache_precision")


@dataclass(frozen=True, slots=True)
class Readiness:
    """`checked`: in a few words each. `warnings`: lines about what may be put right until the daemon starts."""

    checked: list[str]
    warnings: list[str]


def check_readiness(config: ClusterConfig, path: Path, lines: Lines) -> Readiness:
    """Return what was checked. Raises ConfigError, one line for each thing that is missing."""
    checked: list[str] = []
    missing = [_refuse(path, lines, place, text) for place, text in _list_missing_libraries(config)]
    for load in _list_loads(config):
        place = (*load.place, "device")
        if AUTO in (load.adapter, load.device):  # a plan says where it is loaded
            continue
        if not load.here:
            checked.append(f"not {format_place(place)}: it is for another host")
            continue
        try:
            how = check_device(load.adapter, load.device)
        except (AdapterUnavailable, Unsupported) as error:
            missing.append(_refuse(path, lines, place, str(error)))
            continue
        name = f"{format_place(place)} {load.device}"
        checked.append(f"{name} ({how})" if how else f"not {name}: nobody here can tell")
        if how:
            missing += [_refuse(path, lines, *problem) for problem in _list_load_problems(load, path.resolve().parent)]
    missing += [
        _refuse(path, lines, misfit.place, misfit.text)
        for misfit in list_memory_misfits(config, path.resolve().parent)
        if misfit.fatal
    ]
    misfits = list_residency_misfits(config, path.resolve().parent)
    missing += [_refuse(path, lines, place, text) for place, text in misfits]
    directories = (
        (("store", "directory"), store_directory(config)),
        (("state", "directory"), state_directory(config, path)),
    )
    for place, directory in directories:
        if why := find_write_problem(directory):
            missing.append(_refuse(path, lines, place, f"{why}; name a directory that this user can write"))
        else:
            checked.append(f"{directory} can be written")
    place = ("api", "admin_socket")
    socket = admin_socket_path(config, config.api.port)
    if not socket.parent.is_dir():
        missing.append(_refuse(path, lines, place, f"there is no directory {socket.parent}; make it"))
    if missing:
        raise ConfigError("\n".join(dict.fromkeys(missing)))
    warnings = [_refuse(path, lines, place, text) for place, text in _list_ray_problems(config)]
    if config.cluster.across_hosts and not warnings:
        does = "can be kept here" if config.cluster.head else "answers"
        checked.append(f"Ray at {config.cluster.address} {does}")
    return Readiness(list(dict.fromkeys(checked)), warnings)


def _list_missing_libraries(config: ClusterConfig) -> Iterator[tuple[Place, str]]:
    """Return the keys that need libraries which are not installed, with the command that installs them."""
    if config.cluster.on_ray and not _is_installed("ray"):
        yield ("cluster", "runtime"), f"Ray is not installed: {ray_settings.WAY_OUT}"
    if config.cluster.job_server and (
        names := [library for library in ray_settings.JOB_LIBRARIES if not _is_installed(library)]
    ):
        yield ("cluster", "job_server"), f"{', '.join(names)} not installed: {ray_settings.JOB_SERVER_WAY_OUT}"
    if config.tracing.endpoint and not _is_installed(OTEL_LIBRARY):
        yield ("tracing", "endpoint"), f"{OTEL_LIBRARY} is not installed: {INSTALL_OTEL}, or leave tracing out"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it is in is not installed
        return False


def _list_ray_problems(config: ClusterConfig) -> Iterator[tuple[Place, str]]:
    """Return what keeps a daemon with this user's environment from having its Ray now. Its head may start later."""
    cluster = config.cluster
    if not cluster.on_ray:
        return
    key = "address" if cluster.address else "job_server"
    if cluster.head:
        if why := ray_settings.find_bind_problem(cluster.address):
            yield ("cluster", "address"), f"{why}; with cluster.head it is one of this machine's addresses"
        return
    if cluster.auth == "token" and (cluster.address or cluster.job_server):
        try:
            ray_settings.require_token(cluster.address, os.environ)
        except WorkerError as error:
            yield ("cluster", key), str(error)
    if cluster.address and (why := ray_settings.find_head_problem(cluster.address)):
        text = f"{why}. Start Ray there (`ray start --head`), or name the address of its head"
        yield ("cluster", "address"), text


def find_write_problem(directory: Path) -> str:
    """Return why nothing can be kept in a directory, which need not be there yet; "" where it can. A file is written
    there and removed, or in the nearest directory above it."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{directory} cannot be written ({nearest}: {error.strerror})"
    return ""


@dataclass(frozen=True, slots=True)
class _Load:
    """A model that is to be loaded onto a named device. `place`: of its section; `source` and `formats`: as
    cluster.yaml says them; `here`: the device is this machine's."""

    place: Place
    source: str
    adapter: str
    device: str
    formats: PrecisionRequest
    static: StaticShapes
    here: bool


def _list_loads(config: ClusterConfig) -> Iterator[_Load]:
    elsewhere = config.cluster.across_hosts
    for target in config.targets:
        model = target.model
        here = not elsewhere or any(placement.host == THIS_NODE for placement in model.placements)
        yield from _list_target_loads(model, target.own_replicas, elsewhere=elsewhere)
        for place, its in list_split(target):
            for index, shard in enumerate(its.shards):
                adapter = shard.adapter or its.adapter
                device = normalise_device(adapter, shard.device or its.device)
                model_fields = (its.source, adapter, device, _read_formats(its, its.exactness))
                yield _Load(
                    (*place, "shards", index),
                    *model_fields,
                    StaticShapes(),
                    shard.host == THIS_NODE if shard.host else here,
                )
        for at, draft in target.all_drafts:
            if isinstance(draft, ModelDraft):
                model_fields = (draft.source, draft.adapter, draft.device, _read_formats(draft, Exactness.KERNEL))
                yield _Load(at, *model_fields, read_static_shapes(draft), not elsewhere or draft.host == THIS_NODE)
        yield from _list_target_loads(model, target.own_standbys, elsewhere=elsewhere)


def _list_target_loads(
    model: Target, targets: Iterable[tuple[Place, OwnTarget]], *, elsewhere: bool
) -> Iterator[_Load]:
    for at, own in targets:
        its = model.with_own(own)
        for device in dict.fromkeys(list_rank_devices(its.device, its.tensor_parallel)):
            formats, here = _read_formats(its, its.exactness), not elsewhere or own.host == THIS_NODE
            yield _Load(at, its.source, its.adapter, device, formats, read_static_shapes(its), here)


def _list_load_problems(load: _Load, base: Path) -> Iterator[tuple[Place, str]]:
    """Return why a runtime that is here cannot prepare a model so, or run it. What `weights: auto` chooses may need
    more than `as_file` does."""
    key, weights = "static_shapes", load.formats.weights
    try:
        adapter = registry.get_for(load.adapter, load.device, load.static)
        key = "adapter" if weights == AUTO else "weights"
        variant(adapter, AS_FILE if weights == AUTO else weights).recipe()
        if load.adapter == LLAMA_CPP and not load.source.startswith(HUB_PREFIX):
            key = "adapter"
            check_library(resolve(load.source, base).path)
    except (AdapterUnavailable, ModelRefused, Unsupported) as error:
        yield (*load.place, key), str(error)
        return
    if (load.formats.activations, load.formats.kv_cache) != (AUTO, AUTO):  # else nobody loads a runtime to ask
        device = find_listed_device(adapter.devices(), effective_device(load.adapter, load.device))
        for named, why in list_unmet(device, load.formats) if device is not None else ():
            yield (*load.place, named), why


def _read_formats(model: Target | ModelDraft, exactness: Exactness) -> PrecisionRequest:
    weights, activations, kv_cache = (getattr(model, key) for key in _FORMATS)
    return PrecisionRequest(weights, activations, kv_cache, exactness=exactness)


def _refuse(path: Path, lines: Lines, place: Place, text: str) -> str:
    """Return a line that names the key, or the nearest one above it that the file has."""
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1)
    return f"{path}:{line}: {format_place(place)}: {text}"
