"""A matrix that is made some rows at a time is the one that is made at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from adapters.contract import Precision
from adapters.decoder import pieces
from adapters.decoder.pieces import decode_in_pieces
from adapters.decoder.spec import Dense, Tensor

ROWS, COLUMNS = 37, 64


class OneMatrix:
    """Weights with one matrix under every name."""

    spec, label, output_ids = None, "bf16", ()

    def tensor(self, name: str) -> Tensor:
        values = np.random.default_rng(5).standard_normal((ROWS, COLUMNS), dtype=np.float32)
        return Dense((values.view(np.uint32) >> 16).astype(np.uint16), bfloat16=True)


def quantise_onnx(precision: Precision) -> Any:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: outrider extras install onnx")
    from adapters.onnx_rt.quantize import QuantizedOnnxWeights

    return QuantizedOnnxWeights(OneMatrix(), 4 if precision is Precision.INT4 else 8)  # type: ignore[arg-type]


def quantise_torch(precision: Precision) -> Any:
    pytest.importorskip("torchao", reason="torchao is not installed: outrider extras install torch quantize")
    from adapters.torch_device.quantize import QuantizedTorchWeights

    return QuantizedTorchWeights(OneMatrix(), precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["embedding", "0.down"])
@pytest.mark.parametrize(
    ("quantise", "precision"),
    [
        (quantise_onnx, Precision.INT4),
        (quantise_onnx, Precision.INT8),
        (quantise_torch, Precision.INT4),
        (quantise_torch, Precision.INT8),
        (quantise_torch, Precision.FP8),
    ],
)
def test_what_is_quantised_by_rows_is_what_is_quantised_at_once(quantise, precision, name, monkeypatch):
    whole = asdict(quantise(precision).tensor(name))
    monkeypatch.setattr(pieces, "_PIECE_VALUES", 5 * COLUMNS)
    made = asdict(quantise(precision).tensor(name))
    assert made.keys() == whole.keys()
    assert all(np.array_equal(made[key], whole[key]) for key in whole)


@pytest.mark.parametrize("rows_at_once", [1, 5, ROWS])
def test_what_is_decoded_in_pieces_is_what_is_decoded_at_once(rows_at_once, monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", rows_at_once * COLUMNS)
    values = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    done: list[int] = []
    tensor = decode_in_pieces(lambda part: Dense(values[part]), (ROWS, COLUMNS), done.append)
    assert np.array_equal(tensor.values, values)
    assert done == sorted(done)
    assert done[-1] == ROWS
