"""The agent of a host: says what its devices are, and then what they do. One runs on every node."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from adapters.builds import list_bit_versions
from adapters.contract import AdapterError
from device_profiles.device_names import name_compute_unit
from orchestrator.config.load import parse_config
from orchestrator.config.model import ClusterConfig, Store
from orchestrator.daemon.cluster.inventory import HostInventory, MissingProfile
from orchestrator.errors import OutriderError
from orchestrator.machine.device_sampler import DeviceSampler
from orchestrator.machine.devices import list_devices_here, list_free_bytes
from orchestrator.planning.profiling.work import Work, is_requested, list_unfit, list_work, profile_store
from orchestrator.protocol.commands import Command, CountAsOurs, Stop
from orchestrator.protocol.contract import NODE_ADDRESS, WorkerSpec
from orchestrator.protocol.events import DevicesSampled, Event, Failed, HostDescribed

AGENT_ENTRY = "orchestrator.daemon.cluster.agent:build_agent"
# ADR 0057: each second; a sample costs 2.8 ms.
SAMPLE_EVERY_S = 1.0


class AgentOptions(msgspec.Struct, frozen=True):
    """cluster.yaml's `text`, which stands in the file `path`; `store`: where prepared models and profiles are kept.
    `target`: the number of the target whose models are to be measured, in the order of the file. `stated_bytes`: what
    a plan may fill of devices of this host, by name, where cluster.yaml states it."""

    text: str
    path: str
    store: str
    target: int = 0
    stated_bytes: dict[str, int] = {}


def agent_spec(node: str, options: AgentOptions) -> WorkerSpec:
    """Return how the agent of a node is started. It takes no place from a worker."""
    return WorkerSpec(
        name=f"agent {node}", entry=AGENT_ENTRY, options=msgspec.to_builtins(options), cpus=0.0, node=node
    )


def build_agent(options: dict[str, Any]) -> Agent:
    return Agent(msgspec.convert(options, AgentOptions))


class Agent:
    """Implements protocol.contract.Engine."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._stopped = threading.Event()
        self._ours: list[int] = []

    def submit(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopped.set()
        elif isinstance(command, CountAsOurs):
            self._ours = command.pids

    def describe_step(self) -> None:
        """See protocol.contract.Engine. It is idle between two looks."""

    def run(self, emit: Callable[[Event], None]) -> None:
        try:
            inventory = describe_host(self._options)
        except (OutriderError, AdapterError, OSError) as error:
            emit(Failed(f"the host cannot be described: {error}", restartable=False))
            return
        emit(HostDescribed(msgspec.to_builtins(inventory)))
        sampler = DeviceSampler(lambda: self._ours)
        while not self._stopped.wait(SAMPLE_EVERY_S):
            emit(DevicesSampled(sampler.sample()))


def describe_host(options: AgentOptions) -> HostInventory:
    """Return what this host has. Raises OutriderError where the configuration cannot be read here."""
    here, failed = list_devices_here(), list[str]()
    lacks = here.lacks
    config, path = _read_configuration(options)
    store = profile_store(config)
    marks = {device.fingerprint for device in here.seen}
    missing: list[MissingProfile] = []
    try:
        lacks |= list_unfit(config, path.parent)
        work = [work for work in list_work(config, path.parent) if is_requested(work, config)]
        room = list_free_bytes(here.seen) | options.stated_bytes
        work = [_state_room(piece, room, config.placement.keep_free) for piece in work]
        missing = [
            MissingProfile(piece.job, piece.fingerprint, piece.threads, piece.digest)
            for piece in work
            if not piece.is_known(store)
        ]
    except AdapterError as error:
        failed.append(f"the model: {error}")
    return HostInventory(
        address=os.environ.get(NODE_ADDRESS, ""),
        hostname=platform.node(),
        version=version("outrider"),
        python=platform.python_version(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        devices=here.seen,
        libraries=list_bit_versions(),
        lacks=lacks,
        failed=tuple(failed),
        devices_measured=tuple(device for device in store.devices() if device.fingerprint in marks),
        models_measured=tuple(model for model in store.models() if model.fingerprint in marks),
        missing=tuple(missing),
    )


def _state_room(work: Work, room: Mapping[str, int], keep_free: float) -> Work:
    """Return a piece of work that knows what a plan may fill of its device. `room`: in bytes, by device."""
    by_unit = {name_compute_unit(name): size for name, size in room.items()}
    may_be_filled = int(by_unit.get(name_compute_unit(work.job.model.device), 0) * (1.0 - keep_free))
    return replace(work, job=msgspec.structs.replace(work.job, room_bytes=may_be_filled))


def _read_configuration(options: AgentOptions) -> tuple[ClusterConfig, Path]:
    path = Path(options.path)
    config = parse_config(options.text, path)[0].targets[options.target]
    return config.model_copy(update={"store": Store(directory=options.store)}), path
