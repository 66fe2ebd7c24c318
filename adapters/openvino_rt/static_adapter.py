"""OpenVINO with graphs of fixed shape: for NPUs, which take nothing else, and with the same graphs on CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.contract import LoadOptions, Precision, Progress, Unsupported
from adapters.hf_directory import title
from adapters.openvino_rt.adapter import HINTS, core_with, device_profile, devices
from adapters.openvino_rt.static_graphs import Compiler
from adapters.openvino_rt.static_model import StaticModel
from adapters.openvino_rt.static_plan import planned
from adapters.prepared_facts import facts_of, model_spec, read_facts, write_facts
from device_profiles.profile import DeviceProfile

_CPU = "CPU"
_FORMAT = 1


class StaticOpenVinoAdapter:
    """See the module and the contract. For `device` CPU, weights are prepared as the file has them or in 8 bits; for
    all others in 8 bits, which every NPU computes with."""

    name = "openvino_rt"

    def __init__(self, device: str) -> None:
        self._eight_bits = device != _CPU

    def devices(self) -> list[DeviceProfile]:
        """List OpenVINO's devices. Raises AdapterUnavailable."""
        return [
            replace(found, weights=(Precision.INT8,), kv_cache=(), exact_kv_cache=(), memory_costs=None)
            for found in devices()
        ]

    def recipe(self, weights: Precision | None = None) -> str:
        """Name the graphs' format and the library that writes them."""
        name = "int8" if self._in_eight_bits(weights) else "own"
        return f"static graphs, {name} weights, {_FORMAT}; openvino {version('openvino')}"

    def _in_eight_bits(self, weights: Precision | None) -> bool:
        if weights not in (None, Precision.INT8):
            raise Unsupported(f"weights in {weights}: with static shapes they are as_file or int8")
        return self._eight_bits or weights is Precision.INT8

    def prepare(self, source: Path, target: Path, progress: Progress, weights: Precision | None = None) -> None:
        """Write the graphs, from our own reader of the file. Raises ModelRefused, AdapterUnavailable."""
        from adapters.decoder.eight_bits import EightBitWeights
        from adapters.decoder.source import open_source
        from adapters.openvino_rt.static_build import write_static

        progress(f"convert {title(source)}", -1.0)
        opened = open_source(source)
        chosen = EightBitWeights(opened) if self._in_eight_bits(weights) else opened
        write_static(chosen, target)
        write_facts(target, facts_of(chosen, source))
        progress(f"convert {title(source)}", 1.0)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> StaticModel:
        """See the contract."""
        core = core_with(options.device)
        facts = read_facts(prepared)
        profile = device_profile(core, options.device)
        activations = _activations(profile, options.activations)
        plan = planned(options, facts, activations)
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
            activations=activations,
            progress=lambda done: progress("load", 0.9 * done),
        )
        progress("load", 1.0)
        return model


def _activations(profile: DeviceProfile, asked: Precision | None) -> Precision:
    """Return the number format of activations: what the device computes fastest where none is asked for."""
    if asked is not None:
        if asked not in profile.precisions:
            known = ", ".join(precision.value for precision in profile.precisions)
            raise Unsupported(f"{profile.name} does not compute in {asked.value}; it has {known}")
        return asked
    order = (Precision.BF16, Precision.FP32) if profile.name == _CPU else (Precision.FP16, Precision.FP32)
    return next((precision for precision in order if precision in profile.precisions), order[0])
