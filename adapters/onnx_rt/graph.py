"""Builds the ONNX graph of a decoder: its own shape, ONNX Runtime's fused operators.

Inputs:

- `input_ids`: (batch, sequence).
- `seqlens_k`: (batch,), each sequence's length behind this forward less one.
- `total_sequence_length`: the longest of them.
- `wanted_rows`: the rows of batch * sequence that get logits.
- `past.L.key` and `past.L.value` for each layer: (batch, kv_heads, capacity, head_dim).

Outputs: `logits` (wanted, vocabulary), `present.L.key` and `present.L.value`, to be bound to the same memory as the
past: new positions are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import LayerRange
from adapters.decoder.limits import refuse_decoder
from adapters.decoder.spec import PROJECTIONS, DecoderSpec, Rope, Weights
from adapters.decoder.weight_file import WeightFile
from adapters.onnx_rt.initializers import ALIGNMENT_BYTES, Initializers, Matrix
from adapters.source_meter import SourceMeter

MODEL_FILE, WEIGHTS_FILE = "model.onnx", "weights.bin"
HIDDEN_INPUT, HIDDEN_OUTPUT = "hidden_states", "hidden_out"
_NOTHING = "hidden_states.nothing"
MICROSOFT = "com.microsoft"
OPSET = 21
INT8_ACTIVATIONS = 4
"""MatMulNBits' accuracy level: activations are quantised to 8 bits by groups, as llama.cpp and OpenVINO do."""
ROPE_MARGIN = 64
"""Positions behind the context that padding may be turned to. ADR 0040: a forward is filled up by 15 rows at most."""


def write_graph(weights: Weights, target: Path, meter: SourceMeter) -> None:
    """Write model.onnx and weights.bin. `meter` counts what is read. Raises ModelRefused for a model that these
    operators cannot compute, OSError."""
    import onnx
    from onnx import helper

    spec = weights.spec
    refuse_decoder("onnx_rt", spec)
    with WeightFile(target / WEIGHTS_FILE, meter, align_bytes=ALIGNMENT_BYTES) as file:
        initializers = Initializers(weights, file, WEIGHTS_FILE)
        builder = _Builder(spec, initializers)
        builder.decoder()
    graph = helper.make_graph(
        builder.nodes, "decoder", _inputs(spec), _outputs(spec), initializers.protos, doc_string=weights.label
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)], ir_version=10
    )
    onnx.save_model(model, target / MODEL_FILE)


def _inputs(spec: DecoderSpec) -> list[Any]:
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    return [
        value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        value("seqlens_k", TensorProto.INT32, ["batch"]),
        value("total_sequence_length", TensorProto.INT32, []),
        value("wanted_rows", TensorProto.INT64, ["wanted"]),
        *_caches(spec, "past"),
    ]


def _outputs(spec: DecoderSpec) -> list[Any]:
    from onnx import TensorProto, helper

    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["wanted", spec.outputs])
    return [logits, *_caches(spec, "present")]


def _caches(spec: DecoderSpec, prefix: str) -> list[Any]:
    from onnx import TensorProto, helper

    shape = ["batch", spec.kv_heads, "capacity", spec.head_dim]
    names = cache_names(spec.all_layers, prefix)
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]


def cache_names(layers: LayerRange, prefix: str) -> list[str]:
    """Return the names of the layers' caches, `prefix` being past or present."""
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers.first, layers.end) for kind in ("key", "value")]


def keep_layers(path: Path, layers: LayerRange, count: int) -> bytes:
    """Return the part of a written graph of `count` layers that is these. Its weights stay in the file beside it.

    A range that does not begin with the first layer has the input `hidden_states`, and one that does not end with the
    last has the output `hidden_out`: float32, shape (batch, sequence, hidden size).
    """
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load_model(path, load_external_data=False)
    graph = model.graph
    nodes = {name: node for node in graph.node for name in node.output if name}
    width = next(value.dims[0] for value in graph.initializer if value.name == f"{layers.first}.attention_norm")
    shape = ["batch", "sequence", width]
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name: value for value in graph.output}
    results = [outputs[name] for name in cache_names(layers, "present")]
    if layers.end < count:
        residual, change = nodes[_name_sum(layers.end)].input[:2]
        nodes[HIDDEN_OUTPUT] = helper.make_node("Add", [residual, change], [HIDDEN_OUTPUT], name=HIDDEN_OUTPUT)
        results.insert(0, helper.make_tensor_value_info(HIDDEN_OUTPUT, TensorProto.FLOAT, shape))
    else:
        results.insert(0, outputs["logits"])
    if layers.first:
        # The operator that adds and norms goes on, over nothing to add: another one may norm with other last bits.
        norm = nodes[_name_sum(layers.first)]
        inputs[HIDDEN_INPUT] = helper.make_tensor_value_info(HIDDEN_INPUT, TensorProto.FLOAT, shape)
        nodes[_NOTHING] = helper.make_node("Sub", [HIDDEN_INPUT, HIDDEN_INPUT], [_NOTHING], name=_NOTHING)
        norm.input[0], norm.input[1] = HIDDEN_INPUT, _NOTHING
    needed = _list_needed(nodes, [result.name for result in results])
    kept = {name for node in needed for name in node.input}
    part = helper.make_graph(
        needed,
        str(layers),
        [value for name, value in inputs.items() if name in kept],
        results,
        [value for value in graph.initializer if value.name in kept],
    )
    made = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    return bytes(made.SerializeToString())


def _name_sum(layer: int) -> str:
    """Return the name of what a layer, not the first, reads: its norm gives it as a second output."""
    return f"{layer}.attention_norm.sum"


def _list_needed(nodes: Mapping[str, Any], results: Sequence[str]) -> list[Any]:
    """Return the nodes that these results are computed from, in an order in which they can be run."""
    needed: dict[str, Any] = {}
    waiting = [(name, False) for name in reversed(results)]
    while waiting:
        name, behind = waiting.pop()
        node = nodes.get(name)
        if node is None or node.name in needed:
            continue
        if behind:
            needed[node.name] = node
            continue
        waiting.append((name, True))
        waiting += [(source, False) for source in node.input]
    return list(needed.values())


class _Builder:
    """Emits nodes in order. Methods return the name of what they compute."""

    def __init__(self, spec: DecoderSpec, initializers: Initializers) -> None:
        self.nodes: list[Any] = []
        self._spec, self._initializers = spec, initializers

    def decoder(self) -> None:
        spec = self._spec
        self._rope_tables()
        table = self._initializers.add_embedding()
        residual, change = self._embed(table), ""
        if spec.embedding_scale != 1.0:
            residual = self._node("Mul", [residual, self._scalar("embedding.scale", spec.embedding_scale)], "scaled")
        for layer in range(spec.layers):
            normed, residual = self._norm(residual, change, f"{layer}.attention_norm")
            attended = self._post_normed(self._attention(layer, normed), f"{layer}.post_attention_norm")
            normed, residual = self._norm(residual, attended, f"{layer}.mlp_norm")
            change = self._post_normed(self._mlp(layer, normed), f"{layer}.post_mlp_norm")
        normed, _ = self._norm(residual, change, "final_norm", last=True)
        flat = self._node("Reshape", [normed, self._constant("flat", [-1, spec.hidden])], "rows")
        wanted = self._node("Gather", [flat, "wanted_rows"], "wanted", axis=0)
        self._product(wanted, self._initializers.add_head(table), "head", out="logits")

    def _rope_tables(self) -> None:
        for rope in self._spec.rope_kinds:
            for name, of_angles in zip(self._tables_of(rope), (np.cos, np.sin), strict=True):
                self._initializers.add_table(name, partial(self._compute_table, rope, of_angles))

    def _compute_table(self, rope: Rope, of_angles: Callable[[Any], Any]) -> NDArray[np.float32]:
        positions = np.arange(self._spec.context_length + ROPE_MARGIN, dtype=np.float64)[:, None]
        table = of_angles(positions * np.asarray(rope.inverse_frequencies))
        made: NDArray[np.float32] = (table * rope.magnitude).astype(np.float32)
        return made

    def _tables_of(self, rope: Rope) -> tuple[str, str]:
        number = self._spec.rope_kinds.index(rope)
        return (f"cos.{number}", f"sin.{number}") if number else ("cos", "sin")

    def _embed(self, table: Matrix) -> str:
        if not table.bits:
            return self._node("Gather", [table.values, "input_ids"], "embedded", axis=0)
        groups = self._node(
            "GatherBlockQuantized",
            [table.values, "input_ids", table.scales, table.zeros],
            "embedded.groups",
            domain=MICROSOFT,
            bits=table.bits,
            block_size=table.group_size,
            gather_axis=0,
            quantize_axis=2,
        )
        return self._node("Reshape", [groups, self._constant("embedded.shape", [0, 0, self._spec.hidden])], "embedded")

    def _norm(self, residual: str, change: str, weight: str, *, last: bool = False) -> tuple[str, str]:
        """Add `change` (where there is one) to the residual and norm the sum: (normed, sum)."""
        gamma, epsilon = self._initializers.add_vector(weight), self._spec.norm_epsilon
        if not change:
            normed = self._node("SimplifiedLayerNormalization", [residual, gamma], f"{weight}.out", epsilon=epsilon)
            return normed, residual
        total = "" if last else f"{weight}.sum"
        normed = self._node(
            "SkipSimplifiedLayerNormalization",
            [residual, change, gamma],
            f"{weight}.out",
            *((("", "", total)) if total else ()),
            domain=MICROSOFT,
            epsilon=epsilon,
        )
        return normed, total

    def _post_normed(self, change: str, weight: str) -> str:
        """Norm what is added to the residual, where the model does."""
        if not self._spec.post_norms:
            return change
        gamma, epsilon = self._initializers.add_vector(weight), self._spec.norm_epsilon
        return self._node("SimplifiedLayerNormalization", [change, gamma], f"{weight}.out", epsilon=epsilon)

    def _attention(self, layer: int, normed: str) -> str:
        spec = self._spec
        bias = [f"{layer}.{part}_bias" for part in PROJECTIONS] if spec.qkv_bias else []
        qkv = self._products(normed, [f"{layer}.{part}" for part in PROJECTIONS], f"{layer}.qkv", bias)
        inputs = self._norm_heads(layer, qkv) if spec.qk_norm else [qkv, "", ""]
        attended = self._node(
            "GroupQueryAttention",
            [
                *inputs,
                *(f"past.{layer}.{kind}" for kind in ("key", "value")),
                *("seqlens_k", "total_sequence_length", *self._tables_of(spec.ropes[layer])),
            ],
            f"{layer}.attended",
            *(f"present.{layer}.{kind}" for kind in ("key", "value")),
            domain=MICROSOFT,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.query_scale,
            do_rotary=1,
            rotary_interleaved=0,
            **({"local_window_size": spec.windows[layer]} if spec.windows[layer] else {}),
        )
        return self._products(attended, [f"{layer}.output"], f"{layer}.output")

    def _norm_heads(self, layer: int, qkv: str) -> list[str]:
        """Norm each head of query and key: the attention operator has inputs for it, but no kernel on CPU."""
        sizes = self._constant(f"{layer}.sizes", [*self._spec.projection_rows])
        names = [f"{layer}.{part}.split" for part in PROJECTIONS]
        self._node("Split", [qkv, sizes], *names, axis=-1)
        return [*(self._norm_head(layer, part) for part in ("query", "key")), names[2]]

    def _norm_head(self, layer: int, part: str) -> str:
        name = f"{layer}.{part}"
        shape = self._constant(f"{name}.by_head", [0, 0, -1, self._spec.head_dim])
        by_head = self._node("Reshape", [f"{name}.split", shape], f"{name}.heads")
        gamma = self._initializers.add_vector(f"{name}_norm")
        epsilon = self._spec.norm_epsilon
        normed = self._node("SimplifiedLayerNormalization", [by_head, gamma], f"{name}.normed", epsilon=epsilon)
        return self._node("Reshape", [normed, self._constant(f"{name}.flat", [0, 0, -1])], f"{name}.out")

    def _mlp(self, layer: int, normed: str) -> str:
        gate_up = self._products(normed, [f"{layer}.gate", f"{layer}.up"], f"{layer}.gate_up")
        gate, up = f"{layer}.gate.out", f"{layer}.up.out"
        self._node("Split", [gate_up], gate, up, axis=-1, num_outputs=2)
        if self._spec.activation == "silu":
            active = self._node("QuickGelu", [gate], f"{layer}.silu", domain=MICROSOFT, alpha=1.0)
        else:
            active = self._node("Gelu", [gate], f"{layer}.gelu", approximate="tanh")
        return self._products(self._node("Mul", [active, up], f"{layer}.mlp"), [f"{layer}.down"], f"{layer}.down")

    def _products(self, source: str, matrices: list[str], name: str, biases: Sequence[str] = ()) -> str:
        """Multiply with matrices that read the same input, joined into one product where their formats allow."""
        bias = self._initializers.add_vector(f"{name}.bias", *biases) if biases else ""
        added = self._initializers.add_matrices(name, matrices)
        if len(added) == 1:
            return self._product(source, added[0], name, bias=bias)
        parts = [self._product(source, matrix, matrix.values) for matrix in added]
        product = self._node("Concat", parts, f"{name}.parts", axis=-1)
        return self._node("Add", [product, bias], f"{name}.out") if bias else product

    def _product(self, source: str, matrix: Matrix, name: str, *, bias: str = "", out: str = "") -> str:
        out = out or f"{name}.out"
        if not matrix.bits:
            product = self._node("MatMul", [source, matrix.values], f"{name}.product" if bias else out)
            return self._node("Add", [product, bias], out) if bias else product
        return self._node(
            "MatMulNBits",
            [source, matrix.values, matrix.scales, matrix.zeros, "", bias],
            out,
            domain=MICROSOFT,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.group_size,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _constant(self, name: str, values: list[int]) -> str:
        """A shape: inside the graph, because shape inference reads it."""
        from onnx import numpy_helper

        self._initializers.protos.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _scalar(self, name: str, value: float) -> str:
        from onnx import numpy_helper

        self._initializers.protos.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def _node(self, kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        from onnx import helper

        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        self.nodes.append(helper.make_node(kind, inputs, list(outputs), name=outputs[0], **attributes))
        return outputs[0]
