"""Builds the stateful decoder graph that `graph.read_paged` turns into paged attention, from a spec and weights.

The shapes of the subgraphs matter, not only their results. OpenVINO recognises rotary embeddings, RMS norms, the KV
state (ReadValue, Gather by beam_idx, Concat) and the sliding window's mask by their pattern. The patterns are in
sdpa_to_paged_attention/state_management_pattern.cpp in OpenVINO's sources. optimum-intel's exports and the GGUF reader
of openvino_genai write them so.

Shapes in comments: B sequences, S new tokens, T tokens in all, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from adapters.decoder.limits import refuse_decoder
from adapters.decoder.spec import Rope, Weights
from adapters.openvino_rt.graph import name_input_of
from adapters.openvino_rt.ir_file import IrFile
from adapters.openvino_rt.layers import Layers
from adapters.source_meter import SourceMeter

_MASKED = -65504.0  # the lowest f16: what exported graphs use for "not to be seen"


def write_model(weights: Weights, path: Path, meter: SourceMeter) -> None:
    """Write the decoder as a stateful IR (`path` and a .bin beside it), with inputs input_ids, attention_mask,
    position_ids and beam_idx, and the output logits (B, S, vocabulary).

    Weights stay in the number format that they have. `meter` counts what is read of their source. Raises ModelRefused
    for what the graph cannot express, RuntimeError or OSError when `path` cannot be written.
    """
    refuse_decoder("openvino_rt", weights.spec)
    with IrFile(path.with_suffix(".bin"), meter) as file:
        file.save(_Builder(weights, file).model(), path)


class _Builder(Layers):
    """One graph in the making. Nodes that layers share (ropes, masks) are made once."""

    def __init__(self, weights: Weights, file: IrFile) -> None:
        super().__init__(weights, file)
        self.sinks: list[Any] = []
        self.ids, self.seen, self.positions = (
            self.input(name, [-1, -1], self.ov.Type.i64) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beams = self.input("beam_idx", [-1], self.ov.Type.i32)
        self.batch = self._size(self.ids, 0)
        self.ropes: dict[Rope, tuple[Any, Any]] = {}
        self.masks: dict[int, Any] = {}

    def model(self) -> Any:
        ops, spec = self.ops, self.spec
        table = self.weight("embedding")
        hidden = ops.gather(table, ops.convert(self.ids, "i32"), self.scalar(0, np.int32))
        if spec.embedding_scale != 1.0:
            hidden = ops.multiply(hidden, self.scalar(spec.embedding_scale))
        for layer in range(spec.layers):
            if layer:
                hidden.set_friendly_name(name_input_of(layer))  # where shards are cut
            hidden = self.layer(hidden, layer)
        hidden = self.norm(hidden, "final_norm")
        logits = self.logits(hidden, table if spec.tied_embeddings else self.weight("head"))
        inputs = [self.ids, self.seen, self.positions, self.beams]
        return self.ov.Model([ops.result(logits)], self.sinks, inputs, f"{spec.family}_decoder")

    def attention(self, hidden: Any, layer: int) -> Any:
        spec = self.spec
        query, key, value = self.heads(hidden, layer)
        query, key = self._rotate(query, spec.ropes[layer]), self._rotate(key, spec.ropes[layer])
        keys, values = self._append_to_state(key, layer, "key"), self._append_to_state(value, layer, "value")
        attended = self.ops.scaled_dot_product_attention(
            query,
            self._repeat_heads(keys),
            self._repeat_heads(values),
            self._mask(spec.windows[layer]),
            self.scalar(spec.query_scale),
        )
        return self.project_output(attended, layer)

    def _rotate(self, part: Any, rope: Rope) -> Any:
        """Rotate-half position embedding of (B, heads, S, D)."""
        ops = self.ops
        if rope not in self.ropes:
            self.ropes[rope] = self._turns(rope)
        cos, sin = self.ropes[rope]
        half = self.spec.head_dim // 2
        axis, step = self.ints([3]), self.ints([1])
        first = ops.slice(part, self.ints([0]), self.ints([half]), step, axis)
        second = ops.slice(part, self.ints([half]), self.ints([np.iinfo(np.int64).max]), step, axis)
        turned = ops.concat([ops.multiply(second, self.scalar(-1.0)), first], -1)
        return ops.add(ops.multiply(part, cos), ops.multiply(turned, sin))

    def _turns(self, rope: Rope) -> tuple[Any, Any]:
        """Return cos and sin of every position's angles, both (B, 1, S, D)."""
        ops = self.ops
        frequencies = ops.constant(np.array(rope.inverse_frequencies, np.float32).reshape(1, -1, 1))
        shape = ops.concat([self.batch, self.ints([1]), self.ints([1])], 0)
        per_sequence = ops.broadcast(frequencies, shape, broadcast_spec="BIDIRECTIONAL")
        positions = ops.convert(ops.unsqueeze(self.positions, self.scalar(1, np.int64)), "f32")
        angles = ops.transpose(ops.matmul(per_sequence, positions, False, False), self.ints([0, 2, 1]))
        twice = ops.concat([angles, angles], -1)
        cos, sin = ops.cos(twice), ops.sin(twice)
        if rope.magnitude != 1.0:
            cos, sin = (ops.multiply(part, self.scalar(rope.magnitude)) for part in (cos, sin))
        axis = self.scalar(1, np.int64)
        return ops.unsqueeze(cos, axis), ops.unsqueeze(sin, axis)

    def _append_to_state(self, current: Any, layer: int, role: str) -> Any:
        """Append (B, K, S, D) to the state and return all of it, (B, K, T, D)."""
        ops, spec = self.ops, self.spec
        empty = ops.concat([self.batch, self.ints([spec.kv_heads, 0, spec.head_dim])], 0)
        # Exported graphs name a state so, and tools that know them look for it.
        name = f"past_key_values.{layer}.{role}present.{layer}.{role}"
        shape = self.ov.PartialShape([-1, spec.kv_heads, -1, spec.head_dim])
        past = ops.read_value(ops.broadcast(self.scalar(0.0), empty), name, self.ov.Type.f32, shape)
        past = ops.gather(past, self.beams, self.scalar(0, np.int64))
        if layer == 0 and role == "key":
            self.past = self._size(past, 2)
        both = ops.concat([past, current], 2)
        self.sinks.append(ops.assign(both, name))
        return both

    def _repeat_heads(self, part: Any) -> Any:
        """Repeat each key-value head for the query heads that share it (grouped-query attention)."""
        ops, spec = self.ops, self.spec
        groups = spec.heads // spec.kv_heads
        if groups == 1:
            return part
        apart = ops.unsqueeze(part, self.scalar(2, np.int64))
        shape = ops.concat([self.batch, self.ints([spec.kv_heads, groups, 1, spec.head_dim])], 0)
        repeated = ops.broadcast(apart, shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(repeated, self.ints([0, spec.heads, -1, spec.head_dim]), True)

    def _mask(self, window: int) -> Any:
        """Return what is added to the scores, (B, 1, S, T): 0 where a token may look, the lowest number elsewhere.

        The chain of "and" is the pattern by which OpenVINO finds the window: Greater(key, query - window) first.
        """
        if window in self.masks:
            return self.masks[window]
        ops = self.ops
        total = self._size(self.seen, 1)
        zero, unit = self.scalar(0, np.int64), self.scalar(1, np.int64)
        begin = ops.squeeze(self.past, zero)
        end = ops.add(begin, ops.squeeze(self._size(self.ids, 1), zero))
        queries = ops.reshape(ops.range(begin, end, unit, "i64"), self.ints([1, 1, -1, 1]), False)
        keys = ops.range(zero, ops.squeeze(total, zero), unit, "i64")
        keys = ops.reshape(keys, self.ints([1, 1, 1, -1]), False)
        real = ops.reshape(ops.convert(self.seen, "boolean"), self.ints([0, 1, 1, -1]), True)
        may = ops.less_equal(keys, queries)
        if window:
            inside = ops.greater(keys, ops.add(queries, self.scalar(-window, np.int64)))
            always = ops.constant(np.array(True))
            may = ops.bitwise_and(ops.bitwise_and(always, inside), may)
            may = ops.bitwise_and(ops.bitwise_and(real, may), always)
        else:
            may = ops.bitwise_and(real, may)
        may = ops.broadcast(may, ops.concat([self.batch, self.ints([1]), self._size(self.ids, 1), total], 0))
        scores = ops.select(may, self.scalar(0.0), self.scalar(_MASKED))
        self.masks[window] = ops.slice(scores, self.ints([0]), total, self.ints([1]), self.ints([3]))
        return self.masks[window]

    def _size(self, node: Any, axis: int) -> Any:
        """Return one dimension of a node as a vector of one i64."""
        ops = self.ops
        return ops.gather(ops.shape_of(node, "i64"), self.ints([axis]), self.scalar(0, np.int64))
