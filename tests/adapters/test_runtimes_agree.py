"""OpenVINO and ONNX Runtime hold the same weights, and choose the same tokens but for rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import registry
from adapters.contract import LoadOptions, Precision, Segment, silent
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.reference import Reference, TextCache
from adapters.decoder.spec import Grouped
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer

pytestmark = pytest.mark.model
PROMPTS = Path(__file__).parents[2] / "tools" / "prompts.jsonl"
PROMPT_COUNT, ANSWER_TOKENS = 4, 32
NEAR_TIE = 1.0  # logits; their spread is 3.5
RUNTIMES = ("openvino_rt", "onnx_rt")


@pytest.fixture(scope="module")
def prepared(default_model_path, shared_store) -> dict[str, Path]:
    store = ModelStore(shared_store)
    file = ModelSource(default_model_path, "default", str(default_model_path))
    made = {name: store.prepare(file, registry.get(name), silent) for name in RUNTIMES}
    return made | {"tokenizer": store.prepare(file, TokenizerRecipe(), silent)}


@pytest.fixture(scope="module")
def answers(prepared) -> list[tuple[int, list[int]]]:
    """Prompts with the greedy answers of one runtime, and where the answers begin: texts that a model is sure of."""
    tokenizer = Tokenizer.load(prepared["tokenizer"])
    model = registry.get("onnx_rt").load(prepared["onnx_rt"], LoadOptions(slots=1, kv_cache_bytes=64 << 20), silent)
    texts = []
    prompts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:8]]
    for prompt in sorted(prompts, key=len)[:PROMPT_COUNT]:  # numpy takes a second for ten tokens
        text = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        begin = len(text) - 1
        for _ in range(ANSWER_TOKENS):
            start = model.count_cached_positions(0)
            row = model.forward([Segment(0, start, text[start:], (len(text) - start - 1, len(text) - start))]).logits
            text.append(int(row.argmax()))
        model.release(0)
        texts.append((begin, text))
    model.close()
    return texts


@pytest.fixture(scope="module")
def rows(prepared, answers) -> dict[str, np.ndarray]:
    """Every runtime's logits over all answers, teacher-forced, activations in float32."""
    options = LoadOptions(slots=1, kv_cache_bytes=64 << 20, activations=Precision.FP32)
    logits = {}
    for name in RUNTIMES:
        model = registry.get(name).load(prepared[name], options, silent)
        made = []
        for begin, text in answers:
            made.append(model.forward([Segment(0, 0, text, (begin, len(text)))]).logits.copy())
            model.release(0)
        logits[name] = np.concatenate(made)
        model.close()
    return logits


def agreement(left: np.ndarray, two: np.ndarray) -> float:
    return float((left.argmax(axis=1) == two.argmax(axis=1)).mean())


def widest_gap(left: np.ndarray, two: np.ndarray) -> float:
    """How far, in logits, one's choice lies below two's own at the worst position."""
    at = np.arange(len(left))
    return float((two.max(axis=1) - two[at, left.argmax(axis=1)]).max())


def test_the_runtimes_choose_the_same_tokens(rows):
    openvino, onnx = rows["openvino_rt"], rows["onnx_rt"]
    assert agreement(openvino, onnx) >= 0.95
    assert max(widest_gap(openvino, onnx), widest_gap(onnx, openvino)) < NEAR_TIE


def test_the_runtimes_hold_the_same_weights_to_the_bit(prepared, default_model_path):
    """Every matrix of OpenVINO's IR: quantised values and scales."""
    weights = GgufWeights(default_model_path)
    matrices = list_quantised_matrices(prepared["openvino_rt"] / "model.xml")
    assert len(matrices) == 5 * weights.spec.layers + 1  # the joined attention inputs count once
    for layer in range(weights.spec.layers):
        parts = [whole(weights, f"{layer}.{part}") for part in ("query", "key", "value")]
        assert np.array_equal(matrices[5 * layer], np.concatenate(parts))
        for index, part in enumerate(("output", "gate", "up", "down"), start=1):
            assert np.array_equal(matrices[5 * layer + index], whole(weights, f"{layer}.{part}"))
    assert np.array_equal(matrices[-1], whole(weights, "embedding"))


def whole(weights: GgufWeights, name: str) -> np.ndarray:
    """A matrix' parts side by side, row by row: signed values, bit patterns of scales."""
    tensor = weights.tensor(name)
    assert isinstance(tensor, Grouped)
    assert (tensor.zeros == 128).all()
    signed = np.bitwise_xor(tensor.values, np.uint8(128))
    return np.concatenate([signed, tensor.scales.view(np.uint16)], axis=1).astype(np.uint16)


def list_quantised_matrices(path: Path) -> list[np.ndarray]:
    """The same of every product in an IR, in the graph's order."""
    import openvino as ov

    made = []
    for node in ov.Core().read_model(path).get_ordered_ops():
        if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
            continue
        at = node.input_value(1).get_node()  # Convert, Reshape, Multiply by the scales, Convert
        product = at.input_value(0).get_node().input_value(0).get_node()
        scales = product.input_value(1).get_node()
        values = product.input_value(0).get_node().input_value(0).get_node()
        count = values.get_output_shape(0)[0]
        parts: list[np.ndarray] = [np.array(values.data).view(np.uint8), np.array(scales.data).view(np.uint16)]
        made.append(np.concatenate([part.reshape(count, -1) for part in parts], axis=1).astype(np.uint16))
    return made


@pytest.fixture(scope="module")
def expected(default_model_path, answers) -> np.ndarray:
    """Float32 over the file's exact values: our reference in numpy, which shares no reader of blocks with them."""
    model = Reference(GgufWeights(default_model_path, "exact"))
    return np.concatenate([model.extend([TextCache()], [text])[0][begin:] for begin, text in answers])


def test_the_runtimes_choose_what_float32_chooses_over_the_files_exact_values(expected, rows):
    """Nearly: activations are quantised to 8 bits in front of each product (docs/adr/0041)."""
    assert agreement(rows["onnx_rt"], expected) >= 0.95
    assert agreement(rows["openvino_rt"], expected) >= 0.95


@pytest.fixture(scope="module")
def reference(default_model_path) -> Callable[[bool], Any]:
    for module in ("torch", "transformers", "accelerate"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install torch transformers accelerate")
    from tests.support.reference import Reference as Transformers

    return lambda ours: Transformers(default_model_path, ours=ours)


@pytest.mark.slow
@pytest.mark.reference
def test_transformers_agrees_over_its_own_reading_and_over_ours(reference, rows, answers):
    for ours in (True, False):
        model = reference(ours)
        logits = np.concatenate([model.logits(text)[begin:] for begin, text in answers])
        assert agreement(rows["onnx_rt"], logits) >= 0.95
        assert agreement(rows["openvino_rt"], logits) >= 0.95
