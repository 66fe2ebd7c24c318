"""What was measured of a device, of a model on it, and of a drafter on a target: values for the store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from device_profiles.cost import StepCost
from device_profiles.curve_fit import StepSample
from device_profiles.device_load import COUNTS_FROM
from device_profiles.profile import Precision
from device_profiles.units import GIB

SPLIT = "tensor_parallel "
"""In `MeasuredModel.formats`, before the number of ranks: each layer was split over so many."""

FEW_LAYERS = "few_layers"
"""In `MeasuredModel.formats`, behind all else: only some layers were loaded, and the figures are scaled to all."""

ENDS = ("first", "last", "both", "logits")
"""In `MeasuredModel.layer_parts`: what a process takes beside its layers. `first`: with the first one, the embedding;
`last`: with the last one, the output layer; `both`. `logits`: of its largest forward, with the last."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, whichever runtime drives it. `memory_bytes`: all it has (0: not known). `driver`: its version, empty
    for a processor. `isa`: the instruction sets that matter for products of matrices."""

    kind: str
    name: str
    memory_bytes: int
    driver: str = ""
    numa_nodes: int = 1
    physical_cores: int = 0
    isa: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Operations per second of a large product of matrices, 2 for each multiplication and addition."""

    precision: Precision
    flops: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device does at most: products of matrices by number format, and bytes read from its memory in a second
    (0: not known)."""

    matmul: tuple[MatmulRate, ...] = ()
    bandwidth_bytes_per_s: float = 0.0

    def flops(self, precision: Precision) -> float:
        """Return the rate in a format, 0 where it was not measured."""
        return next((rate.flops for rate in self.matmul if rate.precision is precision), 0.0)


@dataclass(frozen=True, slots=True)
class Energy:
    """What a device takes. `meter` names what told it; `reason` says why there is none, and the figures are None.
    `idle_w` and `load_w`: mean power with nothing to do, and while matrices are multiplied."""

    meter: str = ""
    reason: str = ""
    idle_w: float | None = None
    load_w: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """A device as one runtime drives it, with so many threads (0 where it has cores of its own).

    `fingerprint` is of hardware, driver and runtime version. `took_s`: the measuring itself. `others`: as in
    MeasuredModel.
    """

    fingerprint: str
    adapter: str
    device: str
    runtime_version: str
    hardware: Hardware
    threads: int
    rates: DeviceRates = DeviceRates()
    energy: Energy = Energy()
    measured_at: str = ""
    took_s: float = 0.0
    others: float | None = None


@dataclass(frozen=True, slots=True)
class RoundOverhead:
    """What a round of the decode loop takes beside its forward: once, for each sequence, and for each row whose logits
    choose a token."""

    round_ms: float = 0.0
    sequence_ms: float = 0.0
    row_ms: float = 0.0

    def ms(self, sequences: float, rows: float) -> float:
        return self.round_ms + self.sequence_ms * sequences + self.row_ms * rows


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What a model costs on a device: in one runtime, number format and exactness, with so many threads.

    `role`: "target", or "draft", of which nothing but forwards is measured. `model_digest`: of its files. `formats`: of
    weights, activations and KV cache as they were asked for ("auto auto auto"); `weights` and the others are what they
    came to.
    `matrix_elements`: elements that a row is multiplied with (0: not known); `weights_bytes`: as they are read in a
    forward. `planned_bytes`: what it was announced to hold (0: costs not known). `device_parts`: what its device was,
    where that has memory of its own and may leave layers to the host. `peak_bytes`: what its process held at
    most, of an NVIDIA device what it had there.
    `energy_j_per_token`: None where the device tells nothing. `samples`: what `cost` was fitted to. `drifted`: how
    rounds differed from it while serving, so that it is to be measured again; "" where they did not.
    `few_layers`: so many of its layers were loaded, as the device has no room for all; 0: all were. Then `cost` is
    scaled to all layers, `overhead` is what each shard takes beside its layers, and `planned_bytes` what the whole
    would hold at least. `layer_parts` says in bytes what each `layer` takes, what the ENDS do, and what is
    `fixed`.
    `others`: the share of the device, or of the cores that were used, that other programs took meanwhile; None where
    nobody can tell. `forwards_only`: measuring was not done when this was kept, so `overhead` is not known.
    `numerical_class` and `class_fingerprint`: see device_profiles.numerical_class; `class_reason` and
    `classes_rejected`: why that one, and why not the others, in words.
    """

    fingerprint: str
    adapter: str
    device: str
    role: str
    model: str
    model_digest: str
    weights: str
    activations: str
    kv_cache: str
    exactness: str
    formats: str
    threads: int
    cost: StepCost
    decode_error: float
    prefill_error: float
    worst_error: float
    overhead: RoundOverhead
    load_s: float
    row_invariant: bool
    paid_rows: int
    layers: int
    kv_bytes_per_token: int
    matrix_elements: int = 0
    weights_bytes: int = 0
    planned_bytes: int = 0
    planned_parts: dict[str, int] = field(default_factory=dict)
    device_parts: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    energy_j_per_token: float | None = None
    samples: tuple[StepSample, ...] = ()
    measured_at: str = ""
    took_s: float = 0.0
    drifted: str = ""
    numerical_class: str = ""
    class_fingerprint: str = ""
    class_reason: str = ""
    classes_rejected: tuple[str, ...] = ()
    others: float | None = None
    forwards_only: bool = False
    few_layers: int = 0
    layer_parts: dict[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Over how many each layer was split; 1 where none was."""
        return int(self.formats.partition(SPLIT)[2].partition(" ")[0] or 1)

    @property
    def unfinished(self) -> str:
        """In words, what of it was not measured yet; "" where all was."""
        return "only its forwards were measured" if self.forwards_only else ""

    @property
    def disturbed(self) -> str:
        """In words, what other programs took while it was measured; "" where that does not count."""
        if self.others is None or self.others < COUNTS_FROM:
            return ""
        return f"other programs took {self.others:.0%} of it while it was measured"

    @property
    def doubt(self) -> str:
        """In words, why it is to be measured again; "" where it is not."""
        drifted = f"drifted ({self.drifted})" if self.drifted else ""
        return ", ".join(why for why in (drifted, self.unfinished, self.disturbed) if why)

    @property
    def error(self) -> float:
        """How far a prediction may be off, as a share: the fit's error, and what others took. Alone, forwards may take
        so much less."""
        return max(self.cost.error, self.decode_error) + (self.others or 0.0 if self.disturbed else 0.0)


def fingerprint(hardware: Hardware, runtime_version: str) -> str:
    """Return 12 hex digits that change with the hardware, its driver and the runtime. Memory counts in whole GiB: what
    a machine says of it differs a little from start to start."""
    facts = {**asdict(hardware), "memory_bytes": round(hardware.memory_bytes / GIB), "runtime": runtime_version}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
