"""ONNX Runtime's own: what its graph computes, which provider runs it, what its KV memory costs."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from adapters import registry
from adapters.contract import AdapterUnavailable, LoadOptions, Precision, Segment, Unsupported, silent
from adapters.device_check import check_device
from adapters.hardware import processor, runtime_version
from adapters.invariance import find_variance
from adapters.kv_memory import KvMemory, block_tokens
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from device_profiles.profile import Exactness
from tests.support import tiny_models
from tests.support.model_rows import loads_models
from tests.support.tiny_gguf import Tiny, logits, write

ADAPTER = registry.get("onnx_rt")
MODELS = {
    "llama": Tiny("llama"),
    "llama-tied-q8": Tiny("llama", tied=True, kind=Kind.Q8_0),
    "llama-q4-rope-factors": Tiny("llama", kind=Kind.Q4_0, rope_factors=True),
    "llama-wide-head": Tiny("llama", heads=3, kv_heads=1, head_dim=48),
    "qwen2": Tiny("qwen2", bias=True, kind=Kind.Q8_0),
    "qwen2-f32": Tiny("qwen2", bias=True, tied=True),
    "qwen3": Tiny("qwen3", qk_norm=True, tied=True),
    "qwen3-q8": Tiny("qwen3", qk_norm=True, kind=Kind.Q8_0),
}


def prepare_tiny(directory: Path, tiny: Tiny) -> tuple[Path, dict[str, np.ndarray]]:
    source, target = directory / "tiny.gguf", directory / "prepared"
    arrays = write(source, tiny)
    target.mkdir()
    ADAPTER.prepare(source, target, silent)
    return target, arrays


@loads_models("onnx_rt", "GGUF", {shape.family for shape in MODELS.values()})
@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_a_tiny_model_computes_what_the_reference_computes(tmp_path, tiny):
    target, arrays = prepare_tiny(tmp_path, tiny)
    model = ADAPTER.load(target, LoadOptions(slots=4, kv_cache_bytes=8 << 20), silent)
    tokens = [(5 * i * i + 3 * i + 1) % tiny.vocabulary for i in range(40)]
    expected = logits(tiny, arrays, tokens)
    model.forward([Segment(1, 0, tokens[:30], (0, 0))])
    rows = model.forward([Segment(1, 30, tokens[30:], (0, 10))]).logits
    # Products of quantised weights quantise their input to 8 bits too; the rest is float32.
    tolerance = 1e-4 if tiny.kind is Kind.F32 else 0.05
    assert np.abs(rows - expected[30:]).max() <= tolerance * np.abs(expected).max()
    if tiny.kind is Kind.F32:
        assert np.array_equal(rows.argmax(axis=1), expected[30:].argmax(axis=1))
    # With AVX2 alone, 4 bits without zeros have other bits for single rows: loading finds that, and refuses the class.
    if tiny.kind is not Kind.Q4_0 or platform.machine() != "x86_64" or "avx512f" in processor().isa:
        assert (find_variance(model) == "") is model.capabilities.row_invariant
    model.close()


def test_activations_that_its_graph_does_not_have_are_refused(tmp_path):
    target, _ = prepare_tiny(tmp_path, MODELS["llama"])
    with pytest.raises(Unsupported, match="bf16"):
        ADAPTER.load(target, LoadOptions(activations=Precision.BF16), silent)


def test_the_device_that_is_stated_is_the_one_that_the_session_took(tmp_path):
    target, _ = prepare_tiny(tmp_path, MODELS["llama"])
    model = ADAPTER.load(target, LoadOptions(slots=1, kv_cache_bytes=1 << 20), silent)
    assert model.capabilities.device == "CPU"
    assert [device.name for device in ADAPTER.devices()] == ["CPU"]
    assert model.capabilities.weights == "fp32"
    model.close()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "cuda: onnx_rt runs on processors alone: set adapter: torch_device, or llama_cpp"),
        ("CUDA:1", "set adapter: torch_device"),
        ("DirectML:0", r"set adapter: llama_cpp with a library for it \(docs/gpus\.md\)"),
        ("OpenVINO:GPU", "set adapter: llama_cpp"),
        ("MIGraphX", "set adapter: llama_cpp"),
        ("QNN", "an Intel NPU is adapter openvino_rt's"),
        ("NPU9", "an Intel NPU is adapter openvino_rt's"),
        ("CPU:1", "CPU has one device"),
    ],
)
def test_other_devices_than_the_processor_are_refused_with_the_way_out(tmp_path, monkeypatch, device, message):
    """Where ONNX Runtime has a provider for them, too."""
    names = ["CUDAExecutionProvider", "DmlExecutionProvider", "QNNExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: names)
    assert [device.name for device in ADAPTER.devices()] == ["CPU"]
    with pytest.raises(Unsupported, match=message):
        ADAPTER.load(tmp_path, LoadOptions(device=device), silent)
    if device != "CPU:1":
        with pytest.raises(Unsupported, match=message):
            check_device("onnx_rt", device)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("missing", ["onnxruntime", "onnx"])
def test_a_missing_library_is_answered_with_the_install_command(tmp_path, monkeypatch, missing):
    target, _ = prepare_tiny(tmp_path, MODELS["llama"])

    def version(name: str) -> str:
        if name == missing:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("adapters.builds.version", version)
    prepare = functools.partial(ADAPTER.prepare, tmp_path / "tiny.gguf", tmp_path / "other", silent)
    load = functools.partial(ADAPTER.load, target, LoadOptions(), silent)
    needing = prepare if missing == "onnx" else load
    with pytest.raises(AdapterUnavailable, match=r"outrider extras install onnx"):
        needing()


def cache_of(memory: KvMemory, cache: int, slot: int) -> np.ndarray:
    kind = ctypes.c_float * int(np.prod(memory.shape))
    return np.ctypeslib.as_array(kind.from_address(memory.address(cache, slot))).reshape(memory.shape)


def test_slots_see_the_blocks_that_are_placed_and_share_them():
    memory = KvMemory(caches=3, slots=4, kv_heads=2, head_dim=32, block=32, blocks=16, slot_blocks=10)
    assert memory.shape == (2, 320, 32)
    before = resident_bytes()
    memory.place(0, [5, 6, 7, 2])
    first, other = cache_of(memory, 2, 0), cache_of(memory, 2, 3)
    first[:, :128] = np.arange(128)[None, :, None]
    memory.place(3, [2, 6])
    assert (other[:, :32, 0] == np.arange(96, 128)).all()  # block 2 is the first one's fourth
    assert (other[:, 32:64, 0] == np.arange(32, 64)).all()
    memory.place(3, [2, 6, 9])
    other[:, 64:96] = 7.0
    assert (first[:, :128, 0] == np.arange(128)).all()
    memory.clear(0)
    assert (first == 0.0).all()
    memory.place(0, [9, 5])
    assert (first[:, :32] == 7.0).all()
    assert (first[:, 32:64, 0] == np.arange(32)).all()
    assert resident_bytes() - before < 4 << 20
    memory.close()
    memory.close()


def test_kv_memory_never_exceeds_the_pool():
    """Sixteen slots of four thousand positions, one after the other, in the memory of one."""
    block = 64
    memory = KvMemory(caches=8, slots=16, kv_heads=4, head_dim=64, block=block, blocks=64, slot_blocks=64)
    before, pool_bytes = resident_bytes(), 8 * 4 * 64 * block * 64 * 4
    for slot in range(16):
        memory.place(slot, list(range(64)))
        for cache in range(8):
            cache_of(memory, cache, slot)[:] = 1.0
        memory.clear(slot)
    assert resident_bytes() - before <= 1.1 * pool_bytes
    memory.close()


@pytest.mark.parametrize(
    ("head_bytes", "budget_bytes", "expected"),
    [(256, 1 << 26, 32), (64, 1 << 20, 64), (192, 1 << 20, 64), (512, 1 << 28, 32), (256, 1 << 30, 128)],
)
def test_a_block_is_whole_pages_and_a_pool_is_not_too_many_pieces(head_bytes, budget_bytes, expected):
    assert block_tokens(head_bytes, budget_bytes) == expected
    assert block_tokens(head_bytes, budget_bytes) * head_bytes % 4096 == 0


def test_the_kv_budget_bounds_what_slots_can_hold(tmp_path):
    target, _ = prepare_tiny(tmp_path, MODELS["llama"])
    model = ADAPTER.load(target, LoadOptions(slots=8, kv_cache_bytes=1 << 20, max_batch_rows=256), silent)
    caps, spec = model.capabilities, model.spec
    assert caps.total_blocks * caps.block_tokens * spec.bytes_per_token <= 1 << 20
    model.close()


def test_kernel_exactness_decodes_several_sequences_as_bit_does(tmp_path):
    """Choices agree on float32 weights, though the last bits may not; order and gaps of slots do not matter."""
    target, arrays = prepare_tiny(tmp_path, MODELS["llama"])
    texts = {slot: [(7 * slot + 5 * i) % 64 for i in range(10 + slot)] for slot in (5, 1, 2, 0, 7)}
    options = LoadOptions(slots=8, kv_cache_bytes=8 << 20, exactness=Exactness.KERNEL)
    model = ADAPTER.load(target, options, silent)
    for slot, text in texts.items():
        model.forward([Segment(slot, 0, text[:-1], (0, 0))])
    batch = [Segment(slot, len(text) - 1, text[-1:], (0, 1)) for slot, text in texts.items()]
    rows = model.forward(batch).logits
    for row, text in zip(rows, texts.values(), strict=True):
        expected = logits(MODELS["llama"], arrays, text)[-1]
        assert np.abs(row - expected).max() <= 1e-4 * np.abs(expected).max()
    model.close()


def test_no_length_of_a_prompt_leaves_a_row_alone_in_the_attentions_last_block(tmp_path, store_root):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3", head_dim=32)  # blocks of 64 rows
    adapter = registry.get("onnx_rt")
    prepared = ModelStore(store_root).prepare(resolve(str(directory), Path()), adapter, silent)
    options = LoadOptions(kv_cache_bytes=32 << 20, slots=2, max_batch_rows=256)
    model = adapter.load(prepared, options, silent)
    tokens = [int(token) for token in np.random.default_rng(2).integers(4, 250, 200)]
    whole = model.forward([Segment(0, 0, tokens, (0, 200))]).logits.copy()
    for length in (2, 3, 31, 33, 63, 64, 65, 66, 127, 129, 193):
        model.release(0)
        logits = model.forward([Segment(0, 0, tokens[:length], (0, length))]).logits
        assert np.array_equal(logits.view(np.uint32), whole[:length].view(np.uint32)), length
    model.close()


def test_another_build_of_onnx_runtime_is_its_runtime_too(tmp_path, monkeypatch):
    """Devices that onnxruntime-gpu sees are known by its version: nothing says that ONNX Runtime is not installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(AdapterUnavailable, match="onnxruntime is not installed: it is the runtime of onnx_rt"):
        runtime_version("onnx_rt")
    metadata = tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    assert runtime_version("onnx_rt") == "onnxruntime-gpu 1.31.1"
