"""OpenVINO with graphs of fixed shape: for NPUs, which take nothing else, and with the same graphs on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.contract import Footprint, LoadOptions, NumericalClass, Precision, Progress, Unsupported
from adapters.hf_directory import title
from adapters.openvino_rt.adapter import core_with, device_profile, list_openvino_devices
from adapters.openvino_rt.classes import HINTS
from adapters.openvino_rt.static_build import BODY_FILE, HEAD_FILE
from adapters.openvino_rt.static_graphs import Compiler, plan_shapes
from adapters.openvino_rt.static_model import StaticModel
from adapters.prepared_facts import facts_of, model_spec, read_facts, write_facts
from adapters.source_meter import SourceMeter, say_bytes
from device_profiles.device_names import is_processor
from device_profiles.memory import MemoryCosts
from device_profiles.profile import FAST, DeviceProfile, WeightsFormat
from device_profiles.units import MIB

_FORMAT = 2
_ACTIVATIONS = {True: (Precision.BF16, Precision.FP32), False: (Precision.FP16, Precision.FP32)}
"""Number formats, the fastest first, on CPU and elsewhere; the KV cache has the activations'."""
# Every graph keeps its weights packed and as they were read, and converts what it is given of the KV cache. Measured
# with the default model: see ADR 0020.
_CPU_MEMORY = MemoryCosts(
    fixed_bytes=28 * MIB,
    weights_copies=1,
    embedding_copies=1,
    logits_copies=1,
    mlp_floats=0,
    hidden_floats=0,
    graph_copies=2.0,
    graph_cache_copies=1.5,
)


class StaticOpenVinoAdapter:
    """See the module and the contract. For `device` CPU, weights are prepared as the file has them or in 8 bits; for
    all others in 8 bits, which every NPU computes with."""

    name = "openvino_rt"

    def __init__(self, device: str) -> None:
        self._eight_bits = not is_processor(device)

    def devices(self) -> list[DeviceProfile]:
        """List OpenVINO's devices. Raises AdapterUnavailable."""
        return [_static(device) for device in list_openvino_devices()]

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the graphs' format and the library that writes them."""
        name = "int8" if self._in_eight_bits(weights) else FAST if weights == FAST else "own"
        return f"static graphs, {name} weights, {_FORMAT}; openvino {version('openvino')}"

    def _in_eight_bits(self, weights: WeightsFormat | None) -> bool:
        if weights not in (None, FAST, Precision.INT8):
            raise Unsupported(f"weights in {weights}: with static shapes they are as_file, fast or int8")
        return self._eight_bits or weights is Precision.INT8

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Write the graphs, from our own reader of the file. Raises ModelRefused, AdapterUnavailable."""
        from adapters.decoder.eight_bits import EightBitWeights
        from adapters.decoder.source import open_source
        from adapters.openvino_rt.static_build import write_static

        stage = f"convert {title(source)}"
        progress(stage, -1.0)
        meter = SourceMeter(source, say_bytes(progress, stage))
        opened = open_source(source, FAST if weights == FAST else None, meter.note)
        chosen = EightBitWeights(opened) if self._in_eight_bits(weights) else opened
        write_static(chosen, target, meter)
        write_facts(target, facts_of(chosen, source))
        progress(stage, 1.0)

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return list_static_classes(device_profile(core_with(options.device), options.device), options)

    def footprint(self, prepared: Path, options: LoadOptions) -> Footprint:
        profile = device_profile(core_with(options.device), options.device)
        chosen = options.numerical_class or list_static_classes(profile, options)[0][0]
        plan = plan_shapes(options, read_facts(prepared), chosen.activations)
        cache = plan.cache
        body, head = ((prepared / name).with_suffix(".bin").stat().st_size for name in (BODY_FILE, HEAD_FILE))
        bodies, heads = len(plan.widths), len(plan.verify_rows)
        return Footprint(
            kv_cache=cache.blocks * cache.block * cache.bytes_per_token,
            graph_weights=bodies * body + heads * head,
            graph_caches=bodies * cache.capacity * cache.bytes_per_token,
        )

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> StaticModel:
        core = core_with(options.device)
        facts = read_facts(prepared)
        profile = device_profile(core, options.device)
        chosen = options.numerical_class or list_static_classes(profile, options)[0][0]
        activations = chosen.activations
        plan = plan_shapes(options, facts, activations)
        progress("load", 0.0)
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": HINTS[activations], "PERFORMANCE_HINT": "LATENCY"}
        if options.threads and profile.kind == "cpu":
            settings["INFERENCE_NUM_THREADS"] = options.threads
        compiler = Compiler(core, prepared, options.device, settings, plan.cache)
        model = StaticModel(
            compiler,
            model_spec(facts, plan.cache.bytes_per_token),
            options,
            plan,
            weights=facts["weights"],
            numerical_class=chosen,
            progress=lambda done: progress("load", 0.9 * done),
        )
        progress("load", 1.0)
        return model


def _static(device: DeviceProfile) -> DeviceProfile:
    """Return a device as it is with static shapes."""
    held = tuple(precision for precision in _ACTIVATIONS[is_processor(device.name)] if precision in device.precisions)
    costs = _CPU_MEMORY if is_processor(device.name) else None
    return replace(
        device, weights=(Precision.INT8,), kv_cache=held, exact_kv_cache=held, memory_costs=costs, has_draft=False
    )


def list_static_classes(profile: DeviceProfile, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
    """See adapters.contract.Adapter.classes: the KV cache has the activations' format. Raises Unsupported."""
    wanted, order = options.activations, _ACTIVATIONS[is_processor(profile.name)]
    usable = [precision for precision in order if precision in profile.precisions] or list(order[:1])
    if wanted is not None and wanted not in profile.precisions:
        known = ", ".join(precision.value for precision in profile.precisions)
        raise Unsupported(f"{profile.name} does not compute in {wanted.value}; it has {known}")
    left = [
        precision for precision in ([wanted] if wanted is not None else usable) if options.kv_cache in (None, precision)
    ]
    if not left:
        raise Unsupported(
            f"a KV cache in {options.kv_cache}: with static shapes it is in the activations' format, "
            f"{' or '.join(usable)}"
        )
    return [[NumericalClass(precision, precision) for precision in left]]
