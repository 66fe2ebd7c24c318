"""A decoder's layers as OpenVINO nodes: what every graph of ours has in common, whatever its attention and its cache.

Shapes in comments: B sequences, S new tokens, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from adapters.decoder.spec import PROJECTIONS, Weights
from adapters.openvino_rt.constants import Constants
from adapters.openvino_rt.ir_file import IrFile


class Nodes:
    """Makes the nodes that every graph of a model needs."""

    def __init__(self, weights: Weights, file: IrFile) -> None:
        import openvino as ov
        from openvino import opset13

        self.ov, self.ops = ov, opset13
        self.spec, self.constants = weights.spec, Constants(weights.tensor, file)

    def norm(self, hidden: Any, name: str) -> Any:
        """RMS norm over the last axis (arXiv 1910.07467)."""
        ops = self.ops
        square = ops.power(hidden, self.scalar(2.0))
        mean = ops.reduce_mean(square, self.ints([-1]), True)
        root = ops.sqrt(ops.add(mean, self.scalar(self.spec.norm_epsilon)))
        return ops.multiply(ops.multiply(hidden, ops.divide(self.scalar(1.0), root)), self.weight(name))

    def logits(self, hidden: Any, head: Any) -> Any:
        """Return the output layer's product with `head`, soft-capped where the model caps it."""
        ops = self.ops
        logits = ops.matmul(hidden, head, False, True)
        if self.spec.logit_softcap:
            logits = self.softcap(logits, self.spec.logit_softcap)
        return self.name_output(logits, "logits")

    def softcap(self, values: Any, cap: float) -> Any:
        """Return values pressed smoothly into (-cap, cap)."""
        ops, bound = self.ops, self.scalar(cap)
        return ops.multiply(ops.tanh(ops.divide(values, bound)), bound)

    def weight(self, *names: str) -> Any:
        """Return the tensors of these names as one float32 node, stacked where there are several."""
        return self.constants.weight(names)

    def input(self, name: str, shape: list[int], kind: Any) -> Any:
        """Return an input of the graph; -1 is a size that is not known yet."""
        return self.name_output(self.ops.parameter(self.ov.PartialShape(shape), kind, name=name), name)

    def name_output(self, node: Any, name: str) -> Any:
        node.output(0).get_tensor().set_names({name})
        return node

    def ints(self, values: list[int]) -> Any:
        """Return a constant vector of i64."""
        return self.ops.constant(np.array(values, np.int64))

    def scalar(self, value: float, kind: type[np.generic] = np.float32) -> Any:
        """Return a constant of no axes."""
        return self.ops.constant(np.array(value, kind))


class Layers(Nodes, ABC):
    """Makes the nodes of a graph's layers; a builder adds inputs, attention and outputs."""

    @abstractmethod
    def attention(self, hidden: Any, layer: int) -> Any:
        """Return the attention's output over normed (B, S, hidden)."""

    def layer(self, hidden: Any, layer: int) -> Any:
        """Return (B, S, hidden) behind a layer."""
        ops, spec = self.ops, self.spec
        attention = self.attention(self.norm(hidden, f"{layer}.attention_norm"), layer)
        if spec.post_norms:
            attention = self.norm(attention, f"{layer}.post_attention_norm")
        hidden = ops.add(hidden, attention)
        mlp = self._mlp(self.norm(hidden, f"{layer}.mlp_norm"), layer)
        if spec.post_norms:
            mlp = self.norm(mlp, f"{layer}.post_mlp_norm")
        return ops.add(hidden, mlp)

    def _mlp(self, hidden: Any, layer: int) -> Any:
        ops = self.ops
        gate = ops.matmul(hidden, self.weight(f"{layer}.gate"), False, True)
        active = ops.swish(gate) if self.spec.activation == "silu" else ops.gelu(gate, "tanh")
        up = ops.matmul(hidden, self.weight(f"{layer}.up"), False, True)
        return ops.matmul(ops.multiply(active, up), self.weight(f"{layer}.down"), False, True)

    def heads(self, hidden: Any, layer: int) -> list[Any]:
        """Return query, key and value by head, (B, H or K, S, D), normed where the model norms them."""
        ops, spec = self.ops, self.spec
        made = []
        for part, role in zip(self._project_qkv(hidden, layer), PROJECTIONS, strict=True):
            count = spec.heads if role == "query" else spec.kv_heads
            rows = ops.reshape(part, self.ints([0, 0, count, spec.head_dim]), True)
            if spec.qk_norm and role != "value":
                rows = self.norm(rows, f"{layer}.{role}_norm")
            made.append(ops.transpose(rows, self.ints([0, 2, 1, 3])))
        return made

    def project_output(self, attended: Any, layer: int) -> Any:
        """Return the output projection of (B, H, S, D)."""
        ops, spec = self.ops, self.spec
        rows = ops.transpose(attended, self.ints([0, 2, 1, 3]))
        flat = ops.reshape(rows, self.ints([0, 0, spec.heads * spec.head_dim]), True)
        return ops.matmul(flat, self.weight(f"{layer}.output"), False, True)

    def _project_qkv(self, hidden: Any, layer: int) -> list[Any]:
        """Query, key and value as one product, which is dispatched once, where their formats go together."""
        ops, spec = self.ops, self.spec
        biases = [f"{layer}.{role}_bias" for role in PROJECTIONS] if spec.qkv_bias else []
        parts = [
            ops.matmul(hidden, weight, False, True)
            for weight in self.constants.weights([f"{layer}.{role}" for role in PROJECTIONS])
        ]
        if len(parts) > 1:
            return [ops.add(part, self.weight(bias)) for part, bias in zip(parts, biases, strict=False)] or parts
        joined = parts[0]
        if biases:
            joined = ops.add(joined, self.weight(*biases))
        split = ops.variadic_split(joined, self.scalar(-1, np.int64), self.ints([*spec.projection_rows]))
        return [split.output(index) for index in range(len(PROJECTIONS))]
