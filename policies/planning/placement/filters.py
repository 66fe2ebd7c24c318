"""What may be used at all: filters that return what they kept, and the reason for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from device_profiles.device_names import name_compute_place
from device_profiles.profile import Exactness
from policies.planning.merit import tells_burden
from policies.planning.plan import (
    Constraints,
    Device,
    Host,
    Inventory,
    NoPlan,
    Objective,
    Option,
    PlanGoal,
    RejectedCandidate,
    Role,
)


@dataclass(frozen=True, slots=True)
class Usable:
    """What the filters left. `targets` and `drafts`: options by profile, those of the target, and those of each
    drafter's model. `target_devices` and `draft_devices` in the order of their ids."""

    hosts: dict[str, Host]
    target_devices: tuple[Device, ...]
    draft_devices: tuple[Device, ...]
    targets: dict[str, tuple[Option, ...]]
    drafts: dict[str, tuple[Option, ...]]
    rejected: tuple[RejectedCandidate, ...]


def usable(cluster: Inventory, wanted: PlanGoal) -> Usable:
    """Return what may host what.

    Raises NoPlan where the cluster contradicts itself, a constraint names what is not there, or a device does not tell
    what the objective counts.
    """
    hosts = {host.name: host for host in cluster.hosts}
    constraints = spell_places(wanted.constraints, cluster)
    _check(cluster, hosts, constraints)
    rejected: list[RejectedCandidate] = []
    allowed = _devices(cluster.devices, hosts, constraints, rejected)
    models = {drafter.model.name for drafter in wanted.workload.drafters if drafter.model is not None}
    targets = _options(cluster.options, Role.TARGET, {wanted.workload.target.name}, wanted, rejected)
    drafts = _options(cluster.options, Role.DRAFT, models, wanted, rejected)
    may_target = _filter_by_pins(allowed, constraints.pin_target, Role.TARGET, rejected)
    may_draft = _filter_by_pins(allowed, constraints.pin_draft, Role.DRAFT, rejected)
    choice = {device.id: device for device in may_target if device.profile in targets}
    choice |= {device.id: device for device in may_draft if device.profile in drafts}
    _check_figures([choice[name] for name in sorted(choice)], hosts, wanted.objective)
    return Usable(hosts, may_target, may_draft, targets, drafts, tuple(rejected))


def spell_places(constraints: Constraints, cluster: Inventory) -> Constraints:
    """Return the constraints with devices named as the cluster names them: people write them in any case, and the first
    of a kind with its number or without."""
    ids = {device.id for device in cluster.devices}
    spelt = {name_compute_place(device_id): device_id for device_id in sorted(ids)}

    def spell(places: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(place if place in ids else spelt.get(name_compute_place(place), place) for place in places)

    return replace(
        constraints,
        pin_target=spell(constraints.pin_target),
        pin_draft=spell(constraints.pin_draft),
        exclude=spell(constraints.exclude),
    )


def _check_figures(choice: Sequence[Device], hosts: dict[str, Host], objective: Objective) -> None:
    """Raise NoPlan where a device that might be chosen does not tell what the objective counts."""
    missing = [device.id for device in choice if not tells_burden(device, hosts, objective)]
    if not missing:
        return
    what = "price" if objective is Objective.COST else "power"
    ways = {
        "price": "give it or its host a `price_per_hour` (in cluster.yaml `devices.price_per_hour`, of this machine)",
        "power": "measure it where the machine tells its energy (`outrider profile`)",
    }
    raise NoPlan(
        f"objective `{objective}`: the {what} of {_some(missing)} is not known; {ways[what]}, "
        "leave it out (`exclude`), or choose another `placement.objective`"
    )


def _check(cluster: Inventory, hosts: dict[str, Host], constraints: Constraints) -> None:
    for what, names in (
        ("host", [host.name for host in cluster.hosts]),
        ("device", [device.id for device in cluster.devices]),
    ):
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise NoPlan(f"{what} {twice[0]!r} is there twice: give every {what} a name of its own")
    for device in cluster.devices:
        if device.host not in hosts:
            raise NoPlan(f"device {device.id!r} is on host {device.host!r}, which is not in the list of hosts")
    known = hosts.keys() | {name for device in cluster.devices for name in (device.id, *device.ranks)}
    for key in ("pin_target", "pin_draft", "exclude"):
        for name in getattr(constraints, key):
            if name not in known:
                raise NoPlan(f"{key}: there is no device or host {name!r}; there are {_some(known)}")
    zones = {host.zone for host in hosts.values()}
    for zone in constraints.zones:
        if zone not in zones:
            raise NoPlan(f"zones: there is no zone {zone!r}; there are {_some(zones)}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return ", ".join(repr(name) for name in ordered[:8]) + more


def _devices(
    devices: Iterable[Device], hosts: dict[str, Host], constraints: Constraints, rejected: list[RejectedCandidate]
) -> list[Device]:
    kept = []
    for device in sorted(devices, key=lambda device: device.id):
        why = _unfit(device, hosts[device.host], constraints)
        if why:
            rejected.append(RejectedCandidate(device.id, why))
        else:
            kept.append(device)
    return kept


def _unfit(device: Device, host: Host, constraints: Constraints) -> str:
    if device.is_touched_by(constraints.exclude):
        return "excluded by the operator (`exclude`)"
    if device.health <= 0.0:
        return device.health_why
    if constraints.zones and host.zone not in constraints.zones:
        return f"in zone {host.zone!r}, and `zones` allows {_some(constraints.zones)}"
    return ""


def _filter_by_pins(
    devices: list[Device], pins: tuple[str, ...], role: Role, rejected: list[RejectedCandidate]
) -> tuple[Device, ...]:
    if not pins:
        return tuple(devices)
    kept = []
    for device in devices:
        if device.is_within(pins):
            kept.append(device)
        else:
            rejected.append(RejectedCandidate(device.id, f"the {role} is pinned to {_some(pins)} (`pin_{role}`)", role))
    if not kept:
        raise NoPlan(
            f"pin_{role}: nothing of {_some(pins)} may be used, because it is excluded or in another zone; "
            f"change `pin_{role}` or what rules it out"
        )
    return tuple(kept)


def _options(
    options: Iterable[Option], role: Role, models: set[str], wanted: PlanGoal, rejected: list[RejectedCandidate]
) -> dict[str, tuple[Option, ...]]:
    kept: dict[str, list[Option]] = {}
    mine = (option for option in options if option.role is role and option.model in models)
    for option in sorted(
        mine, key=lambda option: (option.profile, option.model, option.runtime, option.weights, option.threads)
    ):
        why = _unsuitable(option, wanted)
        if why:
            rejected.append(RejectedCandidate(f"{option.label} on {option.profile}", why, role))
        else:
            kept.setdefault(option.profile, []).append(option)
    return {profile: tuple(options) for profile, options in kept.items()}


def _unsuitable(option: Option, wanted: PlanGoal) -> str:
    if option.role is Role.TARGET and wanted.workload.exactness is Exactness.BIT and not option.row_invariant:
        return "its output depends on the batch, which exactness `bit` forbids; exactness `kernel` would allow it"
    return ""
