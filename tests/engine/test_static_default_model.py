"""The default model's first layers in graphs of fixed shape: near the paged model's, and as lossless through the decode
loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from adapters import registry
from adapters.conformance.case import run
from adapters.contract import LoadedModel, LoadOptions, NumericalClass, Precision, StaticShapes, silent
from adapters.invariance import find_variance
from orchestrator.protocol.commands import Submit
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix

pytestmark = pytest.mark.model
STATIC = StaticShapes(on=True, context_tokens=512, prefill_rows=64, verify_rows=(1, 4))
OPTIONS = LoadOptions(slots=4, max_batch_rows=256, kv_cache_bytes=128 << 20, static=STATIC)


@pytest.fixture(scope="module")
def model(layers_model) -> LoadedModel:
    return layers_model


def load_static(store, layers_file, numerical_class: NumericalClass) -> LoadedModel:
    adapter = registry.get_for("openvino_rt", "CPU", STATIC)
    options = replace(OPTIONS, numerical_class=numerical_class)
    return adapter.load(store.prepare(layers_file, adapter, silent), options, silent)


@pytest.fixture(scope="module")
def static(store, layers_file) -> Iterator[LoadedModel]:
    """In float32, in which every processor has one class of all widths."""
    loaded = load_static(store, layers_file, NumericalClass(Precision.FP32, Precision.FP32))
    yield loaded
    loaded.close()


def test_logits_are_near_the_paged_models(static, model, prompts):
    prompt = prompts[0][:200]
    rows = [run(each, 0, prompt, [len(prompt)]).astype(np.float64) for each in (static, model)]
    for each in (static, model):
        each.release(0)
    assert np.sqrt(np.mean((rows[0] - rows[1]) ** 2)) < 0.1 * rows[1].std()
    assert np.mean(rows[0].argmax(axis=1) == rows[1].argmax(axis=1)) > 0.9


def test_every_width_computes_the_same_bits(static):
    caps = static.capabilities
    assert caps.static_widths in ((1, 4, 64), (4, 64))  # without VNNI a product over one row has other bits
    assert caps.row_invariant
    assert find_variance(static) == ""
    assert caps.max_context_tokens == 512
    assert caps.total_blocks * caps.block_tokens * static.spec.bytes_per_token <= 128 << 20


def test_widths_that_compute_other_bits_are_left_out(store, layers_file):
    """In bfloat16 with AMX one row, two to four and more have three kernels."""
    classes = {one.activations: one for one in registry.get_for("openvino_rt", "CPU", STATIC).classes(OPTIONS)[0]}
    if Precision.BF16 not in classes:
        pytest.skip("OpenVINO does not compute in bfloat16 on this processor")
    loaded = load_static(store, layers_file, classes[Precision.BF16])
    caps = loaded.capabilities
    assert caps.row_invariant
    assert set(caps.static_widths) <= {1, 4, 64}
    assert find_variance(loaded) == ""
    loaded.close()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_speculation_batching_and_a_lost_cache_never_change_a_token(static, prompts, sampling):
    def submits(committed: dict[str, list[int]]) -> list[Submit]:
        return [
            Submit(str(index), prompt[-150:], 20, sampling, committed.get(str(index), []), stop_tokens=[0, 2])
            for index, prompt in enumerate(prompts[:4])
        ]

    expected, rounds = decode(loop_over(static, None, running=1, prefix_reuse=False), submits({}))
    assert sum(done.drafted for done in rounds) == 0
    out, rounds = decode(loop_over(static, suffix(), running=4), submits({}))
    assert out == expected
    assert sum(done.accepted for done in rounds) > 0
    kept = {key: tokens[:7] for key, tokens in expected.items() if len(tokens) > 8}
    out, _ = decode(loop_over(static, suffix(), running=2), submits(kept))
    assert {key: kept.get(key, []) + tokens for key, tokens in out.items()} == expected
