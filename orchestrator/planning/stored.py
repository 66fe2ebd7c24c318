"""Devices that were measured: options from stored profiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from device_profiles.cost import with_row_ms
from device_profiles.measured import SPLIT, DeviceRates, Hardware, MatmulRate, MeasuredDevice, MeasuredModel
from device_profiles.profile import Exactness
from device_profiles.store import ProfileStore
from orchestrator.planning.models import PlannedModel
from policies.planning.plan import Option, Role

_UNKNOWN: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MeasuredHardware:
    """One physical device, with all that was measured of it: a processor may have been measured with several
    runtimes, each under its own fingerprint. See planning.source.DeviceSource."""

    hardware: Hardware
    devices: tuple[MeasuredDevice, ...]
    models: tuple[MeasuredModel, ...]

    @property
    def kind(self) -> str:
        """Return "cpu", "cuda" and so on."""
        return self.hardware.kind

    @property
    def name(self) -> str:
        """Return what a runtime calls it, the shortest of all."""
        return min((one.device for one in self.devices), key=lambda name: (len(name), name))

    def device_for(self, adapter: str) -> str:
        """Return what that runtime calls it; "" where it was not measured with it."""
        return next((one.device for one in self.devices if one.adapter == adapter), "")

    @property
    def power_w(self) -> float:
        """Return what it takes under load, 0 where it does not tell."""
        return max((one.energy.load_w or 0.0 for one in self.devices), default=0.0)

    @property
    def rates(self) -> DeviceRates:
        """Return the highest measured rates, of products in each number format and of its memory."""
        best: dict[str, MatmulRate] = {}
        for rate in (rate for one in self.devices for rate in one.rates.matmul):
            known = best.get(rate.precision)
            if known is None or rate.flops > known.flops:
                best[rate.precision] = rate
        memory = max((one.rates.bandwidth_bytes_per_s for one in self.devices), default=0.0)
        return DeviceRates(tuple(best[precision] for precision in sorted(best)), memory)

    @property
    def memory_bytes(self) -> int:
        """Return its own memory; 0 where it works in the host's."""
        return 0 if self.kind == "cpu" else self.hardware.memory_bytes

    @property
    def cores(self) -> int:
        """Return the cores that a processor has."""
        return self.hardware.physical_cores

    @property
    def sheet(self) -> None:
        """There is no datasheet behind what was measured."""
        return None

    def options(
        self, target: PlannedModel, drafts: Sequence[PlannedModel], exactness: Exactness, cores: int
    ) -> list[Option]:
        """Return how these models run on it; their `profile` is still to be named. What was measured with more threads
        than there are `cores` is left out."""
        found = [
            _option(one, Role.TARGET, target)
            for one in self.models
            if one.role == Role.TARGET and one.exactness == exactness and _matches_model(one, target, cores)
        ]
        alike = {(draft.name, draft.digest): draft for draft in drafts}  # one model may be named under several drafts
        found += [
            _option(one, Role.DRAFT, draft)
            for draft in alike.values()
            for one in self.models
            if one.role == Role.DRAFT and _matches_model(one, draft, cores)
        ]
        return found


def load_measured_hardware(store: ProfileStore, versions: Mapping[str, str] = _UNKNOWN) -> list[MeasuredHardware]:
    """Return the devices of a store, in the order of their names. `versions`: of the runtimes that are here, by
    adapter. What was measured with them goes before what is newer. What was measured with another library behind the
    same adapter is left out."""

    def is_known(one: MeasuredDevice) -> bool:
        return versions.get(one.adapter) == one.runtime_version

    newest: dict[tuple[Hardware, str, str, int], MeasuredDevice] = {}
    for one in sorted(store.devices(), key=lambda device: (is_known(device), device.measured_at)):
        if _name_library(one.runtime_version) == _name_library(versions.get(one.adapter, one.runtime_version)):
            newest[(one.hardware, one.adapter, one.device, one.threads)] = one  # of what was updated, the last
    devices: dict[Hardware, list[MeasuredDevice]] = {}
    for one in newest.values():
        devices.setdefault(one.hardware, []).append(one)
    models = store.models()
    found = []
    for hardware, seen in devices.items():
        marks = {(one.fingerprint, one.adapter, one.device) for one in seen}
        mine = tuple(one for one in models if (one.fingerprint, one.adapter, one.device) in marks)
        found.append(MeasuredHardware(hardware, tuple(seen), mine))
    return sorted(found, key=lambda one: (one.hardware.name, one.name))


def _name_library(version: str) -> str:
    """Return the library's name, which stands before its release."""
    return version.partition(" ")[0]


def add_devices(found: Sequence[MeasuredHardware], more: Sequence[MeasuredDevice]) -> list[MeasuredHardware]:
    """Return the hardware with these runtimes' views of it, where they are not among what was measured."""
    known = {one.hardware: one for one in found}
    for device in more:
        one = known.get(device.hardware, MeasuredHardware(device.hardware, (), ()))
        if not one.device_for(device.adapter):
            known[device.hardware] = replace(one, devices=(*one.devices, device))
    return list(known.values())


def choose_present(
    found: Sequence[MeasuredHardware], present: Collection[Hardware]
) -> tuple[list[MeasuredHardware], list[str]]:
    """Return the hardware that a plan for one machine may use, and why the rest is left out.

    That is what is there now. Where nothing of it is, the profiles are another machine's, and of each device there the
    newest counts.
    """
    here = [one for one in found if one.hardware in present]
    if here:
        why = "it is another machine's, or its memory or driver has changed since: run `outrider profile`"
        return here, [f"{one.hardware.name}: left out, {why}" for one in found if one not in here]
    newest: dict[str, MeasuredHardware] = {}
    for one in sorted(found, key=lambda one: max(device.measured_at for device in one.devices)):
        newest[one.name] = one
    kept = [one for one in found if one in newest.values()]
    return kept, [
        f"{one.hardware.name}: left out, {one.name} was measured anew since" for one in found if one not in kept
    ]


def _matches_model(one: MeasuredModel, model: PlannedModel, cores: int) -> bool:
    """Return whether this was measured with a model's files (with its name, where its files are not there), in a format
    that is asked for."""
    if (one.model_digest != model.digest) if model.digest else (one.model != model.name):
        return False
    if SPLIT in one.formats:
        return False  # a plan puts whole layers on devices
    asked = one.formats.partition(" ")[0]
    return asked in (model.weights or ("auto",)) and (not cores or one.threads <= cores)


def _option(one: MeasuredModel, role: Role, model: PlannedModel) -> Option:
    own = one.device_parts
    return Option(
        profile="",
        role=role,
        model=model.name,
        runtime=one.adapter,
        weights=one.weights,
        cost=with_row_ms(replace(one.cost, error=one.error), one.overhead.row_ms),
        layer_bytes=(own["weights"] if own else one.weights_bytes) / one.layers,
        kv_bytes_per_token=one.kv_bytes_per_token,
        threads=one.threads,
        fixed_bytes=0 if own else _find_fixed_bytes(one),
        workspace_bytes=(own or one.planned_parts).get("workspace", 0),
        overhead_ms=one.overhead.round_ms,
        overhead_sequence_ms=one.overhead.sequence_ms,
        load_s=one.load_s,
        row_invariant=one.row_invariant,
        min_rows=1,  # a measured cost pads by itself
    )


def _find_fixed_bytes(one: MeasuredModel) -> int:
    """Return what a worker holds beside weights, KV cache and workspace: what was planned. It is no less than the peak
    of the process that measured it leaves, whose KV cache may have been full."""
    parts = one.planned_parts
    planned = parts.get("process", 0) + parts.get("weights", 0)
    held = one.peak_bytes - parts.get("kv_cache", 0) - parts.get("workspace", 0)
    return max(0, max(planned, held) - one.weights_bytes)
