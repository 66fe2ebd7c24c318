"""Joins the query, key and value projections of each layer into one matrix product.

One product instead of three quantises its input once and is dispatched once: 10 % of a small step (measured:
tools/bench_peers.py, docs/benchmarks.md). Every output column is the same dot product as before, so results stay
the same to the bit. The gate and up projections are left alone: joined, the activation behind them is no longer
fused into the product, which changes rounding and makes prefill slower.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

_ATTENTION_INPUTS = 3


def fuse_attention_inputs(model: Any) -> int:
    """Join group-quantised projections that read the same input, three at a time; return how many were joined.

    A graph whose weights are stored in another pattern is left as it is.
    """
    import openvino as ov
    from openvino import opset13 as ops

    groups: dict[tuple[str, int], list[tuple[Any, list[Any]]]] = defaultdict(list)
    for node in model.get_ordered_ops():
        weights = _weights(node)
        if weights is not None:
            source = node.input_value(0)
            groups[(source.get_node().get_friendly_name(), source.get_index())].append((node, weights))
    joined = 0
    for members in groups.values():
        if len(members) != _ATTENTION_INPUTS or not _same_kind([weights for _, weights in members]):
            continue
        values, zeros, scales = (_concatenate(ov, [weights[part] for _, weights in members]) for part in range(3))
        rows = [weights[0].get_output_shape(0)[0] for _, weights in members]
        columns = int(np.prod(_weights_shape(members[0][1])[1:]))
        plain = ops.multiply(ops.subtract(ops.convert(values, "f16"), ops.convert(zeros, "f16")), scales)
        shape = ops.constant(np.array([sum(rows), columns], np.int64))
        matrix = ops.convert(ops.reshape(plain, shape, False), "f32")
        product = ops.matmul(members[0][0].input_value(0), matrix, False, True)
        parts = ops.variadic_split(product, ops.constant(np.int64(-1)), ops.constant(np.array(rows, np.int64)))
        for index, (node, _) in enumerate(members):
            for reader in list(node.output(0).get_target_inputs()):
                reader.replace_source_output(parts.output(index))
        joined += 1
    model.validate_nodes_and_infer_types()
    return joined


def _weights_shape(weights: list[Any]) -> list[int]:
    """Return the shape of the quantised values, (rows, groups, group size)."""
    return [int(size) for size in weights[0].get_output_shape(0)]


def _weights(node: Any) -> list[Any] | None:
    """Return [values, zero points, scales] of a product with (values - zeros) * scales, None for any other node."""
    if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
        return None
    at = node.input_value(1).get_node()
    for kind in ("Convert", "Reshape", "Multiply"):
        if at.get_type_name() != kind:
            return None
        scales = at.input_value(1).get_node() if kind == "Multiply" else None
        at = at.input_value(0).get_node()
    if at.get_type_name() != "Subtract":
        return None
    sides = [at.input_value(side).get_node() for side in (0, 1)]
    if any(side.get_type_name() != "Convert" for side in sides):
        return None
    found = [*(side.input_value(0).get_node() for side in sides), scales]
    return found if all(leaf.get_type_name() == "Constant" for leaf in found) else None


def _same_kind(all_weights: list[list[Any]]) -> bool:
    kinds = {
        tuple((str(leaf.get_element_type()), tuple(leaf.get_output_shape(0)[1:])) for leaf in weights)
        for weights in all_weights
    }
    return len(kinds) == 1 and all(_rows_end_on_bytes(leaf) for weights in all_weights for leaf in weights)


def _rows_end_on_bytes(constant: Any) -> bool:
    """Packed 4-bit values can be stacked byte by byte only then."""
    elements = int(np.prod(list(constant.get_output_shape(0))[1:]))
    return elements * int(constant.get_element_type().bitwidth) % 8 == 0


def _concatenate(ov: Any, constants: list[Any]) -> Any:
    """Stack constants along their first axis, byte by byte."""
    shape = [int(size) for size in constants[0].get_output_shape(0)]
    shape[0] = sum(int(constant.get_output_shape(0)[0]) for constant in constants)
    whole = ov.Tensor(constants[0].get_element_type(), ov.Shape(shape))
    raw = np.concatenate([np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8) for constant in constants])
    whole.data.reshape(-1).view(np.uint8)[:] = raw
    return ov.op.Constant(whole)
