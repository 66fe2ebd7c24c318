"""A deeper model says what the model says that it was made of, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.gguf_layers import count_layers, spread_layers, write_layers

from adapters import registry
from adapters.conformance.case import Case, load, prepare_case, run, text
from tests.support.tiny_gguf import Tiny, write


@given(st.integers(1, 80), st.integers(1, 400))
def test_layers_keep_their_order_and_real_ones_stand_once(there: int, wanted: int) -> None:
    layers = spread_layers(there, wanted)
    assert len(layers) == wanted
    assert [one.source for one in layers] == sorted(one.source for one in layers)
    real = [one.source for one in layers if not one.passes]
    assert len(set(real)) == len(real) == min(there, wanted)
    assert real[0] == 0
    assert wanted == 1 or real[-1] == there - 1
    if wanted >= there:  # evenly: none has two copies more than another one
        counts = [sum(one.source == number for one in layers) for number in range(there)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("adapter", ["openvino_rt", "onnx_rt"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_it_has_the_same_bits(tmp_path: Path, adapter: str, kind: Kind) -> None:
    small, deep = tmp_path / "small.gguf", tmp_path / "deep.gguf"
    write(small, Tiny("llama", kind=kind, layers=2))
    parameters = write_layers(deep, small, spread_layers(2, 7))
    assert count_layers(deep) == 7
    assert parameters == sum(int(tensor.n_elements) for tensor in GGUFReader(str(deep)).tensors)
    logits = []
    for source in (small, deep):
        case = Case(adapter, "CPU", source, kv_cache_bytes=8 << 20)
        model = load(prepare_case(case, registry.get(adapter), tmp_path / "store"), slots=2)
        assert model.spec.layers == (2 if source is small else 7)
        logits.append(run(model, 0, text(model, 40), [30, 10]))
        model.close()
    assert np.array_equal(logits[0], logits[1])
