"""The classes for processors on which the usual ones do not hold: they hold here too, and serve what was asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from adapters import registry
from adapters.conformance.case import Case, bits, prepare_case, run, text
from adapters.contract import LoadOptions, Segment, silent
from adapters.invariance import find_variance, fingerprint_bits

OPTIONS = LoadOptions(slots=6, max_batch_rows=264, kv_cache_bytes=64 << 20, threads=1)


@pytest.fixture(scope="module", params=["openvino_rt", "onnx_rt", "torch_device"])
def adapter_and_model(request, shared_store, first_layers_path):
    """An adapter, and the default model's first layers as it prepares them."""
    adapter = registry.get(request.param)
    return adapter, prepare_case(Case(adapter.name, "CPU", first_layers_path), adapter, shared_store).path


@pytest.mark.model
def test_every_tier_behind_the_first_that_does_keeps_its_bits(adapter_and_model):
    adapter, path = adapter_and_model
    tiers = adapter.classes(OPTIONS)
    assert tiers[-1][0].fixed_width > 0
    varies = []
    for tier in tiers[1:]:
        model = adapter.load(path, dataclasses.replace(OPTIONS, numerical_class=tier[0]), silent)
        assert model.capabilities.numerical_class == tier[0]
        varies.append(find_variance(model))
        if not varies[-1]:
            assert fingerprint_bits(model) == fingerprint_bits(model)
        model.close()
    first = varies.index("")  # on processors with AVX2 alone that is a later one
    assert not any(varies[first:])


@pytest.mark.model
def test_forwards_of_one_width_return_the_rows_asked_for_and_roll_back(adapter_and_model):
    adapter, path = adapter_and_model
    chosen = dataclasses.replace(OPTIONS, numerical_class=adapter.classes(OPTIONS)[-1][0])
    model = adapter.load(path, chosen, silent)
    tokens, wrong = text(model, 45), text(model, 9, seed=3)
    expected = run(model, 0, tokens, [45])
    model.forward([Segment(1, 0, tokens[:21], (0, 0))])
    model.forward([Segment(1, 21, wrong, (0, 9))])
    again = model.forward([Segment(1, 21, tokens[21:], (2, 20)), Segment(2, 0, tokens[:19], (18, 19))]).logits
    assert np.array_equal(bits(again[:18]), bits(expected[23:41]))
    assert np.array_equal(bits(again[18:]), bits(expected[18:19]))
    assert model.count_cached_positions(1) == 45
    model.close()
