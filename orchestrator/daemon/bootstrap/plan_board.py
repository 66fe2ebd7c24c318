"""What each target of a daemon takes of devices, so that no plan takes what another target has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adapters.contract import AdapterError
from device_profiles.device_names import list_rank_devices
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.target import Target
from orchestrator.errors import OutriderError
from orchestrator.machine.devices import effective_device
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.neighbours import ReservedDraft, TakenPlace, list_plan_places, reserve_draft
from policies.planning.plan import Plan

_log = logging.getLogger(__name__)


class PlanBoard:
    """The targets of a file, in its order. Plans are made in that order, and each goes before the next ones: those
    leave it its share of a device's time. What no plan places goes before every plan."""

    def __init__(self, configs: Sequence[ClusterConfig], base: Path) -> None:
        self._configs = tuple(configs)
        self._base = base
        self._plans: dict[int, Callable[[], Plan]] = {}
        self._fixed: dict[int, tuple[TakenPlace, ...]] = {}

    def set_config(self, number: int, config: ClusterConfig) -> None:
        configs = list(self._configs)
        configs[number] = config
        self._configs = tuple(configs)
        self._fixed.pop(number, None)

    def note(self, number: int, plan: Callable[[], Plan]) -> None:
        """The target of this number has a plan, of which `plan` always returns what runs now."""
        self._plans[number] = plan

    def list_others(self, number: int) -> tuple[ClusterConfig, ...]:
        return tuple(config for other, config in enumerate(self._configs) if other != number)

    def list_taken(self, number: int) -> tuple[TakenPlace, ...]:
        """Return what the others have, for the plan of the target of this number. May read models' files."""
        places: list[TakenPlace] = []
        for other, config in enumerate(self._configs):
            if other == number:
                continue
            if not config.planned:
                places += self._list_fixed(other)
            elif (plan := self._plans.get(other)) is not None:
                places += list_plan_places(config.model.name, plan(), first=other < number)
        return tuple(places)

    def _list_fixed(self, number: int) -> tuple[TakenPlace, ...]:
        """Return what a target takes that no plan places, by the sizes of its files and of its KV caches."""
        if number not in self._fixed:
            config = self._configs[number]
            try:
                self._fixed[number] = tuple(measure_fixed(config, self._base))
            except (OutriderError, AdapterError, OSError) as error:  # then its workers do not start either
                _log.warning("no plan leaves room for %s: %s", config.model.name, error)
                self._fixed[number] = ()
        return self._fixed[number]


def _list_parts(target: Target) -> list[tuple[str, str, str, float]]:
    """Return the adapter, device, host ("" for the target's) and share of each part of a target."""
    layers = sum(shard.layers for shard in target.shards)
    shards = [
        (shard.adapter or target.adapter, shard.device or target.device, shard.host, shard.layers / layers)
        for shard in target.shards
    ]
    devices = list_rank_devices(target.device, target.tensor_parallel)
    return shards or [(target.adapter, device, "", 1.0 / len(devices)) for device in devices]


def measure_fixed(config: ClusterConfig, base: Path) -> Iterator[TakenPlace]:
    """Yield the models that a configuration loads where it says. Raises what resolving them raises."""
    own = THIS_NODE if not config.cluster.across_hosts else ""
    model = config.model
    replicas = [placement for placement in model.placements if not placement.is_endpoint]  # others' memory has these
    for placement in replicas:
        its = model.with_own(placement)
        whole = model_at_hand(its.source, its.name, base, its.weights, adapter=its.adapter)
        kv_cache_bytes = int(placement.kv_cache or config.limits.kv_cache)
        for adapter, device, host, share in _list_parts(its):
            fixed = ReservedDraft(whole, adapter, effective_device(adapter, device), kv_cache_bytes, share)
            yield TakenPlace(model.name, host=host or placement.host or own, fixed=fixed)
    sharing = sum(placement.own_drafts is None for placement in replicas)
    counted = [(draft, sharing) for draft in config.drafts] + [(draft, 1) for _, draft in config.own_drafts]
    for draft, users in counted:
        if not config.speculation.depth or not isinstance(draft, ModelDraft):
            continue
        fixed = reserve_draft(draft, base, effective_device(draft.adapter, draft.device))
        workers = draft.workers.min if draft.process == "own" and draft.workers.min else users
        for _ in range(workers):
            yield TakenPlace(model.name, host=draft.host or own, fixed=fixed)
