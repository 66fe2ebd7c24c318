"""Devices that were measured: options from stored profiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from device_profiles.cost import with_row_ms
from device_profiles.measured import (
    ENDS,
    DeviceRates,
    Hardware,
    MatmulRate,
    MeasuredDevice,
    MeasuredModel,
    fingerprint,
)
from device_profiles.memory import KV_CACHE, MeasuredMemory
from device_profiles.profile import Exactness
from device_profiles.store import ProfileStore
from orchestrator.planning.models import PlannedModel
from policies.planning.plan import EndBytes, Option, Role

_UNKNOWN: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MeasuredHardware:
    """A kind of device, with all that was measured of it, on any of those that are alike. A processor may have been
    measured with several runtimes, each under its own fingerprint. `memory`: what workers held there. See
    planning.estimates.DeviceSource."""

    hardware: Hardware
    devices: tuple[MeasuredDevice, ...]
    models: tuple[MeasuredModel, ...]
    memory: tuple[MeasuredMemory, ...] = ()

    @property
    def kind(self) -> str:
        return self.hardware.kind

    @property
    def name(self) -> str:
        """Return what a runtime calls it, the shortest of all."""
        return name_shortest(device.device for device in self.devices)

    @property
    def power_w(self) -> float:
        return max((device.energy.load_w or 0.0 for device in self.devices), default=0.0)

    @property
    def rates(self) -> DeviceRates:
        """Return the highest measured rates, of products in each number format and of its memory."""
        best: dict[str, MatmulRate] = {}
        for rate in (rate for device in self.devices for rate in device.rates.matmul):
            known = best.get(rate.precision)
            if known is None or rate.flops > known.flops:
                best[rate.precision] = rate
        memory = max((device.rates.bandwidth_bytes_per_s for device in self.devices), default=0.0)
        return DeviceRates(tuple(best[precision] for precision in sorted(best)), memory)

    @property
    def memory_bytes(self) -> int:
        return 0 if self.kind == "cpu" else self.hardware.memory_bytes

    @property
    def cores(self) -> int:
        return self.hardware.physical_cores

    @property
    def sheet(self) -> None:
        return None

    def options(
        self, target: PlannedModel, drafts: Sequence[PlannedModel], exactness: Exactness, cores: int, ranks: int = 1
    ) -> list[Option]:
        """Return how these models run on it; their `profile` is still to be named. What was measured with more threads
        than there are `cores` is left out, and so is what was measured on few layers where the whole was, too.
        `ranks`: over how many such devices each layer of the target is split."""
        targets = [
            model
            for model in self.models
            if model.role == Role.TARGET
            and model.exactness == exactness
            and model.ranks == ranks
            and _matches_model(model, target, cores)
        ]
        whole = {_name_run(model) for model in targets if not model.few_layers}
        options = [
            _option(model, Role.TARGET, target)
            for model in targets
            if not model.few_layers or _name_run(model) not in whole
        ]
        alike = {(draft.name, draft.digest): draft for draft in drafts}  # one model may be named under several drafts
        options += [
            _option(model, Role.DRAFT, draft)
            for draft in alike.values()
            for model in self.models
            if model.role == Role.DRAFT and _matches_model(model, draft, cores)
        ]
        return [self.correct_memory(option, target) if option.role is Role.TARGET else option for option in options]

    def find_memory(self, option: Option, target: PlannedModel) -> MeasuredMemory | None:
        """Return what a worker held last that had the target loaded as in an option, with as many slots as any
        had; None where no one has. For an option of shards it is a worker that had layers. An estimate knows no format
        that weights come to."""
        known = [
            memory
            for memory in self.memory
            if memory.adapter == option.runtime
            and memory.model_digest == target.digest
            and (memory.layers == 0) == option.runs_whole
            and (memory.format == option.weights or option.source == "estimate")
        ]
        return max(known, key=lambda memory: (memory.slots, memory.measured_at), default=None)

    def correct_memory(self, option: Option, model: PlannedModel) -> Option:
        """Return an option with the memory that its worker held last. One of shards goes by a worker of layers, however
        many these were: what it held more, it held beside them."""
        last = self.find_memory(option, model) if self.kind == "cpu" else None
        if last is None:
            return option
        if not option.runs_whole:
            return replace(option, fixed_bytes=max(0, option.fixed_bytes + last.surplus_bytes))
        held = sum(last.whole.values()) - last.whole[KV_CACHE] + last.surplus_bytes
        beside = option.ends.sum_weights(first=True, last=True) + option.ends.logits
        beside += model.shape.layers * option.layer_bytes + option.workspace_bytes
        return replace(option, fixed_bytes=max(0, int(held - beside)))


def name_shortest(names: Iterable[str]) -> str:
    return min(names, key=lambda name: (len(name), name))


def load_measured_hardware(store: ProfileStore, versions: Mapping[str, str] = _UNKNOWN) -> list[MeasuredHardware]:
    """Return the devices of a store, in the order of their names. `versions`: of the runtimes that are here, by
    adapter. What was measured with them goes before what is newer. What was measured with another library behind the
    same adapter is left out."""

    def is_known(device: MeasuredDevice) -> bool:
        return versions.get(device.adapter) == device.runtime_version

    newest: dict[tuple[Hardware, str, str, int], MeasuredDevice] = {}
    for measured in sorted(store.devices(), key=lambda device: (is_known(device), device.measured_at)):
        if _name_library(measured.runtime_version) == _name_library(
            versions.get(measured.adapter, measured.runtime_version)
        ):
            newest[(measured.hardware, measured.adapter, measured.device, measured.threads)] = (
                measured  # of what was updated, the last
            )
    devices: dict[Hardware, list[MeasuredDevice]] = {}
    for measured in newest.values():
        devices.setdefault(measured.hardware, []).append(measured)
    models = store.models()
    kinds = []
    for hardware, seen in devices.items():
        marks = {(device.fingerprint, device.adapter) for device in seen}
        mine = _keep_newest(model for model in models if (model.fingerprint, model.adapter) in marks)
        kinds.append(MeasuredHardware(hardware, tuple(seen), mine, _list_memory(store, seen)))
    return sorted(kinds, key=lambda kind: (kind.hardware.name, kind.name))


def _keep_newest(models: Iterable[MeasuredModel]) -> tuple[MeasuredModel, ...]:
    """Return what was measured of each model, on whichever of several devices that are alike."""
    newest: dict[tuple[object, ...], MeasuredModel] = {}
    for model in sorted(models, key=lambda model: model.measured_at):
        run_as = (model.fingerprint, model.adapter, model.formats, model.exactness, model.threads)
        newest[(*run_as, model.role, model.model, model.model_digest)] = model
    return tuple(newest.values())


def _list_memory(store: ProfileStore, devices: Sequence[MeasuredDevice]) -> tuple[MeasuredMemory, ...]:
    """Return what workers held on a device, by whichever of these runtimes."""
    marks = {
        # as numerical classes are kept: workers that may use other cores of one processor hold the same
        (device.adapter, fingerprint(replace(device.hardware, physical_cores=0), device.runtime_version))
        for device in devices
    }
    return tuple(memory for memory in store.memory() if (memory.adapter, memory.fingerprint) in marks)


def _name_library(version: str) -> str:
    return version.partition(" ")[0]


def add_devices(
    kinds: Sequence[MeasuredHardware], more: Sequence[MeasuredDevice], store: ProfileStore
) -> list[MeasuredHardware]:
    """Return the hardware with these runtimes' views of it, where they are not among what was measured."""
    known = {kind.hardware: kind for kind in kinds}
    for device in more:
        kind = known.get(device.hardware, MeasuredHardware(device.hardware, (), ()))
        if all(other.adapter != device.adapter for other in kind.devices):
            memory = (*kind.memory, *_list_memory(store, [device]))
            known[device.hardware] = replace(kind, devices=(*kind.devices, device), memory=memory)
    return list(known.values())


def choose_present(
    kinds: Sequence[MeasuredHardware], present: Collection[Hardware]
) -> tuple[list[MeasuredHardware], list[str]]:
    """Return the hardware that a plan for one machine may use, and why the rest is left out.

    That is what is there now. Where nothing of it is, the profiles are another machine's, and of each device there the
    newest counts.
    """
    here = [kind for kind in kinds if kind.hardware in present]
    if here:
        why = "it is another machine's, or its memory or driver has changed since: run `outrider profile`"
        return here, [f"{kind.hardware.name}: left out, {why}" for kind in kinds if kind not in here]
    newest: dict[str, MeasuredHardware] = {}
    for kind in sorted(kinds, key=lambda kind: max(device.measured_at for device in kind.devices)):
        newest[kind.name] = kind
    kept = [kind for kind in kinds if kind in newest.values()]
    return kept, [
        f"{kind.hardware.name}: left out, {kind.name} was measured anew since" for kind in kinds if kind not in kept
    ]


def _name_run(measured: MeasuredModel) -> tuple[str, str, int]:
    return measured.adapter, measured.weights, measured.threads


def _matches_model(measured: MeasuredModel, model: PlannedModel, cores: int) -> bool:
    """Return whether this was measured with a model's files (with its name, where its files are not there), in a format
    that is asked for."""
    if (measured.model_digest != model.digest) if model.digest else (measured.model != model.name):
        return False
    written = measured.formats.partition(" ")[0]
    return written in (model.weights or ("auto",)) and (not cores or measured.threads <= cores)


def _option(measured: MeasuredModel, role: Role, model: PlannedModel) -> Option:
    own = measured.device_parts
    if measured.few_layers:
        own = {"weights": measured.layers * measured.layer_parts["layer"], **measured.planned_parts}
    return Option(
        profile="",
        role=role,
        model=model.name,
        runtime=measured.adapter,
        weights=measured.weights,
        cost=with_row_ms(replace(measured.cost, error=measured.error), measured.overhead.row_ms),
        layer_bytes=(own["weights"] if own else measured.weights_bytes) / measured.layers,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        threads=measured.threads,
        ends=EndBytes(**{end: measured.layer_parts.get(end, 0) for end in ENDS}),
        fixed_bytes=measured.layer_parts.get("fixed", 0) if own else _find_fixed_bytes(measured),
        workspace_bytes=(own or measured.planned_parts).get("workspace", 0),
        overhead_ms=measured.overhead.round_ms,
        overhead_sequence_ms=measured.overhead.sequence_ms,
        load_s=measured.load_s,
        row_invariant=measured.row_invariant,
        min_rows=1,  # a measured cost pads by itself
        source="few layers" if measured.few_layers else "measured",
        bits=measured.class_fingerprint if measured.exactness == Exactness.BIT else "",
        taken=measured.others or 0.0 if measured.disturbed else 0.0,
    )


def _find_fixed_bytes(measured: MeasuredModel) -> int:
    """Return what a worker holds beside weights, KV cache and workspace: what was planned. It is no less than the peak
    of the process that measured it leaves, whose KV cache may have been full."""
    parts = measured.planned_parts
    planned = parts.get("process", 0) + parts.get("weights", 0)
    held = measured.peak_bytes - parts.get("kv_cache", 0) - parts.get("workspace", 0)
    return max(0, max(planned, held) - measured.weights_bytes)
