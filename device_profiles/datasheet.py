"""What a device is said to do, and what a model is therefore expected to cost on it: an estimate, never a measurement.

The roofline (Williams et al., CACM 52(4), 2009): a forward of r rows takes the longer of reading the weights once and
computing r rows,

    T(r) = overhead + max(weight bytes / (b bandwidth), r flops per row / (c rate))

so it is memory-bound below the knee, where both are equal, and compute-bound beyond it. b and c are the shares of the
stated peaks that real forwards reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from device_profiles.cost import US_PER_MS, StepCost
from device_profiles.profile import Precision
from device_profiles.units import MS_PER_S
from device_profiles.workload import DecoderShape

GB = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Publication:
    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A stated figure. `how`: how it follows from what the source says, "" where it is said there."""

    value: float
    source: Publication
    how: str = ""


@dataclass(frozen=True, slots=True)
class Datasheet:
    """A device as its maker describes it; every figure has its source, and what is not known for sure is None.

    `kind`: "cpu", "gpu" or "npu". `runtimes`: the adapters that can run a decoder on it, empty where none can.
    `memory_gb` (10^9 bytes) is of the device itself; CPUs and NPUs use the host's. `matmul_tflops` are dense rates.
    """

    name: str
    full_name: str
    kind: str
    runtimes: tuple[str, ...]
    memory_gb: Figure | None = None
    bandwidth_gb_per_s: Figure | None = None
    power_w: Figure | None = None
    cores: Figure | None = None
    matmul_tflops: Mapping[Precision, Figure] = field(default_factory=dict)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Return the peak rate of its memory, 0 where it is not known."""
        return self.bandwidth_gb_per_s.value * GB if self.bandwidth_gb_per_s else 0.0

    def flops(self, precision: Precision) -> float:
        """Return the peak rate in that format, 0 where it is not known."""
        figure = self.matmul_tflops.get(precision)
        return figure.value * TERA if figure else 0.0

    def figures(self) -> dict[str, Figure]:
        named = {
            "memory_gb": self.memory_gb,
            "bandwidth_gb_per_s": self.bandwidth_gb_per_s,
            "power_w": self.power_w,
            "cores": self.cores,
            **{f"matmul_tflops.{precision}": figure for precision, figure in self.matmul_tflops.items()},
        }
        return {name: figure for name, figure in named.items() if figure is not None}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What share of the stated peaks a forward reaches, and what each layer takes beside (starting its kernels).

    `error`: by how much an estimate made with them may be off, as a share; it goes into every prediction.
    """

    bandwidth: float
    compute: float
    layer_ms: float
    error: float
    source: str


EFFICIENCY = {
    "gpu": Efficiency(
        bandwidth=0.8,
        compute=0.5,
        layer_ms=0.02,
        error=0.3,
        source="bandwidth: assumed of decoding kernels; compute: prefill at 40 to 76 % of the peak rate (Pope et al., "
        "arXiv 2211.05102); layer: assumed, some ten kernels of 2 us each in a captured graph",
    ),
    "cpu": Efficiency(
        bandwidth=0.7,
        compute=0.6,
        layer_ms=0.1,
        error=0.4,
        source="measured on two Zen 4 cores with a model of 135 M weights: prefill at 270 of 397 GFLOP/s; beyond what "
        "reading the weights takes, a layer takes 0.1 ms (ONNX Runtime) to 0.16 ms (OpenVINO); bandwidth: assumed",
    ),
    "npu": Efficiency(
        bandwidth=0.5,
        compute=0.3,
        layer_ms=0.1,
        error=0.5,
        source="assumed: no NPU was measured, and its share of the memory that it and the CPU use is not published",
    ),
}
"""By kind of device."""
RANK_SUM_MS = 0.02
"""Adding the parts of two or more ranks, whatever their size: NCCL's some ten microseconds (ADR 0081), and a kernel.
Assumed, not measured."""
RANK_LINK_BYTES_PER_S = 16.0 * GB
"""Between two GPUs of a host. Assumed: half of what PCIe 4.0 x16 moves in one direction (31.5 GB/s); NVLink is
faster."""


def compute_precision(sheet: Datasheet) -> Precision | None:
    """Return the format that a forward computes in: weights of fewer bits are widened to it. None where no rate is
    known."""
    order = (Precision.BF16, Precision.FP16, Precision.FP32)
    if sheet.kind == "npu":
        order = (Precision.FP16, Precision.INT8, Precision.FP32)
    return next((precision for precision in order if sheet.flops(precision)), None)


def derive_cost(
    shape: DecoderShape,
    *,
    weight_bits: float,
    kv_bytes: float,
    bandwidth_bytes_per_s: float,
    flops: float,
    efficiency: Efficiency,
) -> StepCost:
    """Return what a forward is expected to take by the roofline.

    `weight_bits` of one weight, scales included; `kv_bytes` of one element of the KV cache; `bandwidth_bytes_per_s` and
    `flops` are the device's peaks. Raises ValueError where one of them is not positive.
    """
    if min(weight_bits, kv_bytes, bandwidth_bytes_per_s, flops) <= 0:
        raise ValueError("weights, bandwidth and rate must be positive")
    bandwidth, rate = efficiency.bandwidth * bandwidth_bytes_per_s, efficiency.compute * flops
    overhead_ms = efficiency.layer_ms * shape.layers
    read_ms = shape.read_elements * weight_bits / 8 / bandwidth * MS_PER_S
    row_ms = shape.flops_per_row / rate * MS_PER_S
    knee = read_ms / row_ms
    knots, times = [1.0], [overhead_ms + max(read_ms, row_ms)]
    if knee > 1.0:
        knots.append(knee)
        times.append(overhead_ms + read_ms)
    knots.append(2.0 * knots[-1])
    times.append(overhead_ms + knots[-1] * row_ms)
    return StepCost(
        row_knots=tuple(knots),
        row_ms=tuple(times),
        position_us=shape.kv_elements * kv_bytes / bandwidth * MS_PER_S * US_PER_MS,
        row_position_us=shape.attention_flops / rate * MS_PER_S * US_PER_MS,
        error=efficiency.error,
    )
