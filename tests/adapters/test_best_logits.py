"""The best logits of rows, found where the rows are: the same by torch and by numpy, and the same texts with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adapters import registry
from adapters.best_logits import MOST_BEST, find_best_logits
from adapters.conformance.case import ROWS, SLOTS
from adapters.conformance.contract_tests import test_the_best_logits_are_those_of_whole_rows as check_best_logits
from adapters.contract import LoadOptions, Precision, Segment, Unsupported, silent
from adapters.torch_device.best_logits import find_best, read_best
from orchestrator.protocol.commands import Submit
from policies.sampling import Sampling
from tests.adapters.test_hf_reference import TOKENS
from tests.adapters.test_torch_device import prepare_variant
from tests.support.best_logits import find_best_by_definition, sum_masses
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, loop_over, suffix

ADAPTER = registry.get("torch_device")
ODD = [0.0, -0.0, 1.0, 1.5, -1.5, 1e-45, -1e-45, np.inf, -np.inf, np.nan]


@given(
    rows=arrays.arrays(
        np.float32,
        st.tuples(st.integers(0, 40), st.integers(1, 30)),
        elements=st.sampled_from(ODD) | st.floats(width=32),
    ),
    count=st.integers(1, 40),
    negative_nan=st.booleans(),
)
@settings(max_examples=300)
def test_they_are_the_best_in_order_with_the_lower_id_first_among_equals(rows, count, negative_nan):
    if negative_nan:  # as a processor makes it of 0 / 0
        rows = np.where(np.isnan(rows), np.uint32(0xFFC00000).view(np.float32), rows)
    best = read_best(find_best(torch.from_numpy(rows), count).numpy(), rows.__getitem__)
    count = min(count, rows.shape[1])
    logits, ids = find_best_by_definition(rows, count)
    spoilt = ~np.isfinite(logits[:, 0]) & (logits[:, 0] != -np.inf)
    answers = [(best.logits, best.ids)]
    if len(rows):
        answers.append(find_best_logits(rows, count, [0.0] * len(rows))[:2])
    for found_logits, found_ids in answers:
        assert np.array_equal(spoilt, ~np.isfinite(found_logits[:, 0]) & (found_logits[:, 0] != -np.inf))
        assert np.array_equal(found_ids[~spoilt], ids[~spoilt])
        assert np.array_equal(found_logits[~spoilt].view(np.uint32), logits[~spoilt].view(np.uint32))


def test_in_sixteen_bits_many_are_equal_and_the_order_holds_over_a_whole_vocabulary():
    rows = np.random.default_rng(1).normal(0, 3, (20, 151_936)).astype(np.float32)
    coarse = torch.from_numpy(rows).bfloat16().float()
    temperatures = np.linspace(0.1, 2.0, 20).astype(np.float32)
    for count in (1, 64):
        best = read_best(find_best(coarse, count, torch.from_numpy(1.0 / temperatures)).numpy(), rows.__getitem__)
        logits, ids = find_best_by_definition(coarse.numpy(), count)
        assert np.array_equal(best.ids, ids)
        assert np.array_equal(best.logits, logits)
        assert np.allclose(best.masses, sum_masses(coarse.numpy(), list(temperatures)), rtol=2e-5, atol=0.0)
        its = find_best_logits(coarse.numpy(), count, temperatures.tolist())
        assert np.array_equal(its[0], logits)
        assert np.array_equal(its[1], ids)
        assert np.allclose(its[2], best.masses, rtol=2e-5, atol=0.0)
    assert (np.diff(best.logits, axis=1) == 0).any()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Any:
    """On a processor rows lie in the host's memory, and come whole. Here they do as on CUDA."""
    _, target = prepare_variant(tmp_path_factory.mktemp("models"), "llama")
    options = LoadOptions(slots=SLOTS, max_batch_rows=ROWS, kv_cache_bytes=16 << 20, activations=Precision.FP32)
    loaded: Any = ADAPTER.load(target, options, silent)
    assert loaded.capabilities.best_logits == 0
    with pytest.raises(Unsupported):
        loaded.forward([Segment(0, 0, TOKENS[:4], (3, 4), best=1)])
    loaded.capabilities = replace(loaded.capabilities, best_logits=MOST_BEST)
    yield loaded
    loaded.close()


def test_a_model_gives_what_the_contract_says_of_them(model):
    check_best_logits(model)


@pytest.mark.parametrize("depth", [0, 3])
def test_texts_are_those_of_whole_rows_with_drafts_and_without(model, depth):
    samplings = {
        "greedy": Sampling(),
        "top-k": Sampling(0.9, top_k=20, seed=1),
        "both": Sampling(1.3, top_k=40, top_p=0.8, seed=2),
        "top-p": Sampling(1.0, top_p=0.9, seed=3),
        "min-p": Sampling(1.0, min_p=0.2, seed=4),
        "all": Sampling(1.0, seed=5),
    }
    submits = [Submit(name, TOKENS[: 9 + len(name)], 40, own) for name, own in samplings.items()]
    submits.append(Submit("scored", TOKENS[:20], 40, Sampling(), logprobs=3))
    texts = []
    for most in (0, MOST_BEST):
        model.capabilities = replace(model.capabilities, best_logits=most)
        loop = loop_over(model, suffix(), running=7, depth=depth, policy=FixedDepth(depth), prefix_reuse=False)
        texts.append(decode(loop, submits)[0])
    assert texts[0] == texts[1]
    assert all(len(text) == 40 for text in texts[0].values())
