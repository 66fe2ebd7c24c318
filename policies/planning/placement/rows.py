"""Every (device, option) as a row of arrays: what a whole model costs there at every depth.

What an option costs is computed once for each number of sequences; a device's other work only stretches it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.planning.draft_yield import all_hit_rate, depth_bound
from policies.planning.merit import LEAST_BURDEN, is_priced
from policies.planning.placement import workers
from policies.planning.plan import (
    Constraints,
    Device,
    DrafterFacts,
    Host,
    Objective,
    Option,
    RejectedCandidate,
    Role,
    Workload,
)
from policies.planning.shard_cost import MOST_BUSY, ModelPart, count_draft_reading, kv_bytes, stretch_costs
from policies.planning.throughput import DraftSide, TargetSide, draft_ms, verify_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Index:
    """Devices as arrays, in the order of their ids; hosts and zones as numbers, in the order of their names. `cores`
    are left on a device's host (infinite where not known), and `room` is what a plan may fill. `tie` orders devices
    that take as long: the less busy first, then the larger, then by id. `price`, of each device beside its host, and
    `host_price` are in currency units an hour (0 for hosts that are paid already), `power` is in watts; `priced` says
    where a price is known."""

    devices: tuple[Device, ...]
    hosts: tuple[str, ...]
    host: Ints
    zone: Ints
    room: Floats
    cores: Floats
    utilisation: Floats
    tie: Ints
    bandwidth: Floats
    is_cpu: Bools
    price: Floats
    host_price: Floats
    power: Floats
    priced: Bools
    profiles: dict[str, Ints]

    def sum_prices(self, target: Ints, draft: Ints | None = None) -> Floats:
        """Return what devices cost an hour with their hosts: each alone, or with the draft's beside it."""
        alone: Floats = self.price[target] + self.host_price[self.host[target]]
        if draft is None:
            return alone
        more = np.where(draft == target, 0.0, self.price[draft])
        away = self.host[draft] != self.host[target]
        return alone + more + np.where(away, self.host_price[self.host[draft]], 0.0)

    def sum_powers(self, target: Ints, draft: Ints | None = None) -> Floats:
        """Return what devices draw, in the same way; 0 where one of them does not tell."""
        alone = self.power[target]
        if draft is None:
            return alone
        both = np.where(draft == target, alone, alone + self.power[draft])
        return np.where((alone > 0) & (self.power[draft] > 0), both, 0.0)

    def sum_burdens(self, objective: Objective, target: Ints, draft: Ints | None = None) -> Floats | None:
        """Return what an objective weighs against tokens, None where it is nothing."""
        if objective is Objective.COST:
            return np.maximum(LEAST_BURDEN, self.sum_prices(target, draft))
        if objective is Objective.ENERGY:
            return np.maximum(LEAST_BURDEN, self.sum_powers(target, draft))
        return None


def index_of(
    devices: tuple[Device, ...],
    hosts: Mapping[str, Host],
    constraints: Constraints,
    taken_cores: Mapping[str, int],
    paid: Collection[str] = (),
) -> Index:
    """Return the arrays; `taken_cores` of each host are spoken for, and hosts that are `paid` cost nothing more."""
    names = tuple(sorted(hosts))
    numbers = {name: number for number, name in enumerate(names)}
    zones = {zone: number for number, zone in enumerate(sorted({host.zone for host in hosts.values()}))}
    profiles: dict[str, list[int]] = {}
    for number, device in enumerate(devices):
        profiles.setdefault(device.profile, []).append(number)
    order = sorted(
        range(len(devices)),
        key=lambda number: (
            devices[number].utilisation,
            -devices[number].memory_bytes,
            devices[number].id,
        ),
    )
    tie = np.empty(len(devices), np.int64)
    tie[order] = np.arange(len(devices))
    return Index(
        devices=devices,
        hosts=names,
        host=np.array([numbers[device.host] for device in devices], np.int64),
        zone=np.array([zones[hosts[device.host].zone] for device in devices], np.int64),
        room=np.array([workers.room_bytes(device, constraints) for device in devices], np.float64),
        cores=np.array([workers.cores_left(hosts[device.host], taken_cores) for device in devices], np.float64),
        utilisation=np.minimum([device.utilisation for device in devices], MOST_BUSY) if devices else np.empty(0),
        tie=tie,
        bandwidth=np.array([device.rates.bandwidth_bytes_per_s for device in devices], np.float64),
        is_cpu=np.array([device.kind == "cpu" for device in devices], np.bool_),
        price=np.array([device.price_per_hour for device in devices], np.float64),
        host_price=np.array([0.0 if name in paid else hosts[name].price_per_hour for name in names], np.float64),
        power=np.array([device.power_w for device in devices], np.float64),
        priced=np.array([is_priced(device, hosts) for device in devices], np.bool_),
        profiles={profile: np.array(numbers, np.int64) for profile, numbers in profiles.items()},
    )


@dataclass(frozen=True, slots=True)
class OptionRows:
    """Rows of one role: `device` and `option` (numbers of `Index.devices` and of `options`), `sequences` that run at
    once. `ms[row, depth]`: of a verification, or of drafting; `late_ms`: of a verification that runs another number of
    rows than the one before, or of drafting again what was not ahead. `prefill_ms`: of one prompt (targets: what it
    adds to the rounds of others); `first_ms`: of one that nothing else runs beside. `fixed` and `kv`: bytes without
    sequences, and of each."""

    options: tuple[Option, ...]
    device: Ints
    option: Ints
    sequences: Ints
    threads: Ints
    ms: Floats
    late_ms: Floats
    prefill_ms: Floats
    first_ms: Floats
    fixed: Floats
    kv: Floats

    def __len__(self) -> int:
        return len(self.device)

    def of(self, rows: Ints) -> OptionRows:
        return OptionRows(
            self.options,
            self.device[rows],
            self.option[rows],
            self.sequences[rows],
            self.threads[rows],
            self.ms[rows],
            self.late_ms[rows],
            self.prefill_ms[rows],
            self.first_ms[rows],
            self.fixed[rows],
            self.kv[rows],
        )


def target_rows(
    index: Index, targets: Mapping[str, tuple[Option, ...]], load: Workload, allowed: Bools, concurrency: int
) -> tuple[OptionRows, list[RejectedCandidate]]:
    """Return where the whole target fits, with as many sequences of `concurrency` as fit, and why it does not
    elsewhere. `allowed`: devices that may host it."""
    made = _Builder(load.depth_bound)
    for option, devices in _places(index, targets, allowed):
        fixed, kv = workers.sum_fixed_bytes(option, load.target.layers), kv_bytes(option, load)
        fit = _fit(index.room[devices] - fixed, kv, load.bound_running(concurrency))
        if not option.runs_whole:
            made.refuse(index, devices, option, Role.TARGET, fixed + kv)
            continue
        enough = option.threads <= index.cores[devices]
        made.refuse(index, devices[(fit == 0)], option, Role.TARGET, fixed + kv)
        made.refuse_threads(index, devices[(fit > 0) & ~enough], option, Role.TARGET)
        for sequences in np.unique(fit[(fit > 0) & enough]):
            side = TargetSide((ModelPart(option),), (), int(sequences))
            ms = [verify_ms(side, load, depth) for depth in range(load.depth_bound + 1)]
            changed = [verify_ms(side, load, depth, changes=1.0) for depth in range(load.depth_bound + 1)]
            fitting = devices[(fit == sequences) & enough]
            first = side.parts[0].prefill_ms(load.prompt_tokens)
            prefill = side.parts[0].prefill_ms(load.prompt_tokens, beside=sequences > 1)
            made.add(index, option, fitting, int(sequences), ms, changed, (prefill, first), fixed, kv)
    return made.rows(), made.rejected


def draft_rows(
    index: Index,
    drafts: Mapping[str, tuple[Option, ...]],
    drafter: DrafterFacts,
    load: Workload,
    allowed: Bools,
    sequences: int,
) -> tuple[OptionRows, list[RejectedCandidate]]:
    """Return where a draft model fits with the KV cache of so many sequences, and why it does not elsewhere."""
    bound = depth_bound(load, drafter)
    made, model = _Builder(bound), drafter.model
    for option, devices in _places(index, drafts, allowed):
        if model is None or option.model != model.name:
            continue
        fixed, kv = workers.sum_fixed_bytes(option, model.layers), kv_bytes(option, load)
        fits = index.room[devices] >= fixed + kv * sequences
        enough = option.threads <= index.cores[devices]
        made.refuse(index, devices[~fits], option, Role.DRAFT, fixed + kv * sequences)
        made.refuse_threads(index, devices[fits & ~enough], option, Role.DRAFT)
        # What models check for others is counted where a row may be in the target's process, so a pair beside it may
        # look better here than it is rated in the end.
        side, beside = (DraftSide(drafter, ModelPart(option), overlap=overlap) for overlap in (False, True))
        depths = range(bound + 1)
        ms = [draft_ms(side, load, depth, sequences) for depth in depths]
        late = [draft_ms(beside, load, depth, all_hit_rate(drafter, depth, sequences)[1]) for depth in depths]
        fitting = devices[fits & enough]
        first = ModelPart(option).prefill_ms(count_draft_reading(load))
        made.add(index, option, fitting, sequences, ms, late, (first, first), fixed, kv)
    return made.rows(), made.rejected


def _places(index: Index, options: Mapping[str, tuple[Option, ...]], allowed: Bools) -> Iterable[tuple[Option, Ints]]:
    for profile in sorted(options.keys() & index.profiles.keys()):
        devices = index.profiles[profile]
        for option in options[profile]:
            yield option, devices[allowed[devices]]


def _fit(free: Floats, kv: float, wanted: int) -> Ints:
    most = np.full(len(free), float(wanted)) if kv <= 0 else np.minimum(wanted, np.floor(free / kv))
    return np.where(free < 0, 0, most).astype(np.int64)


class _Builder:
    def __init__(self, bound: int) -> None:
        self.rejected: list[RejectedCandidate] = []
        self._options: list[Option] = []
        self._columns: list[tuple[NDArray[np.generic], ...]] = []
        self._bound = bound

    def add(
        self,
        index: Index,
        option: Option,
        devices: Ints,
        sequences: int,
        ms: list[float],
        late: list[float],
        prefill: tuple[float, float],
        fixed: float,
        kv: float,
    ) -> None:
        """Add a row for each of these devices. `prefill`: what a prompt adds to rounds, and what it takes alone."""
        if not len(devices):
            return
        number = len(self._options)
        self._options.append(option)
        stretch = stretch_costs(option.taken, index.utilisation[devices])
        same = np.ones(len(devices))
        self._columns.append(
            (
                devices,
                np.full(len(devices), number),
                np.full(len(devices), sequences),
                np.full(len(devices), option.threads),
                stretch[:, None] * np.array(ms),
                stretch[:, None] * np.array(late),
                stretch * prefill[0],
                stretch * prefill[1],
                same * fixed,
                same * kv,
            )
        )

    def refuse(self, index: Index, devices: Ints, option: Option, role: Role, needed: float) -> None:
        for number in devices:
            why = workers.too_small(needed, index.room[number], measured=option.runs_whole)
            self.rejected.append(RejectedCandidate(index.devices[number].id, f"{option.label}: {why}", role))

    def refuse_threads(self, index: Index, devices: Ints, option: Option, role: Role) -> None:
        """Say that these devices' hosts have too few cores."""
        for number in devices:
            why = workers.too_many_threads(option.threads, index.devices[number].host, index.cores[number])
            self.rejected.append(RejectedCandidate(index.devices[number].id, f"{option.label}: {why}", role))

    def rows(self) -> OptionRows:
        if not self._columns:
            none, flat = np.empty(0, np.int64), np.empty(0)
            table = np.empty((0, self._bound + 1))
            return OptionRows((), none, none, none, none, table, table, flat, flat, flat, flat)
        columns: list[Any] = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        return OptionRows(tuple(self._options), *columns)
