"""The graph that we run: paged attention, with the output layer only over the rows that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.contract import LayerRange, ModelRefused

ROWS_INPUT = "wanted_rows"
HIDDEN_INPUT = "hidden_states"
KV_PREFIXES = ("key_cache.", "value_cache.")
INPUTS = frozenset(
    {
        *("input_ids", "position_ids", "past_lens", "subsequence_begins"),
        *("block_indices", "block_indices_begins", "max_context_len"),
    }
)
"""Of a paged graph, beside its caches."""


def name_input_of(layer: int) -> str:
    """Return what a prepared graph calls the node that a layer, not the first, reads."""
    return f"hidden.{layer}"


def read_paged(source: Path) -> Any:
    """Read a stateful decoder IR and return the paged-attention `openvino.Model`, with a `wanted_rows` input.

    The transformed model cannot be saved (OpenVINO does not read its attention operation back), so this runs at
    every load. Raises RuntimeError (OpenVINO's own) when the graph is not a decoder that the transformation knows, and
    ModelRefused when something of it is left that is not paged.
    """
    import openvino as ov
    from openvino._offline_transformations import paged_attention_transformation

    model = ov.Core().read_model(source)
    paged_attention_transformation(model)
    if why := _find_unpaged(model):
        raise ModelRefused(f"{why}. OpenVINO's paged attention cannot run it; its GGUF file may run on llama_cpp.")
    _gather_before_output_layer(model)
    return model


def _find_unpaged(model: Any) -> str:
    """Return what is left of a graph that nobody would fill: a state beside the paged keys and values, or an input."""
    states = [node for node in model.get_ops() if node.get_type_name() == "ReadValue"]
    if states:
        name = states[0].get_attributes()["variable_id"]
        return f"it remembers a text in a state ({name}), which stays outside of the paged keys and values"
    names = [port.any_name for port in model.inputs]
    unknown = [name for name in names if name not in INPUTS and not name.startswith(KV_PREFIXES)]
    return f"it reads {unknown[0]}, which this runtime does not give it" if unknown else ""


def keep_layers(model: Any, layers: LayerRange, count: int) -> Any:
    """Return the part of a paged graph of `count` layers that is these: its input is hidden states where it does not
    begin with the first, its output where it does not end with the last. Both are float32, shape (rows, 1, hidden)."""
    import openvino as ov
    from openvino import opset13 as ops

    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    results = model.get_results()
    if layers.end < count:
        results = [ops.result(nodes[name_input_of(layers.end)].output(0))]
    if layers.first:
        read = nodes[name_input_of(layers.first)].output(0)
        width = read.get_partial_shape()[2].get_length()
        hidden = ops.parameter([-1, 1, width], ov.Type.f32, name=HIDDEN_INPUT)
        hidden.output(0).get_tensor().set_names({HIDDEN_INPUT})
        for reader in read.get_target_inputs():
            reader.replace_source_output(hidden.output(0))
    return ov.Model(results, [], _list_parameters(results), str(layers))


def _list_parameters(results: list[Any]) -> list[Any]:
    seen: set[str] = set()
    nodes = []
    waiting = [result.input_value(0).get_node() for result in results]
    while waiting:
        node = waiting.pop()
        name = node.get_name()
        if name in seen:
            continue
        seen.add(name)
        if node.get_type_name() == "Parameter":
            nodes.append(node)
        waiting += [source.get_node() for source in node.input_values()]
    return nodes


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
