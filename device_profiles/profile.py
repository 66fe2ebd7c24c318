"""What a device is, and in which number formats it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from device_profiles.device_names import find_device_name
from device_profiles.memory import LayerCosts, MemoryCosts


class Precision(StrEnum):
    """A number format, named as the field names it."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


FAST: Literal["fast"] = "fast"
"""Weights as the file has them, but 4-bit formats in 4 bits: their offsets are rounded to whole steps."""

DRAFT: Literal["draft"] = "draft"
"""Weights of a draft model, on whose values no output depends: in 4 bits, with an output layer of the tokens that are
said most."""

WeightsFormat = Precision | Literal["fast", "draft"]


class Exactness(StrEnum):
    """How far a result may depend on what else shared its batch.

    `bit`: a row's logits are identical to the last bit whatever the depth, the chunking and the other
    sequences. `kernel`: the runtime may choose another kernel for another shape, and the last bits differ.
    """

    BIT = "bit"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device as a runtime sees it. `name` is the runtime's own identifier ("CPU", "GPU.0").

    `memory_bytes` is 0 where it is not known; `in_host_memory`: it is the host's. `precisions`: what it computes
    natively. `weights`: the formats that the adapter can prepare for it besides the file's own. `kv_cache`: the formats
    that its KV cache can have, and `exact_kv_cache` those of them with which rows are invariant. `memory_costs`: None
    where they were not measured. `layer_costs`: where layers that it has no room for can be in the host's memory, None
    where it holds all of them or nothing. `free_bytes`: of its memory, as its runtime says; None where that does not.
    `has_fast`: FAST is among the formats of weights; `has_draft`: DRAFT is, for drafts whose files it can be made of.
    """

    adapter: str
    name: str
    kind: str
    full_name: str
    memory_bytes: int
    precisions: tuple[Precision, ...]
    weights: tuple[Precision, ...] = ()
    kv_cache: tuple[Precision, ...] = ()
    exact_kv_cache: tuple[Precision, ...] = ()
    memory_costs: MemoryCosts | None = None
    layer_costs: LayerCosts | None = None
    free_bytes: int | None = None
    in_host_memory: bool = False
    has_fast: bool = True
    has_draft: bool = False


def find_listed_device(profiles: Sequence[DeviceProfile], device: str) -> DeviceProfile | None:
    """Return the one of a runtime's devices that goes by this name, in any spelling; None where none does."""
    name = find_device_name(device, [profile.name for profile in profiles])
    return next((profile for profile in profiles if profile.name == name), None)
