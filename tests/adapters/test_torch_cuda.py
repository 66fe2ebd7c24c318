"""The torch adapter on a CUDA device: the contract's promises, graphs, and speed beside transformers' own.

Skipped where there is none. Speeds are bounds of the device's promise, ratios measured in one run.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from adapters import registry
from adapters.conformance.case import SLOTS
from adapters.conformance.contract_tests import test_the_best_logits_are_those_of_whole_rows as check_best_logits
from adapters.contract import DeviceLost, LoadOptions, OutOfMemory, Precision, Segment, silent
from adapters.hf_directory import open_weights
from adapters.invariance import find_variance
from adapters.nvidia_load import read_nvidia_loads
from tests.adapters.test_hf_reference import TOKENS, VARIANTS
from tests.adapters.test_torch_device import prepare_variant
from tests.support import reference_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(device="CUDA:0", slots=4, kv_cache_bytes=64 << 20)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_computes_what_the_reference_computes(tmp_path, variant):
    source, target = prepare_variant(tmp_path, variant)
    model = ADAPTER.load(target, replace(OPTIONS, activations=Precision.FP32), silent)
    model.forward([Segment(2, 0, TOKENS[:70], (0, 0))])
    rows = [model.forward([Segment(2, start, TOKENS[start : start + 5], (0, 5))]).logits.copy() for start in (70, 75)]
    expected = reference_decoder.logits(open_weights(source), TOKENS)[70:]
    assert np.abs(np.concatenate(rows) - expected).max() < 5e-3
    model.close()


@pytest.mark.parametrize("variant", ["llama", "gemma2", "gemma3"])
def test_rows_are_invariant_in_bf16(tmp_path, variant):
    _, target = prepare_variant(tmp_path, variant)
    model = ADAPTER.load(target, OPTIONS, silent)
    assert model.capabilities.activations is Precision.BF16
    assert model.capabilities.row_invariant
    assert find_variance(model) == ""
    model.close()


@pytest.mark.parametrize(
    ("weights", "least", "near"),
    [(Precision.INT8, (7, 0), 0.99), (Precision.INT4, (8, 0), 0.99), (Precision.FP8, (8, 9), 0.9)],
)
def test_quantised_weights_are_held_so_and_compute_what_they_stand_for(tmp_path, weights, least, near):
    if torch.cuda.get_device_capability(0) < least:
        pytest.skip(f"{weights} weights need a compute capability of {least}")
    source, _ = prepare_variant(tmp_path, "llama")
    target = tmp_path / "quantised"
    target.mkdir()
    ADAPTER.prepare(source, target, silent, weights)
    tokens = TOKENS[:70]
    held_bytes = []
    for _ in range(2):
        model = ADAPTER.load(target, OPTIONS, silent)
        assert model.capabilities.weights == f"{weights} (from fp32)"  # and is not held in another format
        rows = model.forward([Segment(0, 0, tokens, (0, len(tokens)))]).logits.copy()
        assert find_variance(model) == ""
        model.close()
        gc.collect()
        held_bytes.append(torch.cuda.memory_allocated(0))
    assert held_bytes[1] <= held_bytes[0]  # libraries keep workspaces once, and nothing of a closed model is left
    whole = ADAPTER.load(target, replace(OPTIONS, device="CPU", activations=Precision.FP32), silent)
    expected = whole.forward([Segment(0, 0, tokens, (0, len(tokens)))]).logits
    assert np.corrcoef(rows.ravel(), expected.ravel())[0, 1] >= near
    whole.close()


def test_a_prefill_and_graphs_give_one_sequence_the_same_bits(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model = ADAPTER.load(target, OPTIONS, silent)
    tokens = TOKENS * 5
    whole = model.forward([Segment(0, 0, tokens, (0, len(tokens)))]).logits.copy()
    rows = [model.forward([Segment(1, i, [token], (0, 1))]).logits.copy() for i, token in enumerate(tokens)]
    assert np.array_equal(np.concatenate(rows).view(np.uint32), whole.view(np.uint32))
    model.close()


def test_sequences_that_decode_find_their_kernel_and_graphs_ready(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model: Any = ADAPTER.load(target, OPTIONS, silent)
    runner = model._runner
    assert runner.forwards is not None  # else torch compiled no FlexAttention, and a line says why
    ready = set(runner._graphs._recorded)
    for rows in (1, 5):
        model.forward([Segment(slot, 0, TOKENS[:rows], (0, rows)) for slot in range(4)])
    assert set(runner._graphs._recorded) == ready
    model.close()


def test_the_best_logits_of_rows_are_those_of_whole_rows(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model = ADAPTER.load(target, replace(OPTIONS, slots=SLOTS), silent)
    assert model.capabilities.best_logits
    check_best_logits(model)
    model.close()


def test_the_time_of_a_forward_is_the_devices(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    model = ADAPTER.load(target, OPTIONS, silent)
    model.forward([Segment(0, 0, TOKENS[:5], (4, 5))])
    assert 0.0 < model.forward([Segment(0, 5, TOKENS[5:10], (4, 5))]).device_ms < 50.0
    model.close()


def test_a_pool_that_the_device_cannot_hold_is_out_of_memory(tmp_path):
    _, target = prepare_variant(tmp_path, "llama")
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(OutOfMemory, match="out of memory"):
        ADAPTER.load(target, replace(OPTIONS, kv_cache_bytes=2 * total), silent)
    model = ADAPTER.load(target, OPTIONS, silent)  # and the device serves on
    model.close()
    with pytest.raises(DeviceLost):
        model.forward([Segment(0, 0, [1], (0, 1))])


def test_the_device_tells_what_it_does():
    load = read_nvidia_loads(())["CUDA:0"]
    assert load.memory_total_bytes > 0
    assert load.utilisation is not None
