"""What `outrider models quality` writes beside the weights, and that the choice of a precision uses it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adapters.contract import silent
from adapters.decoder.reference import Reference, TextCache
from adapters.hf_directory import open_weights
from adapters.quality import add_quality, read_quality
from orchestrator.config.model import ClusterConfig, Store
from orchestrator.config.target import Target
from orchestrator.fitting.worker_options import engine_options
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.measuring.quality import list_stored_quality, measure_quality
from tests.support import reference_decoder, tiny_models

PROMPTS = [[5, 9, 77, 120, 33, 8], [200, 14, 14, 90]]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "gemma3", "gemma2"])
def test_the_reference_is_the_formulas_in_any_pieces(tmp_path: Path, name: str):
    weights = open_weights(tiny_models.write_model(tmp_path / name, name))
    tokens = [int(token) for token in np.random.default_rng(1).integers(4, 260, 40)]
    expected = reference_decoder.logits(weights, tokens)
    reference, one, two = Reference(weights), TextCache(), TextCache()
    first = reference.extend([one, two], [tokens[:25], tokens[:7]])
    rest = reference.extend([one, two], [tokens[25:], tokens[7:30]])
    for pieces, count in (((first[0], rest[0]), 40), ((first[1], rest[1]), 30)):
        assert np.abs(np.concatenate(pieces) - expected[:count]).max() < 1e-3 * expected.std()


def test_quality_is_measured_kept_beside_the_weights_and_used(tmp_path: Path):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3", kind="BF16")
    config = ClusterConfig(
        model=Target(source=str(directory), adapter="onnx_rt"), store=Store(directory=str(tmp_path / "store"))
    )
    options = engine_options(config, tmp_path)
    found = {
        weights: measure_quality(options.with_model(weights=weights), PROMPTS, silent)
        for weights in ("as_file", "int8", "int4")
    }
    exact = found["as_file"]
    assert exact["positions"] == sum(len(prompt) + 63 for prompt in PROMPTS)
    assert exact["answer_positions"] == 64 * len(PROMPTS)
    assert exact["greedy_agreement"] == 1.0  # this runtime holds bf16 in float32
    assert exact["perplexity_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert found["int4"]["greedy_agreement"] < found["int8"]["greedy_agreement"] <= 1.0
    assert found["int4"]["perplexity_ratio"] > 1.01
    assert found["int8"]["weights"] == "int8 (from bf16)"
    listed = {one["weights"]: one for one in list_stored_quality(tmp_path / "store")}
    assert set(listed) == {"fp32 (from bf16)", "int8 (from bf16)", "int4 (from bf16)"}
    assert listed["int8 (from bf16)"]["quality"] == [found["int8"]]
    target = load_target(options, silent)
    assert target.choice is not None
    assert "measured fastest" in target.choice.reason or target.choice.weights == "as_file"
    assert any("less than 90%" in one.why for one in target.choice.rejected if one.what == "int4")
    target.model.close()


def test_a_measurement_takes_the_place_of_its_like_and_damage_is_none(tmp_path: Path):
    key = {"device": "CPU", "activations": "fp32", "kv_cache": "fp32", "exactness": "bit"}
    add_quality(tmp_path, key | {"step_ms": 2.0, "greedy_agreement": 0.5})
    add_quality(tmp_path, key | {"step_ms": 3.0, "greedy_agreement": 0.5, "exactness": "kernel"})
    add_quality(tmp_path, key | {"step_ms": 1.0, "greedy_agreement": 0.7})
    assert [row["step_ms"] for row in read_quality(tmp_path)] == [1.0, 3.0]
    path = tmp_path / "quality.json"
    assert json.loads(path.read_text())["format"] == 1
    path.write_text(path.read_text()[:40])
    assert read_quality(tmp_path) == []
