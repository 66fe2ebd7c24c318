"""ONNX Runtime's own: what its graph computes, which provider runs it, what its KV memory costs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from adapters import registry
from adapters.contract import LoadOptions, ModelRefused, Precision, Segment, Unsupported
from adapters.invariance import measure_row_invariance
from adapters.onnx_rt.kv_memory import KvMemory, block_tokens
from device_profiles.profile import Exactness
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


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def prepared(directory: Path, tiny: Tiny) -> tuple[Path, dict[str, np.ndarray]]:
    source, target = directory / "tiny.gguf", directory / "prepared"
    arrays = write(source, tiny)
    target.mkdir()
    ADAPTER.prepare(source, target, silent)
    return target, arrays


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_a_tiny_model_computes_what_the_reference_computes(tmp_path, tiny):
    target, arrays = prepared(tmp_path, tiny)
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
    assert measure_row_invariance(model) is model.capabilities.row_invariant
    model.close()


def test_a_sliding_window_is_refused(tmp_path):
    source = tmp_path / "windowed.gguf"
    write(source, Tiny("llama"), {"attention.sliding_window": 16})
    with pytest.raises(ModelRefused, match="sliding windows"):
        ADAPTER.prepare(source, tmp_path, silent)


def test_a_provider_that_is_not_there_is_refused_and_those_there_are_named(tmp_path):
    target, _ = prepared(tmp_path, MODELS["llama"])
    with pytest.raises(Unsupported, match=r"no execution provider for 'NPU9'; it has .*CPU"):
        ADAPTER.load(target, LoadOptions(device="NPU9"), silent)
    with pytest.raises(Unsupported, match="bf16"):
        ADAPTER.load(target, LoadOptions(activations=Precision.BF16), silent)


def test_the_device_that_is_stated_is_the_one_that_the_session_took(tmp_path):
    target, _ = prepared(tmp_path, MODELS["llama"])
    model = ADAPTER.load(target, LoadOptions(slots=1, kv_cache_bytes=1 << 20), silent)
    assert model.capabilities.device == "CPU"
    assert [device.name for device in ADAPTER.devices()] == ["CPU"]
    assert model.capabilities.weights == "fp32"
    model.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def cache_of(memory: KvMemory, cache: int, slot: int) -> np.ndarray:
    kind = ctypes.c_float * int(np.prod(memory.shape))
    return np.ctypeslib.as_array(kind.from_address(memory.address(cache, slot))).reshape(memory.shape)


def test_kv_memory_is_taken_when_it_is_written_and_given_back_on_release():
    caches, positions = 8, 4096
    memory = KvMemory(caches, slots=16, kv_heads=4, capacity=positions, head_dim=64)
    before = resident_bytes()
    for cache in range(caches):
        view = cache_of(memory, cache, 3)
        assert view.shape == (4, positions, 64)
        view[:, : positions // 2] = 1.0
    written = caches * 4 * (positions // 2) * 64 * 4
    assert 0.9 * written <= resident_bytes() - before <= 1.1 * written
    memory.drop(3, positions // 2)
    assert resident_bytes() - before <= 0.1 * written
    assert (cache_of(memory, 0, 3) == 0.0).all()
    memory.close()


@pytest.mark.parametrize(("head_bytes", "expected"), [(256, 32), (64, 64), (192, 64), (512, 32), (16, 256)])
def test_a_block_is_a_whole_number_of_pages(head_bytes, expected):
    assert block_tokens(head_bytes) == expected
    assert block_tokens(head_bytes) * head_bytes % 4096 == 0


def test_the_kv_budget_bounds_what_slots_can_hold(tmp_path):
    target, _ = prepared(tmp_path, MODELS["llama"])
    model = ADAPTER.load(target, LoadOptions(slots=8, kv_cache_bytes=1 << 20, max_batch_rows=256), silent)
    caps, spec = model.capabilities, model.spec
    assert caps.total_blocks * caps.block_tokens * spec.bytes_per_token <= 1 << 20
    model.close()


def test_kernel_exactness_decodes_several_sequences_as_bit_does(tmp_path):
    """Choices agree on float32 weights, though the last bits may not; order and gaps of slots do not matter."""
    target, arrays = prepared(tmp_path, MODELS["llama"])
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
