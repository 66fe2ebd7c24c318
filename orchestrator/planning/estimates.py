"""Options that nobody measured: what datasheets lead to expect, or the measured rates of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from device_profiles.datasheet import EFFICIENCY, GB, TERA, Datasheet, Efficiency, compute_precision, derive_cost
from device_profiles.measured import DeviceRates, MatmulRate, MeasuredDevice
from device_profiles.profile import Exactness, Precision
from device_profiles.units import GIB
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import EndBytes, Option, Role
from policies.planning.shard_cost import PREFILL_CHUNK_ROWS

KV_BYTES = 2  # a 16-bit KV cache, which exactness `bit` needs
_MIN_ROWS = 2  # docs/adr/0002-two-rows-per-segment.md
# Assumed: a process with its libraries and, on GPUs, its context. Not measured.
_FIXED_BYTES = 1 * GIB
PROCESS_BYTES = GIB // 2  # of a process that serves here, as the runtimes' loaders count it: they see what is free
# Rows of a forward whose logits are in memory at once. ADR 0020.
_LOGITS_ROWS = 64
# Float32 values of a row's activations at the peak, as multiples of the MLP's width. ADR 0020.
_ROW_FLOATS = 8
# Shares of a processor's cores that a sketch is planned with. Not tuned.
_THREAD_SHARES = (1.0, 0.75, 0.25)
# Of a device of which nothing is known. Not measured.
_ASSUMED_BYTES_PER_S = {"cpu": 20.0 * GB, "cuda": 500.0 * GB}
_ASSUMED_FLOPS = {"cpu": 0.2 * TERA, "cuda": 50.0 * TERA}  # as above, operations a second
# ADR 0108: where the device's rates are not measured; 40 % where they are.
_ASSUMED_ERROR = 1.0
# Assumed: half of a processor's cores reach its memory's peak. ADR 0026. Not measured.
_CORES_FOR_BANDWIDTH = 0.5


@dataclass(frozen=True, slots=True)
class Stated:
    """A device by its datasheet. See DeviceSource."""

    sheet: Datasheet

    @property
    def kind(self) -> str:
        """Return "cpu", "gpu" or "npu"."""
        return self.sheet.kind

    @property
    def memory_bytes(self) -> int:
        return int(self.sheet.memory_gb.value * GB) if self.sheet.memory_gb else 0

    @property
    def cores(self) -> int:
        return int(self.sheet.cores.value) if self.sheet.cores else 0

    @property
    def power_w(self) -> float:
        return self.sheet.power_w.value if self.sheet.power_w else 0.0

    @property
    def rates(self) -> DeviceRates:
        sheet = self.sheet
        matmul = tuple(MatmulRate(precision, sheet.flops(precision)) for precision in sheet.matmul_tflops)
        return DeviceRates(matmul, sheet.bandwidth_bytes_per_s)

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


DeviceSource = MeasuredHardware | Stated
"""Where the figures of a kind of device come from. `memory_bytes` is its own, 0 where it works in the host's memory.
`cores` are those of a processor, else 0. Rates and power are 0 or empty where not known. `sheet` states them; it is
None where they are measured."""


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
    sheet_kind = "cpu" if kind == "cpu" else "gpu"
    weights, rates = (
        model.formats(sheet_kind)[0],
        (bandwidth or _ASSUMED_BYTES_PER_S[kind], flops or _ASSUMED_FLOPS[kind]),
    )
    whole = _build_option(model, Role.TARGET, device.adapter, weights, rates, EFFICIENCY[sheet_kind])
    if not bandwidth or not flops:
        whole = replace(whole, cost=replace(whole.cost, error=_ASSUMED_ERROR))
    return replace(whole, threads=device.threads, fixed_bytes=PROCESS_BYTES, source="estimate", prepared=prepared)


def _options(sheet: Datasheet, model: PlannedModel, role: Role, cores: int) -> Iterator[Option]:
    precision = compute_precision(sheet)
    if precision is None or not sheet.runtimes or not sheet.bandwidth_bytes_per_s:
        return
    runtime, bandwidth, flops = sheet.runtimes[0], sheet.bandwidth_bytes_per_s, sheet.flops(precision)
    if model.runtimes and runtime not in model.runtimes:
        return
    # torch holds such weights on GPUs that compute in them, and nothing else does
    has_fp8 = runtime == "torch_device" and sheet.kind == "gpu" and sheet.flops(Precision.FP8) > 0.0
    efficiency = EFFICIENCY[sheet.kind]
    for weights in model.formats(sheet.kind):
        if weights == Precision.FP8 and not has_fp8:
            continue
        if sheet.kind != "cpu" or not cores:
            yield _build_option(model, role, runtime, weights, (bandwidth, flops), efficiency)
            continue
        for threads in dict.fromkeys(max(1, round(share * cores)) for share in _THREAD_SHARES):
            # Rates go with a processor's cores, and bandwidth until it is reached.
            share = threads / max(sheet.cores.value if sheet.cores else threads, threads)
            rates = (min(1.0, share / _CORES_FOR_BANDWIDTH) * bandwidth, share * flops)
            yield replace(_build_option(model, role, runtime, weights, rates, efficiency), threads=threads)


def _build_option(
    model: PlannedModel, role: Role, runtime: str, weights: str, rates: tuple[float, float], efficiency: Efficiency
) -> Option:
    """Return an option by its device's bandwidth (bytes/s) and rate (FLOP/s), with the memory that the model's shape
    leads to expect."""
    shape, bits = model.shape, model.bits(weights)
    bandwidth, flops = rates
    return Option(
        profile="",
        role=role,
        model=model.name,
        runtime=runtime,
        weights=weights,
        cost=derive_cost(
            shape,
            weight_bits=bits,
            kv_bytes=KV_BYTES,
            bandwidth_bytes_per_s=bandwidth,
            flops=flops,
            efficiency=efficiency,
        ),
        layer_bytes=shape.layer_elements * bits / 8,
        ends=EndBytes(
            first=shape.embedding_elements * bits / 8,
            last=shape.head_elements * bits / 8,
            both=shape.end_elements * bits / 8,
            logits=4 * shape.vocabulary * _LOGITS_ROWS,
        ),
        fixed_bytes=_FIXED_BYTES,
        workspace_bytes=4 * _ROW_FLOATS * shape.mlp * PREFILL_CHUNK_ROWS,
        kv_bytes_per_token=shape.kv_elements * KV_BYTES,
        min_rows=_MIN_ROWS,
        source="datasheet",
    )
