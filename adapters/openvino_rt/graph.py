"""The graph that we run: paged attention, with the output layer only over the rows that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS_INPUT = "wanted_rows"


def read_paged(source: Path) -> Any:
    """Read a stateful decoder IR and return the paged-attention `openvino.Model`, with a `wanted_rows` input.

    The transformed model cannot be saved (OpenVINO does not read its attention operation back), so this runs at
    every load. Raises RuntimeError (OpenVINO's own) when the graph is not a decoder that the transformation knows.
    """
    import openvino as ov
    from openvino._offline_transformations import paged_attention_transformation

    model = ov.Core().read_model(source)
    paged_attention_transformation(model)
    _gather_before_output_layer(model)
    return model


def _gather_before_output_layer(model: Any) -> None:
    """Compute logits only for wanted rows: a fifth of a prefill's time is the output layer of rows nobody reads."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    rows = ops.parameter([-1], ov.Type.i64, name=ROWS_INPUT)
    rows.output(0).get_tensor().set_names({ROWS_INPUT})
    wanted = ops.gather(node.input_value(0), rows, ops.constant(np.int64(0)))
    node.input(0).replace_source_output(wanted.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()
