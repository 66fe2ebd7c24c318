"""Builds a decoder of fixed shapes: every size is a constant once the graph is loaded, as NPUs need it.

Two graphs. The body turns W embedded tokens of one sequence into W rows for the output layer, beside a cache of C
positions that lies outside. The head turns R of such rows into logits. Both are written once with W, C and R open, in
operations whose shapes follow from these numbers alone, and `static_graphs` fixes them at load: one file serves all
widths. What depends on positions comes from outside as tables: a mask, rotary cosines and sines, and the place of each
row in the cache. Sines of large angles have no meaning in 16 bits.

Body, inputs:

- hidden: (1, W, hidden).
- places: (W,), the position that each row is written to.
- bias.N: (1, 1, W, C), 0 where a row may look, for each kind of window.
- cos.N and sin.N: (1, 1, W, D) for each kind of rope.
- past.L.key and past.L.value: (1, K, C, D).

Outputs: rows (1, W, hidden); present (2 * layers, K, W, D), the keys and values of the W rows, key and value of layer 0
first.

New rows are put at their places in the cache before attention sums over it. Standing behind it instead, a row's
position in the sum, and with it the last bits, would depend on how its text was cut into forwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import Dense, Tensor, Weights
from adapters.openvino_rt.ir_file import IrFile
from adapters.openvino_rt.layers import Layers, Nodes
from adapters.source_meter import SourceMeter

BODY_FILE, HEAD_FILE, EMBEDDING_FILE, PLAN_FILE = "body.xml", "head.xml", "embedding.npy", "static.json"
_ROWS_AT_ONCE = 8192  # of an embedding that is converted. Bounds memory.


def write_static(weights: Weights, target: Path, meter: SourceMeter) -> None:
    """Write both graphs, the embedding's rows and the plan of the position tables. `meter` counts what is read.

    Raises ModelRefused when the file lacks a tensor, RuntimeError or OSError when `target` cannot be written.
    """
    for name, builder in ((BODY_FILE, _Body), (HEAD_FILE, _Head)):
        with IrFile((target / name).with_suffix(".bin"), meter) as file:
            file.save(builder(weights, file).model(), target / name)
    spec, embedding = weights.spec, weights.tensor("embedding")
    _write_embedding(embedding, target / EMBEDDING_FILE)
    plan = {
        "hidden": spec.hidden,
        "embedding_bfloat16": isinstance(embedding, Dense) and embedding.bfloat16,
        "windows": sorted(set(spec.windows)),
        "ropes": [[*rope.inverse_frequencies, rope.magnitude] for rope in spec.rope_kinds],
    }
    (target / PLAN_FILE).write_text(json.dumps(plan), encoding="utf-8")


def _write_embedding(tensor: Tensor, path: Path) -> None:
    """Write the table as (vocabulary, hidden) in 16 bits, or 32 where the file has so many; bfloat16 as its bits."""
    if isinstance(tensor, Dense):
        np.save(path, tensor.values)
        return
    table = np.lib.format.open_memmap(path, "w+", np.dtype(np.float16), tensor.values.shape)
    for start in range(0, len(table), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        table[part] = _dequantise(tensor, part)
    table.flush()


def _dequantise(tensor: Any, part: slice) -> NDArray[np.float32]:
    rows = type(tensor)(tensor.values[part], tensor.scales[part], tensor.zeros[part], tensor.bits, tensor.group_size)
    values: NDArray[np.float32] = rows.float32()
    return values


class _Body(Layers):
    def __init__(self, weights: Weights, file: IrFile) -> None:
        super().__init__(weights, file)
        spec, kind = self.spec, self.ov.Type.f32
        self.ropes, self.windows = spec.rope_kinds, sorted(set(spec.windows))
        self.hidden = self.input("hidden", [1, -1, spec.hidden], kind)
        self.places = self.input("places", [-1], self.ov.Type.i32)
        self.biases = [self.input(f"bias.{index}", [1, 1, -1, -1], kind) for index in range(len(self.windows))]
        self.cosines, self.sines = (
            [self.input(f"{name}.{index}", [1, 1, -1, spec.head_dim], kind) for index in range(len(self.ropes))]
            for name in ("cos", "sin")
        )
        self.pasts: list[Any] = []
        self.presents: list[Any] = []

    def model(self) -> Any:
        ops, hidden = self.ops, self.hidden
        if self.spec.embedding_scale != 1.0:
            hidden = ops.multiply(hidden, self.scalar(self.spec.embedding_scale))
        for layer in range(self.spec.layers):
            hidden = self.layer(hidden, layer)
        outputs = [
            self.name_output(self.norm(hidden, "final_norm"), "rows"),
            self.name_output(ops.concat(self.presents, 0), "present"),
        ]
        inputs = [self.hidden, self.places, *self.biases, *self.cosines, *self.sines, *self.pasts]
        return self.ov.Model([ops.result(output) for output in outputs], inputs, f"{self.spec.family}_static")

    def attention(self, hidden: Any, layer: int) -> Any:
        """Grouped-query attention: the query heads of one key-value head are rows of one product."""
        ops, spec = self.ops, self.spec
        query, key, value = self.heads(hidden, layer)
        query, key = self._rotate(query, layer), self._rotate(key, layer)
        keys, values = self._write_past(key, f"past.{layer}.key"), self._write_past(value, f"past.{layer}.value")
        self.presents += [key, value]
        scaled = ops.multiply(query, self.scalar(spec.query_scale))
        scores = ops.matmul(self._by_group(scaled, spec.head_dim), keys, False, True)  # (1, K, H / K * W, C)
        scores = self._by_head(scores)
        if spec.attention_softcap:
            scores = self.softcap(scores, spec.attention_softcap)
        chances = ops.softmax(ops.add(scores, self.biases[self.windows.index(spec.windows[layer])]), -1)
        attended = ops.matmul(self._by_group(chances, 0), values, False, False)
        return self.project_output(self._by_head(attended), layer)

    def _by_group(self, part: Any, width: int) -> Any:
        """(1, H, W, X) as (1, K, H / K * W, X); `width` is X, 0 where it is open."""
        return self.ops.reshape(part, self.ints([1, self.spec.kv_heads, -1, width]), True)

    def _by_head(self, part: Any) -> Any:
        """(1, K, H / K * W, X) as (1, H, W, X)."""
        return self.ops.reshape(part, self.ints([1, self.spec.heads, -1, 0]), True)

    def _write_past(self, current: Any, name: str) -> Any:
        spec = self.spec
        past = self.input(name, [1, spec.kv_heads, -1, spec.head_dim], self.ov.Type.f32)
        self.pasts.append(past)
        return self.ops.scatter_update(past, self.places, current, self.scalar(2, np.int64))

    def _rotate(self, part: Any, layer: int) -> Any:
        """Rotate-half position embedding of (1, heads, W, D)."""
        ops, half = self.ops, self.spec.head_dim // 2
        index = self.ropes.index(self.spec.ropes[layer])
        halves = ops.variadic_split(part, self.scalar(-1, np.int64), self.ints([half, half]))
        turned = ops.concat([ops.multiply(halves.output(1), self.scalar(-1.0)), halves.output(0)], -1)
        return ops.add(ops.multiply(part, self.cosines[index]), ops.multiply(turned, self.sines[index]))


class _Head(Nodes):
    def model(self) -> Any:
        spec = self.spec
        rows = self.input("rows", [1, -1, spec.hidden], self.ov.Type.f32)
        logits = self.logits(rows, self.weight(spec.head_name))
        return self.ov.Model([self.ops.result(logits)], [rows], f"{spec.family}_head")
