"""The OpenVINO runtime: prepare a GGUF file or a Hugging Face directory, load it as a paged-attention model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from adapters.artefact import find_beside, list_kept
from adapters.contract import (
    AdapterUnavailable,
    LayerRange,
    LoadOptions,
    ModelRefused,
    NumericalClass,
    Precision,
    Progress,
    RuntimeFailed,
    Unsupported,
    check_layers,
)
from adapters.conversion_process import run_conversion
from adapters.device_memory import read_openvino_memory
from adapters.hardware import processor
from adapters.hf_directory import title
from adapters.ir_facts import IR_IS_WHOLE
from adapters.openvino_rt.classes import HINTS, KV_HINTS, effective_class, list_numerical_classes
from adapters.openvino_rt.convert import MODEL_FILE, WEIGHTS_FILE
from adapters.openvino_rt.failures import FAILURES, classify_openvino_failure
from adapters.openvino_rt.model import PagedModel
from adapters.prepared_facts import READER, model_spec, read_facts, write_facts
from adapters.rates import Product, measure_rates
from device_profiles.device_names import find_device_name, is_processor, split_device
from device_profiles.measured import DeviceRates
from device_profiles.memory import MemoryCosts
from device_profiles.profile import DeviceProfile, WeightsFormat
from device_profiles.units import MIB

_KERNELS: Final = 256
"""Bounds what OpenVINO, and oneDNN in it, keep for numbers of rows that were there. ADR 0154."""
# The file is mapped and packed again; a quantised embedding is widened to 16 bits for its lookups.
CPU_MEMORY = MemoryCosts(
    fixed_bytes=54 * MIB,
    layer_bytes=4_130_000,
    weights_copies=2,
    layers_copies_16bit=1,
    embedding_copies=0,
    logits_copies=2.5,
    scores_rows=192,
    mlp_floats=2,
    hidden_floats=4,
    width_bytes=1_500_000,
)
# Of a graph's layer where there is no AMX. ADR 0148: with it two models on two processors are announced 5 and 7 % above
# what they held, and were 8 and 18 %. ADR 0157: both figures, and rows of scores, without it.
_PLAIN_LAYER_BYTES, _PLAIN_SCORES_ROWS = 2_000_000, 64
_AMX = "amx_tile"
_GPU = "gpu"
_WEIGHTS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8, Precision.INT4)
_NPU_WEIGHTS = (Precision.INT8,)
"""An NPU runs graphs of fixed shape alone, whose weights have 8 bits there (static_adapter)."""


def measure_openvino_rates(core: Any, device: str, threads: int, precisions: Sequence[Precision]) -> DeviceRates:
    """Measure a device in those of its native `precisions` that are floating-point formats."""
    formats = [precision for precision in precisions if precision in HINTS]
    return measure_rates(formats, lambda *shape: _product(core, device, threads, *shape))


def _product(
    core: Any, device: str, threads: int, rows: int, inner: int, columns: int, precision: Precision
) -> Product:
    import openvino as ov
    from openvino import opset13

    rng = np.random.default_rng(1)
    weights = opset13.constant(rng.standard_normal((inner, columns), np.float32))
    left = opset13.parameter([rows, inner], np.float32)
    model = ov.Model([opset13.matmul(left, weights, False, False)], [left])
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": HINTS[precision], "PERFORMANCE_HINT": "LATENCY"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = core.compile_model(model, device, settings).create_infer_request()
    request.set_input_tensor(ov.Tensor(rng.standard_normal((rows, inner), np.float32)))

    def run() -> None:
        request.infer()

    return run


def _core() -> Any:
    try:
        import openvino as ov
    except ImportError:
        raise AdapterUnavailable("OpenVINO is not installed: pip install openvino") from None
    return ov.Core()


def core_with(device: str) -> Any:
    """Return OpenVINO's core. Raises AdapterUnavailable, and Unsupported where it sees no such device."""
    core = _core()
    refuse_gpu(device)
    if find_device_name(device, core.available_devices) is None:
        raise Unsupported(f"OpenVINO sees no device {device!r} here; there is {', '.join(core.available_devices)}")
    return core


def refuse_gpu(device: str) -> None:
    """Raise Unsupported for a GPU: its plugin has KV caches in another layout, in memory of its own, and this adapter
    gives it those of processors."""
    if split_device(device)[0] == _GPU:
        raise Unsupported(
            f"{device}: openvino_rt is not offered on GPUs. Set adapter: llama_cpp with a library for SYCL or Vulkan "
            "(docs/gpus.md)"
        )


def list_device_names() -> list[str]:
    """Return what OpenVINO calls the devices that it sees and that this adapter runs on. Raises AdapterUnavailable."""
    return [name for name in _core().available_devices if split_device(name)[0] != _GPU]


def list_openvino_devices() -> list[DeviceProfile]:
    """List OpenVINO's devices that this adapter runs on. Raises AdapterUnavailable."""
    core = _core()
    return [device_profile(core, name) for name in list_device_names()]


def device_profile(core: Any, name: str) -> DeviceProfile:
    words = {
        "BF16": Precision.BF16,
        "FP16": Precision.FP16,
        "FP32": Precision.FP32,
        "INT8": Precision.INT8,
    }
    capabilities = core.get_property(name, "OPTIMIZATION_CAPABILITIES")
    return DeviceProfile(
        adapter=OpenVinoAdapter.name,
        name=name,
        kind=split_device(name)[0],
        full_name=str(core.get_property(name, "FULL_DEVICE_NAME")),
        memory_bytes=read_openvino_memory(core, name),
        in_host_memory=True,
        precisions=tuple(precision for word, precision in words.items() if word in capabilities),
        weights=_NPU_WEIGHTS if split_device(name)[0] == "npu" else _WEIGHTS,
        kv_cache=(Precision.BF16, Precision.FP16, Precision.INT8),
        exact_kv_cache=(Precision.BF16, Precision.FP16, Precision.INT8),
        memory_costs=_find_cpu_memory() if is_processor(name) else None,
        has_draft=is_processor(name),
    )


def _find_cpu_memory() -> MemoryCosts:
    """Return what this processor holds. Without AMX it packs no layer again, and its graph is smaller."""
    if _AMX in processor().isa:
        return CPU_MEMORY
    return replace(CPU_MEMORY, layers_copies_16bit=0, layer_bytes=_PLAIN_LAYER_BYTES, scores_rows=_PLAIN_SCORES_ROWS)


def _nncf(weights: WeightsFormat) -> str:
    """Return the version of NNCF where it is needed, else "". Raises AdapterUnavailable."""
    if weights not in (Precision.INT4, Precision.INT8):
        return ""
    try:
        return f"nncf {version('nncf')}"
    except PackageNotFoundError:
        raise AdapterUnavailable(f"{weights} weights need NNCF: outrider extras install quantize") from None


def _link_made(made: Path | None, target: Path) -> bool:
    """Let `target` have the files of a model that was converted before; False where there is none, or they cannot be
    linked. Nobody goes on with what another conversion left there: it would write into what is linked."""
    if made is None:
        return False
    facts = read_facts(made)
    for left in (*list_kept(target), target / MODEL_FILE, target / WEIGHTS_FILE):
        left.unlink(missing_ok=True)
    try:
        for name in (MODEL_FILE, WEIGHTS_FILE):
            os.link(made / name, target / name)
    except OSError:
        (target / MODEL_FILE).unlink(missing_ok=True)
        return False
    write_facts(target, facts.get(READER, facts))
    return True


class OpenVinoAdapter:
    """See the module and the contract."""

    name = "openvino_rt"

    def devices(self) -> list[DeviceProfile]:
        """List OpenVINO's devices. Raises AdapterUnavailable."""
        return list_openvino_devices()

    def rates(self, device: str, threads: int) -> DeviceRates:
        """See adapters/rates.py. Raises AdapterUnavailable, Unsupported."""

        core = core_with(device)
        return measure_openvino_rates(core, device, threads, device_profile(core, device).precisions)

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the conversion: its format and the versions of the libraries that write it."""
        libraries = "; ".join(f"{name} {version(name)}" for name in ("openvino", "gguf"))
        if weights is Precision.FP8:
            raise Unsupported("weights in fp8: OpenVINO is given none; ask for int8 or int4, or for torch on CUDA")
        if weights is None:
            return f"stateful IR, the file's values, 4; {libraries}"
        return f"stateful IR, {weights} weights, 3; {libraries}; {_nncf(weights)}".removesuffix("; ")

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Convert a model in a process of its own, or link what was converted before as a part of another artefact.
        Raises what `run_conversion` does."""
        name = f"{title(source)} to {weights}" if weights else title(source)
        if _link_made(find_beside(target, self.recipe(weights)), target):
            return
        command = [sys.executable, "-m", "adapters.openvino_rt.convert", str(source), str(target)]
        run_conversion([*command, str(weights)] if weights else command, name, progress)

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return list_numerical_classes(device_profile(core_with(options.device), options.device), options)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> PagedModel:
        return self.load_layers(prepared, options, LayerRange(0, read_facts(prepared)["layers"]), progress)

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> PagedModel:
        core = core_with(options.device)
        facts = read_facts(prepared)
        check_layers(layers, facts["layers"])
        if "linked" in facts and layers != LayerRange(0, facts["layers"]):
            raise ModelRefused(f"{facts['linked']}: {IR_IS_WHOLE}")
        chosen = options.numerical_class or self.classes(options)[0][0]
        progress("load", 0.0)
        compiled = self._compile(core, prepared / MODEL_FILE, options, chosen, (layers, facts["layers"]))
        progress("load", 0.9)
        spec = model_spec(facts, _bytes_per_token(compiled))
        model = PagedModel(
            *(compiled, spec, options, effective_class(compiled, chosen)), weights=facts["weights"], layers=layers
        )
        progress("load", 1.0)
        return model

    def _compile(
        self, core: Any, path: Path, options: LoadOptions, chosen: NumericalClass, kept: tuple[LayerRange, int]
    ) -> Any:
        from adapters.openvino_rt.graph import keep_layers, read_paged

        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": HINTS[chosen.activations],
            "KV_CACHE_PRECISION": KV_HINTS[chosen.kv_cache],
            "PERFORMANCE_HINT": "LATENCY",
        }
        if is_processor(options.device):
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = chosen.quantization_group
            settings["CPU_RUNTIME_CACHE_CAPACITY"] = str(_KERNELS)
            # Read once, at the first forward. Who lists devices keeps its environment: it tells workers apart.
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS))
            if chosen.kv_cache is Precision.INT8:
                # By channel a token that comes changes what is held of those before it, and rejected ones stay felt.
                settings["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
        if options.threads:
            settings["INFERENCE_NUM_THREADS"] = options.threads
        try:
            layers, count = kept
            graph = read_paged(path)
            if layers != LayerRange(0, count):
                graph = keep_layers(graph, layers, count)
            return core.compile_model(graph, options.device, settings)
        except FAILURES as error:
            failure = classify_openvino_failure(error)
            if not isinstance(failure, RuntimeFailed):
                raise failure from error
            reason = str(error).strip().splitlines()[-1]
            raise ModelRefused(f"OpenVINO cannot run {path.parent.name} on {options.device}: {reason}") from error


def _bytes_per_token(compiled: Any) -> int:
    caches = [port for port in compiled.inputs if "_cache." in port.any_name]
    return sum(
        port.get_partial_shape()[1].get_length()
        * port.get_partial_shape()[3].get_length()
        * port.get_element_type().size
        for port in caches
    )
