"""ONNX Runtime: prepare a model as a graph of ours, load it onto the execution provider that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.builds import find_build
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
from adapters.device_memory import read_host_memory
from adapters.failures import classify_failure
from adapters.hf_directory import is_genai
from adapters.onnx_rt.genai import find_linked_weights, link_genai, refuse_part
from adapters.onnx_rt.graph import MODEL_FILE, keep_layers, write_graph
from adapters.onnx_rt.model import CacheShape, OrtModel
from adapters.onnx_rt.providers import FATAL, PROVIDER, check_device_name
from adapters.pooled import choose_min_rows
from adapters.prepared_facts import facts_of, model_spec, read_facts, write_facts
from adapters.rates import Product, measure_rates
from adapters.source_meter import SourceMeter, say_bytes
from device_profiles.measured import DeviceRates
from device_profiles.memory import MemoryCosts
from device_profiles.numerical_class import FIXED_WIDTH
from device_profiles.profile import DRAFT, FAST, DeviceProfile, Exactness, WeightsFormat
from device_profiles.units import MIB

_OPSET = 17
_EXACT_HEAD_DIM = 128
"""Measured (ADR 0008): with larger heads a row's bits depend on how many rows are in the call."""
INSTALL = "outrider extras install onnx"
# Weights are read once, those of an embedding as they are looked up. Buffers of a forward are not shared among layers.
# ADR 0157.
_CPU_MEMORY = MemoryCosts(
    fixed_bytes=30 * MIB,
    layer_bytes=800_000,
    weights_copies=1,
    embedding_copies=0,
    tied_copies=0.4,
    logits_copies=1,
    mlp_floats=10,
    hidden_floats=20,
)
_GROUP = 32
"""MatMulNBits quantises activations in the groups that the weights have, all of them here of 32. ADR 0008."""
# ADR 0008: 7 % faster than 20 in a decode loop; beside three times the load of the cores 25 ms and not 39 without a
# bound.
_SPIN_US = 200
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def measure_onnx_rates(runtime: Any, device: str, threads: int) -> DeviceRates:
    """Measure a device in float32, the format of our graphs' activations. Raises Unsupported."""
    check_device_name(device, runtime.get_available_providers())
    return measure_rates([Precision.FP32], lambda *shape: _product(runtime, threads, *shape[:3]))


def _product(runtime: Any, threads: int, rows: int, inner: int, columns: int) -> Product:
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(1)
    weights = numpy_helper.from_array(rng.standard_normal((inner, columns), np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["left", "weights"], ["out"])],
        "product",
        [helper.make_tensor_value_info("left", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [rows, columns])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    settings = runtime.SessionOptions()
    settings.log_severity_level = FATAL
    settings.intra_op_num_threads = threads
    session = runtime.InferenceSession(model.SerializeToString(), settings, providers=[PROVIDER])
    inputs = {"left": rng.standard_normal((rows, inner), np.float32)}

    def run() -> None:
        session.run(["out"], inputs)

    return run


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise AdapterUnavailable(f"ONNX Runtime is not installed: {INSTALL}") from None
    return onnxruntime


def list_providers() -> list[str]:
    """Return the execution providers of the installed ONNX Runtime, by its names. Raises AdapterUnavailable."""
    return list(_runtime().get_available_providers())


def _require_package(name: str) -> str:
    build = find_build(name)
    if build is None:
        raise AdapterUnavailable(f"{name} is not installed: {INSTALL}")
    return " ".join(build)


class OnnxRuntimeAdapter:
    """See the module and the contract."""

    name = "onnx_rt"

    def devices(self) -> list[DeviceProfile]:
        """Return the processor, where the installed ONNX Runtime has a provider for it. Raises AdapterUnavailable."""
        runtime = _runtime()
        device = DeviceProfile(
            adapter=self.name,
            name="CPU",
            kind="cpu",
            full_name=f"CPU execution provider of onnxruntime {runtime.__version__}",
            memory_bytes=read_host_memory().total_bytes,
            in_host_memory=True,
            precisions=(Precision.FP32,),
            weights=(Precision.FP32, Precision.INT8, Precision.INT4),
            kv_cache=(Precision.FP32,),
            exact_kv_cache=(Precision.FP32,),
            memory_costs=_CPU_MEMORY,
        )
        return [device] if PROVIDER in runtime.get_available_providers() else []

    def rates(self, device: str, threads: int) -> DeviceRates:
        """See adapters/rates.py. Raises AdapterUnavailable, Unsupported."""

        _require_package("onnx")
        return measure_onnx_rates(_runtime(), device, threads)

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        if options.activations not in (None, Precision.FP32):
            raise Unsupported(f"activations {options.activations}: on ONNX Runtime they are fp32; leave them at auto")
        if options.kv_cache not in (None, Precision.FP32):
            raise Unsupported(f"a KV cache in {options.kv_cache}: ONNX Runtime's is fp32; leave it at auto")
        rows = choose_min_rows(options.exactness)
        as_they_come = NumericalClass(Precision.FP32, Precision.FP32, _GROUP, segment_rows=rows, forward_rows=rows)
        if options.exactness is not Exactness.BIT:
            return [[as_they_come]]
        return [[as_they_come], [NumericalClass(Precision.FP32, Precision.FP32, _GROUP, fixed_width=FIXED_WIDTH)]]

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the graph's format and the library that writes it. Raises AdapterUnavailable, Unsupported."""
        libraries = f"{_require_package('onnx')}; {_require_package('gguf')}"
        if weights is None:
            return f"decoder graph, the file's values, int8 activations, 3; {libraries}"
        if weights == DRAFT:
            raise Unsupported(f"weights in {DRAFT}: ONNX Runtime has none; leave weights at auto")
        if weights == FAST:
            return f"decoder graph, whole zeros, int8 activations, 1; {libraries}"
        return f"decoder graph, {weights} weights, int8 activations, 2; {libraries}; {_require_package('onnxruntime')}"

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Write the graph and its weights, tensor by tensor; goes on with what an earlier call left.

        Raises ModelRefused, AdapterUnavailable.
        """
        from adapters.decoder.source import open_source
        from adapters.onnx_rt.quantize import QuantizedOnnxWeights

        _require_package("onnx")
        if weights is None and is_genai(source):
            link_genai(source, target)
            return
        if weights in (Precision.BF16, Precision.FP16, Precision.FP8):
            raise Unsupported(
                f"weights in {weights}: ONNX Runtime computes in fp32 on a CPU; ask for fp32, int8 or int4"
            )
        name = f"{source.name} to {weights}" if weights else source.name
        stage = f"convert {name}"
        progress(stage, -1.0)
        meter = SourceMeter(source, say_bytes(progress, stage))
        opened = open_source(source, weights, meter.note)
        if weights in (Precision.INT4, Precision.INT8):
            opened = QuantizedOnnxWeights(opened, 4 if weights is Precision.INT4 else 8)
        write_graph(opened, target, meter)
        facts = facts_of(opened, source)
        if opened.label in ("bf16", "fp16"):
            facts["weights"] = f"fp32 (from {opened.label})"  # what the graph holds
        write_facts(target, facts)
        progress(stage, 1.0)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> OrtModel:
        check_device_name(options.device, _runtime().get_available_providers())  # said first
        return self.load_layers(prepared, options, LayerRange(0, read_facts(prepared)["layers"]), progress)

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> OrtModel:
        check_device_name(options.device, _runtime().get_available_providers())
        chosen = options.numerical_class or self.classes(options)[0][0]
        facts = read_facts(prepared)
        check_layers(layers, facts["layers"])
        refuse_part(facts, layers)
        as_they_come = options.exactness is Exactness.BIT and not chosen.fixed_width
        if as_they_come and facts["head_dim"] > _EXACT_HEAD_DIM:
            raise Unsupported(
                f"heads of {facts['head_dim']} elements: ONNX Runtime's attention does not keep their rows' bits. "
                "Set exactness: kernel, or adapter: openvino_rt"
            )
        progress("load", 0.0)
        part, weights = (layers, facts["layers"]), find_linked_weights(prepared, facts)
        session = self._session(prepared / MODEL_FILE, options, part, weights)
        progress("load", 0.9)
        cache = CacheShape(layers, facts["kv_heads"], facts["head_dim"])
        model = OrtModel(
            session,
            model_spec(facts, cache.bytes_per_token),
            options,
            chosen,
            cache=cache,
            weights=facts["weights"],
            device=options.device,
        )
        progress("load", 1.0)
        return model

    def _session(
        self,
        path: Path,
        options: LoadOptions,
        kept: tuple[LayerRange, int],
        linked: Path | None,
    ) -> Any:
        runtime = _runtime()
        settings = runtime.SessionOptions()
        settings.log_severity_level = FATAL
        settings.intra_op_num_threads = options.threads
        # Threads that spin for long take the core from the one they wait for, as soon as anything else runs here.
        settings.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        layers, count = kept
        graph: str | bytes = str(path)
        if linked is not None:  # a link out of the graph's own directory is refused
            settings.add_session_config_entry(_WEIGHTS_FOLDER, str(linked))
            graph = path.read_bytes()
        if layers != LayerRange(0, count):
            _require_package("onnx")
            settings.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
            graph = keep_layers(path, layers, count)
        try:
            return runtime.InferenceSession(graph, settings, providers=[PROVIDER])
        except Exception as error:  # the runtime's errors have no other root
            failure = classify_failure(error, "ONNX Runtime", last_line=True)
            if not isinstance(failure, RuntimeFailed):
                raise failure from error
            reason = str(error).strip().splitlines()[-1]
            raise ModelRefused(f"ONNX Runtime cannot run {path.parent.name} on {options.device}: {reason}") from error
