"""The numerical classes of OpenVINO's paged-attention models, and what a compiled model really has.

Measured (docs/adr/0040-numerical-classes.md): fp32 activations that are quantised in groups of 32 keep a row's bits on
every processor that was tried. They have the same ones on all of them. bf16 does so without AMX. What attention adds: a
segment of one row is a class of its own, and so is a forward of fewer single rows than there are threads. Without VNNI
OpenVINO does not quantise activations: an output layer over one row is a class of its own there, and without AVX-512 so
are long forwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from adapters.contract import Exactness, LoadOptions, NumericalClass, Precision, Unsupported
from adapters.hardware import cores
from device_profiles.device_names import is_processor
from device_profiles.numerical_class import FIXED_WIDTH
from device_profiles.profile import DeviceProfile

HINTS = {Precision.BF16: "bf16", Precision.FP16: "f16", Precision.FP32: "f32"}
KV_HINTS = {Precision.BF16: "bf16", Precision.FP16: "f16", Precision.INT8: "u8"}
_GROUP = 32
"""Activations of 8 bits share a scale in groups of so many: the same as GGUF's blocks. ADR 0040: it comes first, as it
decodes as fast as bf16 or faster. By 64 or 128 forwards took 1.3 to 2.4 times as long."""
_SHORT = 64
"""Rows of a forward up to which products have one kernel on processors with AVX2 alone. ADR 0040."""
_CPU_ORDER = (Precision.FP32, Precision.BF16, Precision.FP16)
_OTHER_ORDER = (Precision.BF16, Precision.FP16, Precision.FP32)


def list_numerical_classes(profile: DeviceProfile, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
    """See adapters.contract.Adapter.classes. Raises Unsupported."""
    first = [_class(profile, activations, options) for activations in _activations(profile, options)]
    if options.exactness is not Exactness.BIT:
        return [first]
    exact = [dataclasses.replace(kind, segment_rows=2, forward_rows=2) for kind in first]
    wide = [dataclasses.replace(kind, output_rows=2) for kind in exact]
    short = [dataclasses.replace(kind, most_rows=_SHORT) for kind in wide]
    tiers = [exact, wide, short, _together(short)]
    if (options.threads or cores()) > 2:  # where single rows have several classes, these hold
        tiers.insert(1, _together(exact))
    return [*tiers, [dataclasses.replace(kind, apart=False, fixed_width=FIXED_WIDTH) for kind in first]]


def _together(classes: Sequence[NumericalClass]) -> list[NumericalClass]:
    return [dataclasses.replace(kind, apart=False, forward_rows=1) for kind in classes]


def _activations(profile: DeviceProfile, options: LoadOptions) -> list[Precision]:
    order = _CPU_ORDER if is_processor(profile.name) else _OTHER_ORDER
    known = [precision for precision in order if precision in profile.precisions or precision is Precision.FP32]
    if options.activations is None:
        return known
    if options.activations not in known:
        raise Unsupported(
            f"activations {options.activations}: OpenVINO computes in {', '.join(known)} on {profile.name}; "
            "ask for one of these, or leave them at auto"
        )
    return [options.activations]


def _class(profile: DeviceProfile, activations: Precision, options: LoadOptions) -> NumericalClass:
    kv_cache = options.kv_cache or (Precision.BF16 if activations is Precision.BF16 else Precision.FP16)
    if kv_cache not in KV_HINTS:
        raise Unsupported(f"a KV cache in {kv_cache}: OpenVINO's has bf16, fp16 or int8")
    grouped = activations is not Precision.FP16 and is_processor(profile.name)
    return NumericalClass(activations, kv_cache, quantization_group=_GROUP * grouped, apart=True)


def effective_class(compiled: Any, wanted: NumericalClass) -> NumericalClass:
    """Return the class with the formats that a compiled model really has: OpenVINO takes others where it lacks one, and
    says nothing."""
    words = {hint: precision for precision, hint in (HINTS | KV_HINTS).items()}
    activations = words[compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()]
    cache = next(port for port in compiled.inputs if port.any_name.startswith("key_cache."))
    kv_cache = words[cache.get_element_type().get_type_name()]
    return dataclasses.replace(wanted, activations=activations, kv_cache=kv_cache)
