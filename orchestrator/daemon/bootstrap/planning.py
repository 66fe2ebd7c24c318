"""Makes the daemon's plan, and says what to start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from adapters.hardware import list_core_groups
from adapters.names import IN_PLACE_ADAPTERS
from device_profiles.device_load import DeviceLoad
from device_profiles.device_names import is_processor
from device_profiles.store import ProfileStore
from orchestrator.config.failover import StandbyTarget
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.bootstrap.clusters import workers_directory
from orchestrator.daemon.bootstrap.failover import build_standbys
from orchestrator.daemon.bootstrap.start_profiles import list_in_place, list_wanted
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.fitting.device_layers import tell_device_layers
from orchestrator.fitting.worker_options import engine_options
from orchestrator.launch.homes import sum_orphans_bytes
from orchestrator.machine.devices import SeenDevice, list_devices_here, list_free_bytes
from orchestrator.planning.applied import CoresByHost, apply_plan, build_option_filter, name_shard_device
from orchestrator.planning.basis import profiles_behind
from orchestrator.planning.correction import Corrections, Key, apply_health, apply_loads, correct_costs
from orchestrator.planning.estimates import EstimableDevice
from orchestrator.planning.neighbours import TakenPlace, leave_taken, share_time, sum_reserved_bytes
from orchestrator.planning.profiling.work import Work, list_unfit, profile_store
from orchestrator.planning.proposal import PlanProposal, build_proposal, propose_estimated, propose_here
from orchestrator.planning.wanted import PlanError, PlanRequest, build_request_from_config, start_replicas
from orchestrator.protocol.contract import WorkerSpec
from policies.speculation.state import COLD_DEPTH

_log = logging.getLogger(__name__)


def make_plan(
    config: ClusterConfig,
    base: Path,
    state: Path,
    loads: Mapping[str, DeviceLoad] | None = None,
    taken: tuple[TakenPlace, ...] = (),
) -> StartPlan:
    """Return the plan for this machine by the stored profiles. `state`: the daemon's own directory; what workers there
    hold, which wait for this daemon, counts as free. `loads`: what other programs take of the devices now. `taken`:
    what other targets of the daemon are to have.

    Raises PlanError, and what resolving the models raises.
    """
    proposal = propose_local(config, base, build_local_request(config, base, taken), _count_own_bytes(state))
    return build_start_plan(config, base, _leave_busy(proposal, loads, taken))


def plan_at_once(
    config: ClusterConfig,
    base: Path,
    state: Path,
    loads: Mapping[str, DeviceLoad] | None = None,
    taken: tuple[TakenPlace, ...] = (),
) -> StartPlan | None:
    """Return the plan of a target that was not measured, on a runtime that loads its file as it is; None where there is
    none. Others are not looked at, since to import them takes seconds. See `make_plan`; raises what resolving the
    models raises."""
    store, wanted = profile_store(config), list_in_place(config, base)
    known = {model.model_digest for model in store.models() if model.role == "target"}
    if not wanted or (known and wanted[0].digest in known):
        return None
    request = build_local_request(config, base, taken, digests=bool(known))
    here = list_devices_here(IN_PLACE_ADAPTERS)
    devices = [_find_estimable(work, store) for work in wanted]
    free, allowed = _count_free(here.seen, _count_own_bytes(state)), build_option_filter(config, request)
    try:
        proposal = propose_estimated(request, store, free, allowed, here.seen, devices)
    except PlanError:
        return None
    return build_start_plan(config, base, _leave_busy(add_device_layers(config, base, proposal), loads, taken))


def _count_own_bytes(state: Path) -> int:
    return sum_orphans_bytes(workers_directory(state))


def _leave_busy(
    proposal: PlanProposal, loads: Mapping[str, DeviceLoad] | None, taken: tuple[TakenPlace, ...]
) -> PlanProposal:
    """Return the proposal with what other programs leave of the devices. Raises PlanError."""
    if not loads:
        return proposal
    busy = {name: replace(load, memory_total_bytes=0) for name, load in loads.items()}  # `free` knows better
    cluster = share_time(apply_loads(proposal.cluster, busy), taken)
    return replace(build_proposal(cluster, proposal.request, proposal.behind, proposal.pairs), assumed=proposal.assumed)


def log_assumptions(proposal: PlanProposal) -> None:
    for line in proposal.assumed:
        _log.info("planned, %s", line)


def build_local_request(
    config: ClusterConfig, base: Path, taken: tuple[TakenPlace, ...] = (), *, digests: bool = True
) -> PlanRequest:
    """Return what cluster.yaml asks of this machine. Raises what resolving the models raises."""
    request = build_request_from_config(config, base, digests=digests)
    return replace(request, one_host=True, taken=taken)


def propose_local(config: ClusterConfig, base: Path, request: PlanRequest, ours_bytes: int = 0) -> PlanProposal:
    """Return the plan by the profiles that are stored now, and by estimates where no target was measured. `ours_bytes`
    of the host's memory, which our workers hold, count as free. Raises PlanError, and what resolving the models
    raises."""
    here = list_devices_here()
    store, wanted = profile_store(config), list_wanted(config, base)
    devices = [_find_estimable(work, store) for work in wanted if work.job.role == "target"]
    free, allowed = _count_free(here.seen, ours_bytes), build_option_filter(config, request)
    lacks = here.lacks | list_unfit(config, base)
    proposal = propose_here(request, store, free, allowed, here.seen, lacks, devices)
    return add_device_layers(config, base, proposal)


def _find_estimable(work: Work, store: ProfileStore) -> EstimableDevice:
    return EstimableDevice(work.find_device_profile(store) or work.assume_device(), work.is_prepared())


def _count_free(seen: Sequence[SeenDevice], ours_bytes: int) -> dict[str, int]:
    free_bytes = list_free_bytes(seen)
    return {name: free + (ours_bytes if is_processor(name) else 0) for name, free in free_bytes.items()}


def add_device_layers(config: ClusterConfig, base: Path, proposal: PlanProposal) -> PlanProposal:
    """Return a plan for this machine that tells of devices which may leave layers to the host. Of those that it chose,
    and of the named one, it says how many they would have now. Raises what resolving the model raises."""
    targets = [shard for replica in proposal.plan.replicas for shard in replica.shards]
    places = [(shard.runtime, name_shard_device(proposal, shard)) for shard in targets]
    options = engine_options(config, base)
    named = (options.model.adapter, options.model.device)
    lines = tell_device_layers(options.model, options.max_running, [*places, named])
    return replace(proposal, assumed=(*proposal.assumed, *lines))


@dataclass(frozen=True, slots=True)
class PlanMaking:
    """Implements control.loops.plan_keeper.Planner for one configuration. `list_taken`: what the daemon's other targets
    have now."""

    config: ClusterConfig
    base: Path
    list_taken: Callable[[], tuple[TakenPlace, ...]] = tuple

    def again(
        self,
        first: PlanProposal,
        corrections: Corrections,
        running: Sequence[WorkerSpec],
        health: Mapping[str, tuple[float, str]],
        loads: Mapping[str, DeviceLoad],
    ) -> StartPlan:
        """Return the plan with costs as they turned out to be, without devices that refuse work, and with what other
        programs and other targets leave of the rest. Raises PlanError."""
        taken = self.list_taken()
        left = leave_taken(first.cluster, taken, first.request.taken)
        well = apply_health(correct_costs(left, corrections), health)
        beside, replicas = first.request.beside, first.request.most_replicas
        cluster = apply_loads(well, loads, partial(sum_reserved_bytes, beside=beside, replicas=replicas))
        cluster = share_time(cluster, taken)
        proposal = build_proposal(cluster, first.request, first.behind, first.pairs)
        # What is left out stays so, and goes on being told.
        complete = replace(proposal, assumed=tuple(dict.fromkeys((*proposal.assumed, *first.assumed))))
        planned = build_start_plan(self.config, self.base, complete)
        return replace(planned, targets=tuple(_as_it_runs(spec, running) for spec in planned.targets))

    def mark_drifted(self, first: PlanProposal, key: Key, ratio: float) -> str:
        """See control.loops.plan_keeper.Planner: it is noted in the store. Raises OSError."""
        store, today = profile_store(self.config), datetime.now(UTC).date().isoformat()
        how = f"rounds took {ratio:.2f} times what it predicts, {today}"
        for profile in profiles_behind(first, key):
            store.mark_drifted(profile, how)
        never = self.config.placement.profile == "never"
        later = "at the next start" if self.config.plans_hosts else "when nobody asks"
        again = "run `outrider profile`" if never else f"it is measured again {later}"
        return f"the profile of {first.request.target.name} on {key[0]}, {key[1]}, has drifted: {how}; {again}"


def build_start_plan(
    config: ClusterConfig, base: Path, proposal: PlanProposal, cores_by_host: CoresByHost | None = None
) -> StartPlan:
    """Return how each replica's workers are started. `cores_by_host`: those of this host where none are given."""
    targets, drafts = [], []
    config = start_replicas(config, len(proposal.plan.replicas))
    cores = cores_by_host or {THIS_NODE: list_core_groups()}
    for number in range(len(proposal.plan.replicas)):
        depth = proposal.plan.replicas[number].depth
        placed = apply_plan(config, proposal, number, cores)
        specs, mine = build_start_specs(placed, base, float(depth) or COLD_DEPTH)
        targets.append(specs[number])
        drafts.append(tuple(mine))
    return StartPlan(proposal, tuple(targets), tuple(drafts), tuple(_plan_standbys(config, base, proposal)))


def _plan_standbys(config: ClusterConfig, base: Path, proposal: PlanProposal) -> list[StandbySpec]:
    """Return the standbys that are configured; where none is, the one that the plan names."""
    placed = apply_plan(config, proposal, 0)
    named = proposal.plan.standby
    # A standby is a whole target on one device, and what the plan names beside shards holds one of them.
    shards = proposal.plan.replicas[0].shards
    if config.failover.standby or named is None or len(shards) > 1 or named.shards[0].ranks:
        return build_standbys(placed, base)
    shard = named.shards[0]
    device = name_shard_device(proposal, shard)
    place = {"host": shard.host} if config.cluster.on_ray else {}
    standby = StandbyTarget.model_validate(
        {"adapter": shard.runtime, "device": device, "threads": shard.threads, **place}
    )
    return build_standbys(placed, base, [standby])


def _as_it_runs(spec: WorkerSpec, running: Sequence[WorkerSpec]) -> WorkerSpec:
    """Return the spec of a running worker that differs in its name and its starting depth only: that is behind it."""
    return next((candidate for candidate in running if _lasting(candidate) == _lasting(spec)), spec)


def _lasting(spec: WorkerSpec) -> WorkerSpec:
    return msgspec.structs.replace(spec, name="", options={**spec.options, "starting_depth": COLD_DEPTH})
