"""Graphs of fixed shape: what they compute, which widths they are run in, what they are made of, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from adapters import registry
from adapters.contract import LoadOptions, Precision, Segment, StaticShapes, Unsupported, silent
from adapters.decoder.eight_bits import eight_bits
from adapters.decoder.source import open_source
from adapters.decoder.spec import Dense, Grouped
from adapters.invariance import find_variance
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.openvino_rt.static_adapter import StaticOpenVinoAdapter
from adapters.openvino_rt.static_graphs import Compiler, plan_shapes
from adapters.openvino_rt.static_model import Cover, StaticModel, agreeing, list_starts
from device_profiles.profile import Exactness
from tests.support import reference_decoder, tiny_gguf, tiny_models

ON = StaticShapes(on=True, prefill_rows=32, verify_rows=(1, 4))
FACTS = {"layers": 4, "kv_heads": 2, "head_dim": 32, "context_length": 512}
POSITION_BYTES = 4 * 2 * 2 * 32 * 2  # layers, keys and values, heads, head size, bytes
TAKEN = {"Add", "Concat", "Constant", "Convert", "Divide", "Gelu", "MatMul", "Multiply", "Parameter", "Power"}
TAKEN |= {"ReduceMean", "Reshape", "Result", "ScatterUpdate", "Softmax", "Sqrt", "Swish", "Tanh", "Transpose"}
TAKEN |= {"VariadicSplit"}


def load(source: Path, store: Path, *, prepared_for: str = "CPU", **options) -> StaticModel:
    adapter = StaticOpenVinoAdapter(prepared_for)
    prepared = ModelStore(store).prepare(resolve(str(source), Path()), adapter, silent)
    chosen: dict[str, Any] = {
        "activations": Precision.FP32,
        "kv_cache_bytes": 32 << 20,
        "slots": 4,
        "max_batch_rows": 128,
    }
    return adapter.load(prepared, LoadOptions(**(chosen | {"static": ON} | options)), silent)


def tokens(count: int, most: int = 260) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(4, most, count)]


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_logits_are_those_of_the_formulas(tmp_path, shared_store, name):
    directory = tiny_models.write_model(tmp_path / name, name, kind="BF16")
    expected = reference_decoder.logits(open_source(directory), tokens(90))
    model = load(directory, shared_store)
    first = model.forward([Segment(0, 0, tokens(90)[:70], (0, 70))]).logits.copy()
    rest = model.forward([Segment(1, 0, tokens(9), (0, 0)), Segment(0, 70, tokens(90)[70:], (0, 20))]).logits
    assert np.sqrt(np.mean((np.concatenate([first, rest]) - expected) ** 2)) < 0.001 * expected.std()
    assert model.capabilities.static_widths == (1, 4, 32)  # all of them agree on CPU
    assert model.capabilities.min_rows == 1
    assert find_variance(model) == ""
    model.close()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.F32])
def test_weights_that_are_prepared_for_an_npu_compute_the_same_in_8_bits(tmp_path, shared_store, kind):
    source = tmp_path / "tiny.gguf"
    tiny_gguf.write(source, tiny_gguf.Tiny("llama", kind=kind))
    own = load(source, shared_store)
    eight = load(source, shared_store, prepared_for="NPU")
    rows = [model.forward([Segment(0, 0, tokens(40, 64), (0, 40))]).logits for model in (own, eight)]
    error = np.sqrt(np.mean((rows[0] - rows[1]) ** 2)) / rows[0].std()
    # Products with quantised weights quantise their input to 8 bits as well; float32 weights do not.
    assert error < (0.06 if kind is Kind.F32 else 0.01)
    assert eight.capabilities.weights == f"int8 (from {own.capabilities.weights})"
    own.close()
    eight.close()


def test_4_bit_groups_are_the_same_numbers_in_8_bits():
    rng = np.random.default_rng(0)
    groups = Grouped(
        rng.integers(0, 16, (6, 64)).astype(np.uint8),
        rng.standard_normal((6, 2)).astype(np.float16),
        rng.integers(0, 16, (6, 2)).astype(np.uint8),
        4,
        32,
    )
    tensor = eight_bits(groups)
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 8
    assert np.array_equal(tensor.float32(), groups.float32())
    vector = Dense(np.ones(64, np.float32))
    assert eight_bits(vector) is vector


def test_a_graph_for_an_npu_has_fixed_shapes_signed_weights_and_plain_operations(tmp_path, shared_store, monkeypatch):
    source = tiny_models.write_model(tmp_path / "gemma3", "gemma3", kind="BF16")
    adapter = StaticOpenVinoAdapter("NPU")
    prepared = ModelStore(shared_store).prepare(resolve(str(source), Path()), adapter, silent)
    plan = plan_shapes(LoadOptions(static=ON, slots=1), FACTS, Precision.FP16)
    compiler = Compiler(openvino.Core(), prepared, "CPU", {"INFERENCE_PRECISION_HINT": "f16"}, plan.cache)
    seen: list[openvino.Model] = []
    compile_model = compiler._compile

    def note_compilation(model: openvino.Model) -> Any:
        seen.append(model)
        return compile_model(model)

    monkeypatch.setattr(compiler, "_compile", note_compilation)
    compiler.body(8)
    compiler.head(4)
    for model in seen:
        nodes = model.get_ops()
        assert not any(output.get_partial_shape().is_dynamic for node in nodes for output in node.outputs())
        assert {node.get_type_name() for node in nodes} <= TAKEN
        matrices = [
            node
            for node in nodes
            if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) == 3 and node.get_output_size()
        ]
        stored = {node.get_element_type().to_string() for node in matrices if min(node.get_output_shape(0)) > 1}
        assert stored <= {"i8", "f16"}
        assert "i8" in stored
    assert [port.get_element_type().to_string() for port in seen[0].inputs if port.any_name == "past.0.key"] == ["f16"]


def test_a_device_that_needs_static_shapes_gets_them_and_others_when_asked(tmp_path):
    assert isinstance(registry.get_for("openvino_rt", "NPU", StaticShapes()), StaticOpenVinoAdapter)
    assert isinstance(registry.get_for("openvino_rt", "NPU.1", StaticShapes()), StaticOpenVinoAdapter)
    assert isinstance(registry.get_for("openvino_rt", "CPU", StaticShapes(on=True)), StaticOpenVinoAdapter)
    for device in ("CPU", "GPU", "GPU.0"):
        assert not isinstance(registry.get_for("openvino_rt", device, StaticShapes()), StaticOpenVinoAdapter)
    with pytest.raises(Unsupported, match=r"onnx_rt has no static shapes; openvino_rt has them"):
        registry.get_for("onnx_rt", "CPU", StaticShapes(on=True))
    with pytest.raises(Unsupported, match=r"no device 'NPU' here; there is .*CPU"):
        registry.get_for("openvino_rt", "NPU", StaticShapes()).load(tmp_path, LoadOptions(device="NPU"), silent)


@pytest.mark.parametrize(
    ("static", "kv_tokens", "expected"),
    [
        (StaticShapes(), 10_000, 512),  # the model's context
        (StaticShapes(), 200, 192),  # the pool, in whole blocks
        (StaticShapes(context_tokens=100), 10_000, 100),
    ],
)
def test_the_context_is_what_model_and_cache_hold_or_what_is_asked_for(static, kv_tokens, expected):
    options = LoadOptions(static=static, slots=3, kv_cache_bytes=kv_tokens * POSITION_BYTES)
    plan = plan_shapes(options, FACTS, Precision.BF16)
    assert plan.context_tokens == expected
    assert plan.cache.capacity > expected  # one position for padding
    assert plan.cache.capacity % plan.cache.block == 0
    held = plan.cache.blocks * plan.cache.block
    assert held <= kv_tokens
    assert held < 3 * (expected + plan.cache.block)  # no more than the slots can use
    assert max(plan.widths) <= expected


@pytest.mark.parametrize(
    ("static", "kv_tokens", "message"),
    [
        (StaticShapes(context_tokens=600), 10_000, "600 is more than the model's context of 512"),
        (StaticShapes(context_tokens=500), 200, r"500 is more than the 192 positions .*kv_cache at least"),
        (StaticShapes(), 20, "holds no block of 64 positions; give limits.kv_cache at least"),
        (StaticShapes(verify_rows=()), 10_000, "verify_rows"),
        (StaticShapes(prefill_rows=0), 10_000, "prefill_rows"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(static, kv_tokens, message):
    with pytest.raises(Unsupported, match=message):
        plan_shapes(LoadOptions(static=static, kv_cache_bytes=kv_tokens * POSITION_BYTES), FACTS, Precision.BF16)


def test_kernel_exactness_keeps_every_width_and_says_so(tmp_path, shared_store):
    source = tiny_models.write_model(tmp_path / "llama", "llama", kind="BF16")
    static = StaticShapes(on=True, prefill_rows=16, verify_rows=(5, 2))
    model = load(source, shared_store, static=static, exactness=Exactness.KERNEL)
    assert model.capabilities.static_widths == (2, 5, 16)
    assert model.capabilities.min_rows == 2
    assert not model.capabilities.row_invariant
    model.close()


@given(
    costs=st.dictionaries(st.integers(1, 40), st.floats(0.5, 50.0), min_size=1, max_size=4), rows=st.integers(0, 120)
)
def test_rows_are_covered_by_the_cheapest_widths(costs, rows):
    chosen = Cover(costs).of(rows)
    assert sum(chosen) >= rows
    spent = sum(costs[width] for width in chosen)
    for width, cost in costs.items():
        assert spent <= -(-rows // width) * cost + 1e-6
    assert chosen == sorted(chosen, reverse=True)


def rows_of(*values: int) -> np.ndarray:
    return np.array([values], np.uint32)


def test_only_widths_that_agree_are_kept():
    rows, other = rows_of(1, 2), rows_of(1, 3)
    assert agreeing({1: [rows, rows], 4: [rows], 8: [other]}, 8) == (1, 4)
    assert agreeing({1: [rows], 4: [other], 128: [other]}, 128) == (4, 128)
    assert agreeing({1: [rows], 128: [other]}, 128) == (128,)
    assert agreeing({4: [rows, other], 8: [rows]}, 8) == (8,)  # 4 depends on where a row stands
    assert agreeing({4: [rows, other]}, 128) == ()


@given(st.integers(1, 12), st.integers(0, 140), st.integers(1, 140))
def test_sampled_rows_stand_at_other_places_of_a_forward(count, before, width):
    length = before + count
    cuts = list_starts(length, count, width)
    stands = []
    for starts in cuts:
        ends = [*starts[1:], length]
        assert all(0 < end - start <= width for start, end in zip(starts, ends, strict=True))
        assert starts[0] <= length - count
        stands.append(length - 1 - starts[-1])  # where the last row stands
    if width > 2 * count and before >= width:
        assert len(set(stands)) >= 2
        assert width - 1 in stands
