"""Quantises the weights of an IR with NNCF (round to nearest, no data needed)."""

from __future__ import annotations

from pathlib import Path

from adapters.contract import Precision

GROUP_SIZE = 32
"""Columns that share a scale where weights have 4 bits, as in GGUF. 8-bit weights have a scale a row."""


def compress(source: Path, target: Path, precision: Precision) -> None:
    """Read an IR, quantise the matrices that it holds in full to 4 or 8 bits, and write it to `target`.

    With 4 bits, embedding and output layer get 8: they are what small models lose most by. Raises RuntimeError or
    OSError.
    """
    import nncf
    import openvino as ov

    model = ov.Core().read_model(source)
    if precision is Precision.INT8:
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        model = nncf.compress_weights(
            model, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=GROUP_SIZE, ratio=1.0, all_layers=False
        )
    ov.save_model(model, target, compress_to_fp16=False)
