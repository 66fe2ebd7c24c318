"""A plan for what is configured or sketched, with all that it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final

from device_profiles.acceptance import PairAcceptance
from device_profiles.known_devices import load_known_devices
from device_profiles.store import ProfileStore
from orchestrator.config.hosts import host_names
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.sketch import Sketch
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.estimates import DeviceSource, EstimableDevice, Stated, estimate_option
from orchestrator.planning.here import Allowed, PresentHost, PresentLinks, cluster_present
from orchestrator.planning.lacking import leave_lacking, list_lacking, list_unfit_runtimes
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.neighbours import describe_taken, leave_taken, share_time, sum_reserved_bytes
from orchestrator.planning.ranks import add_rank_groups
from orchestrator.planning.sketched import build_sketched_cluster
from orchestrator.planning.stored import MeasuredHardware, add_devices, choose_present, load_measured_hardware
from orchestrator.planning.wanted import (
    SUFFIX,
    NoProfile,
    PlanError,
    PlanRequest,
    build_measured_drafter,
    build_measured_drafters,
    build_plan_goal,
    model_drafter,
)
from policies.planning.merit import tells_burden
from policies.planning.placement import plan_placement
from policies.planning.placement.ranks import refresh_groups
from policies.planning.plan import Device, Inventory, NoPlan, Objective, Option, Plan, PlanGoal, Role

# Where a search for a depth that agrees with its own plan begins (ADR 0033). Any from 1 to 12 does.
_FIRST_DEPTH = 4
_MOST_PLANS = 3  # plans until it agrees. Bounds time.


_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class PlanProposal:
    """A plan and what it was made from. `behind`: by profile, what stands behind its figures. `assumed`: what was
    neither measured nor stated, one line each."""

    plan: Plan
    cluster: Inventory
    wanted: PlanGoal
    behind: Mapping[str, DeviceSource]
    request: PlanRequest
    assumed: tuple[str, ...] = ()
    pairs: tuple[PairAcceptance, ...] = ()


def propose_sketch(sketch: Sketch, request: PlanRequest, store: ProfileStore | None = None) -> PlanProposal:
    """Return a plan for a cluster that is not there, of devices of the library and of `store`. Raises ConfigError or
    PlanError."""
    sources: dict[str, DeviceSource] = {name: Stated(sheet) for name, sheet in load_known_devices().items()}
    for hardware in load_measured_hardware(store) if store is not None else ():
        sources[hardware.hardware.name] = hardware
    drafts = [draft.model for draft in request.drafts]
    cluster, behind = build_sketched_cluster(sketch, sources, request.target, drafts, request.exactness)
    roles = {name: host.roles for host in sketch.hosts for name in host_names(host)}
    cluster = share_time(leave_taken(cluster, request.taken), request.taken)
    grouped, behind = add_rank_groups(cluster, behind, request)
    made = build_proposal(grouped, _name_nodes(request, roles, {}), behind)
    return replace(made, assumed=(*made.assumed, *describe_taken(cluster, request.taken)))


def propose_here(
    request: PlanRequest,
    store: ProfileStore,
    free_bytes: Mapping[str, int],
    allowed: Allowed | None = None,
    seen: Collection[SeenDevice] = (),
    lacks: Mapping[str, str] = _NOTHING,
    estimable: Sequence[EstimableDevice] = (),
) -> PlanProposal:
    """Return a plan for the machine that a store's profiles were measured on, of the options that are `allowed`.
    `seen`: the devices of this machine, with each runtime that sees them; of a store that has some of them the rest is
    left out. `lacks`: why other runtimes see nothing, or do not run the target. `estimable`: where no target was
    measured, it is planned on one of these by estimates, without draft models, and on one that can be loaded as it is
    before all others.

    Raises PlanError.
    """
    versions = {device.adapter: device.runtime_version for device in seen if device.runtime_version}
    measured = load_measured_hardware(store, versions)
    propose = partial(_propose_seen, request, store, free_bytes, allowed, seen, lacks)
    try:
        return propose(measured)
    except NoProfile:
        if not estimable:
            raise
    return propose(add_devices(measured, [device.device for device in estimable], store), estimable)


def propose_estimated(
    request: PlanRequest,
    store: ProfileStore,
    free_bytes: Mapping[str, int],
    allowed: Allowed | None,
    seen: Collection[SeenDevice],
    estimable: Sequence[EstimableDevice],
) -> PlanProposal:
    """Return a plan by estimates alone, as `propose_here` makes it where nothing was measured. Raises PlanError."""
    devices = add_devices([], [device.device for device in estimable], store)
    return _propose_seen(request, store, free_bytes, allowed, seen, _NOTHING, devices, estimable)


def _propose_seen(
    request: PlanRequest,
    store: ProfileStore,
    free_bytes: Mapping[str, int],
    allowed: Allowed | None,
    seen: Collection[SeenDevice],
    lacks: Mapping[str, str],
    measured: list[MeasuredHardware],
    estimable: Sequence[EstimableDevice] = (),
) -> PlanProposal:
    present = {device.hardware for device in seen}
    here, left_out = choose_present(measured, present)
    devices = frozenset(hardware.hardware for hardware in here)
    host = PresentHost(
        *(THIS_NODE, devices, free_bytes),
        price_per_hour=request.price_per_hour,
        seen=seen if devices <= present else None,
        lacks=lacks,
    )
    return _propose_hosts(
        request, store, [host], here, PresentLinks(tuple(store.links())), allowed, left_out, estimable
    )


def propose_hosts(
    request: PlanRequest,
    store: ProfileStore,
    hosts: Sequence[PresentHost],
    links: PresentLinks,
    allowed: Allowed | None = None,
) -> PlanProposal:
    """Return a plan for hosts that are there, of the options that are `allowed`. Where `placement` names hosts, it may
    do so by the names that cluster.yaml gives them. Raises PlanError."""
    measured = load_measured_hardware(store)
    known = {hardware.hardware for hardware in measured}
    left_out = [
        f"{host.node} is left out: no device of it has a profile"
        + (f" ({'; '.join(f'{runtime}: {why}' for runtime, why in host.lacks.items())})" if host.lacks else "")
        for host in hosts
        if not host.hardware & known
    ]
    roles, names = {host.node: host.roles for host in hosts}, {host.name: host.node for host in hosts if host.name}
    return _propose_hosts(_name_nodes(request, roles, names), store, hosts, measured, links, allowed, left_out)


def _propose_hosts(
    request: PlanRequest,
    store: ProfileStore,
    hosts: Sequence[PresentHost],
    measured: Sequence[MeasuredHardware],
    links: PresentLinks,
    allowed: Allowed | None,
    left_out: Sequence[str],
    estimable: Sequence[EstimableDevice] = (),
) -> PlanProposal:
    cluster, behind = cluster_present(
        hosts,
        measured,
        request.target,
        [draft.model for draft in request.drafts],
        request.exactness,
        links=links,
        allowed=allowed,
        left=partial(sum_reserved_bytes, beside=request.beside, replicas=request.most_replicas),
    )
    cluster, sources, lacking = leave_lacking(cluster, behind, list_lacking(hosts, measured))
    lacking += [line for line in list_unfit_runtimes(hosts) if not any(line in other for other in lacking)]
    if not any(option.role is Role.TARGET for option in cluster.options):
        cluster, more = _estimate_options(cluster, behind, request.target, estimable, allowed)
        sources |= more
    if not cluster.options:
        raise NoProfile("; ".join([_no_profile(request, store, measured), *lacking, *left_out]))
    stated = {THIS_NODE, *(host.node for host in hosts if host.name)}
    cluster, untold = _leave_out_untold(cluster, Objective(request.placement.objective), stated)
    cluster = share_time(leave_taken(cluster, request.taken), request.taken)
    grouped, behind_groups = add_rank_groups(cluster, sources, request)
    made = build_proposal(grouped, request, behind_groups, _of_these_files(store.pairs(), request))
    others = describe_taken(cluster, request.taken)
    return replace(made, assumed=(*made.assumed, *others, *lacking, *left_out, *untold))


def _estimate_options(
    cluster: Inventory,
    behind: Mapping[str, MeasuredHardware],
    target: PlannedModel,
    estimable: Sequence[EstimableDevice],
    allowed: Allowed | None,
) -> tuple[Inventory, dict[str, MeasuredHardware]]:
    """Return the cluster with how the target is expected to run there, and what stands behind profiles that it gives to
    devices: of those that share one, to each on which other options are `allowed` than on the first."""
    known: dict[str, list[Option]] = {}
    more: dict[str, MeasuredHardware] = {}
    devices: list[Device] = []
    shared = Counter(device.profile for device in cluster.devices)
    for device in cluster.devices:
        profile, source = device.profile, behind.get(device.profile)
        may = [
            option
            for option in (estimate_targets(target, {profile: source}, estimable) if source is not None else ())
            if shared[profile] < 2 or allowed is None or allowed(option, device.name_for(option.runtime))
        ]
        if source is not None and known.setdefault(profile, may) != may:
            profile = f"{profile}, {device.id}"
            known[profile], more[profile] = [replace(option, profile=profile) for option in may], source
        devices.append(replace(device, profile=profile))
    return replace(cluster, devices=tuple(devices), options=tuple(chain.from_iterable(known.values()))), more


def estimate_targets(
    target: PlannedModel, behind: Mapping[str, DeviceSource], devices: Sequence[EstimableDevice]
) -> Iterator[Option]:
    running = [estimable for estimable in devices if not target.runtimes or estimable.device.adapter in target.runtimes]
    for profile, source in behind.items():
        for estimable in running:
            if not isinstance(source, MeasuredHardware) or estimable.device.hardware != source.hardware:
                continue
            # What one runtime has measured of a device, another may reach.
            device = (
                estimable.device if estimable.device.rates.matmul else replace(estimable.device, rates=source.rates)
            )
            option = estimate_option(device, target, prepared=estimable.prepared)
            yield replace(source.correct_memory(option, target), profile=profile)


def _leave_unprepared(cluster: Inventory) -> tuple[Inventory, list[str]]:
    """Return the cluster without targets that have to be converted first, where another can be loaded at once, and say
    so: estimates do not tell which is faster, and requests wait."""
    targets = [option for option in cluster.options if option.role is Role.TARGET]
    out = sorted({target.runtime for target in targets if not target.prepared})
    if not out or all(not target.prepared for target in targets):
        return cluster, []
    kept = tuple(option for option in cluster.options if option.prepared)
    return replace(cluster, options=kept), [
        f"{', '.join(out)}: converts the model first, and is planned with once it is measured"
    ]


def _leave_out_untold(cluster: Inventory, objective: Objective, stated: Collection[str]) -> tuple[Inventory, list[str]]:
    """Return the cluster without devices that were found on hosts that nobody `stated`, and do not tell what the
    objective needs: such a host may join at any time, and is no reason to have no plan. Say why they are left out."""
    hosts = {host.name: host for host in cluster.hosts}
    out = {
        device.id
        for device in cluster.devices
        if device.host not in stated and not tells_burden(device, hosts, objective)
    }
    what = "price" if objective is Objective.COST else "power"
    why = f"its {what} is not known, which `placement.objective: {objective}` needs; state it in `hosts`"
    devices = tuple(device for device in cluster.devices if device.id not in out)
    return replace(cluster, devices=devices), [f"{name} is left out: {why}" for name in sorted(out)]


def _name_nodes(request: PlanRequest, roles: Mapping[str, Sequence[str]], nodes: Mapping[str, str]) -> PlanRequest:
    """Return the request with the nodes of the hosts that it names (`nodes`, by name), and each role pinned to the
    nodes that have it (`roles`, by node). Raises PlanError where no node may host the target."""

    def name_node(place: str) -> str:
        host, slash, device = place.partition("/")
        return f"{nodes.get(host, host)}{slash}{device}"

    placement = request.placement
    changes: dict[str, tuple[str, ...]] = {"exclude": tuple(map(name_node, placement.exclude))}
    drafts = request.drafts
    for role in Role:
        key = f"pin_{role.value}"
        pins: tuple[str, ...] = tuple(map(name_node, getattr(placement, key)))
        able = {node for node, mine in roles.items() if role.value in mine}
        if len(able) < len(roles):
            kept = tuple(pin for pin in pins if pin.partition("/")[0] in able) if pins else tuple(sorted(able))
            if not kept and role is Role.TARGET:
                raise PlanError(f"there is no plan: no host that `placement.{key}` allows has the role `target`")
            drafts = drafts if kept or role is Role.TARGET else ()
            pins = kept
        changes[key] = pins
    return replace(request, drafts=drafts, placement=placement.model_copy(update=changes))


def _of_these_files(pairs: Sequence[PairAcceptance], request: PlanRequest) -> list[PairAcceptance]:
    """Return what was measured with the files of these models, whatever they were called then; with a draft model as
    the target, too."""
    drafts = {draft.name: draft.model.digest for draft in request.drafts}
    targets = {draft.model.name: draft.model.digest for draft in request.drafts if draft.model.digest}
    targets[request.target.name] = request.target.digest  # last: a draft may have the target's files, and its name
    return [
        replace(pair, target=name)
        for name, digest in targets.items()
        for pair in pairs
        if pair.target_digest == digest and drafts.get(pair.drafter, "") == pair.drafter_digest
    ]


def _no_profile(request: PlanRequest, store: ProfileStore, measured: Sequence[MeasuredHardware]) -> str:
    where = ", ".join(sorted({hardware.hardware.name for hardware in measured})) or "any device"
    named = {model.model_digest for model in store.models() if model.model == request.target.name}
    others = f" ({', '.join(sorted(named))} has this name, and other files)" if named - {request.target.digest} else ""
    return (
        f"no profile of {request.target.name} (exactness {request.exactness.value}) on {where} in {store.directory}"
        f"{others}: run `outrider profile`, or pass --profiles DIR"
    )


def build_proposal(
    cluster: Inventory, request: PlanRequest, behind: Mapping[str, DeviceSource], pairs: Sequence[PairAcceptance] = ()
) -> PlanProposal:
    """Return a plan; `pairs`: how often drafts were accepted, where that was measured. Raises PlanError."""
    cluster = refresh_groups(cluster)
    known = {pair.drafter for pair in pairs if pair.target == request.target.name}
    soon, later = _leave_unprepared(cluster)
    try:
        goal, plan = _settle_plan(soon, request, pairs)
    except NoPlan as error:
        left = "".join(f"; {draft.describe_reserve(request.most_replicas)}" for draft in request.beside)
        raise PlanError(f"there is no plan: {error}{left}") from error
    assumed = (*_list_assumptions(request, known), *later)
    return PlanProposal(plan, cluster, goal, behind, request, assumed, tuple(pairs))


def _settle_plan(cluster: Inventory, request: PlanRequest, pairs: Sequence[PairAcceptance]) -> tuple[PlanGoal, Plan]:
    """Return what is wanted, and its plan. How often drafts are accepted was measured at several depths and differs
    between them (deep drafts leave the harder rounds). So the figures are those of the depth that the plan chooses."""
    depth = _FIRST_DEPTH
    for _ in range(_MOST_PLANS):
        load = (request.target.name, request.placement.concurrency, depth)
        by_policy = (request.target.name, request.placement.concurrency, request.depth_bound)
        drafters = build_measured_drafters(SUFFIX, "suffix", pairs, *by_policy) if request.suffix else []
        drafters += [build_measured_drafter(model_drafter(draft), draft.name, pairs, *load) for draft in request.drafts]
        goal = build_plan_goal(request, drafters)
        plan = plan_placement(cluster, goal)
        chosen = plan.replicas[0].depth
        if not pairs or chosen in (0, depth):
            break
        depth = chosen
    return goal, plan


def _list_assumptions(request: PlanRequest, known: Collection[str]) -> tuple[str, ...]:
    lines = []
    if request.suffix and request.depth_bound and "suffix" not in known:
        lines.append(
            f"drafts from the text itself: proposed in {SUFFIX.coverage:.0%} of rounds, each token accepted with "
            f"{SUFFIX.acceptance[0]:.2f} (Spec-Bench prompts, the default model)"
        )
    lines += [
        f"drafts of {draft.model.name}: accepted with {draft.acceptance[0]:.2f}"
        for draft in request.drafts
        if draft.name not in known
    ]
    lines += [
        f"drafts of {server}: nothing is predicted of them, as nobody has measured that server"
        for server in request.draft_servers
        if request.depth_bound
    ]
    return tuple(lines)
