"""A KV cache of eight bits in OpenVINO: over several blocks, and without a trace of tokens that were rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters.contract import Exactness, LoadOptions, Segment, silent
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.openvino_rt.adapter import OpenVinoAdapter
from adapters.openvino_rt.model import PagedModel
from device_profiles.profile import Precision
from tests.support import tiny_models

pytest.importorskip("openvino")
PROMPT = [int(token) for token in np.random.default_rng(4).integers(3, 300, 75)]
BEHIND = [7, 30, 2, 255, 9, 12]


@pytest.fixture(params=[Precision.BF16, Precision.FP32], ids=str)
def load(request, tmp_path, shared_store: Path):
    """Load the same tiny model with a KV cache of a format."""
    adapter = OpenVinoAdapter()
    (profile,) = [device for device in adapter.devices() if device.name == "CPU"]
    if request.param not in profile.precisions:
        pytest.skip(f"this processor does not compute in {request.param}")
    source = resolve(str(tiny_models.write_model(tmp_path / "tiny", "llama")), Path())
    prepared = ModelStore(shared_store).prepare(source, adapter, silent)

    def load(kv_cache: Precision) -> PagedModel:
        options = LoadOptions(exactness=Exactness.KERNEL, activations=request.param, kv_cache=kv_cache)
        return adapter.load(prepared, options, silent)

    return load


def decode(model: PagedModel, slot: int, rejected: list[int]) -> np.ndarray:
    """Return the rows of BEHIND one after the other, each behind as many tokens that are taken back."""
    end = len(PROMPT)
    rows = [model.forward([Segment(slot, 0, PROMPT, (end - 1, end))]).logits.copy()]
    for number, token in enumerate(BEHIND):
        if rejected:
            model.forward([Segment(slot, end + number, [token, *rejected], (0, 1 + len(rejected)))])
        rows.append(model.forward([Segment(slot, end + number, [token], (0, 1))]).logits.copy())
    return np.concatenate(rows)


def test_rows_are_near_those_of_sixteen_bits_and_rejected_tokens_leave_no_trace(load):
    model = load(Precision.INT8)
    assert model.capabilities.numerical_class.kv_cache is Precision.INT8
    plain = decode(model, 0, [])
    np.testing.assert_array_equal(decode(model, 1, []), plain, "another slot of the same model")
    np.testing.assert_array_equal(decode(model, 2, [300, 301, 4, 250]), plain)
    whole = decode(load(Precision.FP16), 0, [])
    assert np.abs(plain - whole).max() < 0.1 * np.abs(whole).max()
