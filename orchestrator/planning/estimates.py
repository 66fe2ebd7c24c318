"""Options that nobody measured: what datasheets lead to expect, or the measured rates of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from device_profiles.cost import StepCost
from device_profiles.datasheet import EFFICIENCY, GB, TERA, Datasheet, compute_precision, derive_cost
from device_profiles.measured import DeviceRates, MatmulRate, MeasuredDevice
from device_profiles.profile import Exactness, Precision
from device_profiles.units import GIB
from orchestrator.planning.models import PlannedModel
from policies.planning.plan import Option, Role

KV_BYTES = 2  # a 16-bit KV cache, which exactness `bit` needs
_MIN_ROWS = 2  # docs/adr/0002-two-rows-per-segment.md
_FIXED_BYTES = 1 * GIB  # assumed: a process with its libraries and, on GPUs, its context
_PROCESS_BYTES = GIB // 2  # of a process that serves here, as the runtimes' loaders count it: they see what is free
_LOGITS_ROWS = 64  # rows of a forward whose logits are in memory at once
_ROW_FLOATS = 8  # float32 values of a row's activations at the peak, as multiples of the MLP's width
_CHUNK_ROWS = 512
_THREAD_SHARES = (1.0, 0.75, 0.25)
_ASSUMED_BYTES_PER_S = {"cpu": 20.0 * GB, "cuda": 500.0 * GB}  # of a device of which nothing is known
_ASSUMED_FLOPS = {"cpu": 0.2 * TERA, "cuda": 50.0 * TERA}
_ASSUMED_ERROR = 1.0
_CORES_FOR_BANDWIDTH = 0.5  # assumed: half of a processor's cores reach its memory's peak


@dataclass(frozen=True, slots=True)
class Stated:
    """A device by its datasheet. See planning.source.DeviceSource."""

    sheet: Datasheet

    @property
    def kind(self) -> str:
        """Return "cpu", "gpu" or "npu"."""
        return self.sheet.kind

    @property
    def memory_bytes(self) -> int:
        """Return its own memory; 0 where it works in the host's."""
        return int(self.sheet.memory_gb.value * GB) if self.sheet.memory_gb else 0

    @property
    def cores(self) -> int:
        """Return the cores that a processor has."""
        return int(self.sheet.cores.value) if self.sheet.cores else 0

    @property
    def power_w(self) -> float:
        """Return what it takes at most, 0 where that is not stated."""
        return self.sheet.power_w.value if self.sheet.power_w else 0.0

    @property
    def rates(self) -> DeviceRates:
        """Return the stated rates."""
        sheet = self.sheet
        matmul = tuple(MatmulRate(precision, sheet.flops(precision)) for precision in sheet.matmul_tflops)
        return DeviceRates(matmul, sheet.bandwidth_bytes_per_s)

    def device_for(self, adapter: str) -> str:
        """Return nothing: the device is not there."""
        return ""

    def options(
        self, target: PlannedModel, drafts: Sequence[PlannedModel], exactness: Exactness, cores: int
    ) -> list[Option]:
        """Return how these models run on it, on a host with so many cores; their `profile` is still to be named. All of
        a device's runtimes are expected to do the same, so the first stands for them. There are none where no runtime
        runs a decoder on it."""
        options = list(_options(self.sheet, target, Role.TARGET, cores))
        for draft in drafts:
            options += _options(self.sheet, draft, Role.DRAFT, cores)
        return options


@dataclass(frozen=True, slots=True)
class EstimableDevice:
    """A device as a runtime sees it, where the target was not measured. `prepared`: the runtime loads the model as it
    lies there."""

    device: MeasuredDevice
    prepared: bool = True


def estimate_option(device: MeasuredDevice, model: PlannedModel, *, prepared: bool = True) -> Option:
    """Return how a target is expected to run on a device on which it was not measured: by the device's rates where
    these are known, else by what is assumed of its kind. `prepared`: as the option's."""
    kind = device.hardware.kind if device.hardware.kind in _ASSUMED_FLOPS else "cpu"
    bandwidth = device.rates.bandwidth_bytes_per_s
    flops = max((rate.flops for rate in device.rates.matmul), default=0.0)
    efficiency, weights = (
        EFFICIENCY["cpu" if kind == "cpu" else "gpu"],
        model.formats("cpu" if kind == "cpu" else "gpu")[0],
    )
    cost = derive_cost(
        model.shape,
        weight_bits=model.bits(weights),
        kv_bytes=KV_BYTES,
        bandwidth_bytes_per_s=bandwidth or _ASSUMED_BYTES_PER_S[kind],
        flops=flops or _ASSUMED_FLOPS[kind],
        efficiency=efficiency,
    )
    error = efficiency.error if bandwidth and flops else _ASSUMED_ERROR
    whole = _size_option(model, Role.TARGET, device.adapter, weights, replace(cost, error=error))
    return replace(whole, threads=device.threads, fixed_bytes=_PROCESS_BYTES, source="estimate", prepared=prepared)


def _options(sheet: Datasheet, model: PlannedModel, role: Role, cores: int) -> Iterator[Option]:
    precision = compute_precision(sheet)
    if precision is None or not sheet.runtimes or not sheet.bandwidth_bytes_per_s:
        return
    if model.runtimes and sheet.runtimes[0] not in model.runtimes:
        return
    for weights in model.formats(sheet.kind):
        if weights == Precision.FP8 and not _has_fp8(sheet):
            continue
        whole = _option(sheet, model, role, weights, precision)
        if sheet.kind != "cpu" or not cores:
            yield whole
            continue
        for threads in dict.fromkeys(max(1, round(share * cores)) for share in _THREAD_SHARES):
            yield _on_cores(sheet, whole, model, precision, threads)


def _has_fp8(sheet: Datasheet) -> bool:
    """Return whether weights may have this format: torch holds it on GPUs that compute in it, and nothing else does."""
    return sheet.runtimes[0] == "torch_device" and sheet.kind == "gpu" and sheet.flops(Precision.FP8) > 0.0


def _option(sheet: Datasheet, model: PlannedModel, role: Role, weights: str, precision: Precision) -> Option:
    cost = derive_cost(
        model.shape,
        weight_bits=model.bits(weights),
        kv_bytes=KV_BYTES,
        bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s,
        flops=sheet.flops(precision),
        efficiency=EFFICIENCY[sheet.kind],
    )
    return _size_option(model, role, sheet.runtimes[0], weights, cost)


def _size_option(model: PlannedModel, role: Role, runtime: str, weights: str, cost: StepCost) -> Option:
    """Return an option of this cost, with the memory that the model's shape leads to expect."""
    shape, bits = model.shape, model.bits(weights)
    return Option(
        profile="",
        role=role,
        model=model.name,
        runtime=runtime,
        weights=weights,
        cost=cost,
        layer_bytes=shape.layer_elements * bits / 8,
        end_bytes=shape.end_elements * bits / 8,
        fixed_bytes=_FIXED_BYTES,
        workspace_bytes=4 * (_ROW_FLOATS * shape.mlp * _CHUNK_ROWS + shape.vocabulary * _LOGITS_ROWS),
        kv_bytes_per_token=shape.kv_elements * KV_BYTES,
        min_rows=_MIN_ROWS,
        source="datasheet",
    )


def _on_cores(sheet: Datasheet, whole: Option, model: PlannedModel, precision: Precision, threads: int) -> Option:
    """Return the option on some of a processor's cores: rates go with them, bandwidth until it is reached."""
    share = threads / max(sheet.cores.value if sheet.cores else threads, threads)
    cost = derive_cost(
        model.shape,
        weight_bits=model.bits(whole.weights),
        kv_bytes=KV_BYTES,
        bandwidth_bytes_per_s=min(1.0, share / _CORES_FOR_BANDWIDTH) * sheet.bandwidth_bytes_per_s,
        flops=share * sheet.flops(precision),
        efficiency=EFFICIENCY[sheet.kind],
    )
    return replace(whole, cost=cost, threads=threads)
