"""A directory of onnxruntime-genai, run as it is: its graph with the inputs and outputs of ours (graph.py).

The lengths that attention reads become inputs, where the graph made them of a mask. Logits are computed of wanted rows
alone. Weights stay in their file, which is linked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from adapters.contract import LayerRange, ModelRefused
from adapters.decoder.source import fingerprint_of
from adapters.genai_facts import GENAI_CONFIG, GenaiFacts, name_caches, read_genai_facts
from adapters.hf_directory import read_json, title
from adapters.onnx_rt.graph import MODEL_FILE, cache_names
from adapters.prepared_facts import Facts, write_facts

_LENGTHS, _TOTAL, _ROWS = "seqlens_k", "total_sequence_length", "wanted_rows"
_ROWS_SHAPE, _FLAT, _WANTED = "outrider.rows_shape", "outrider.rows", "outrider.wanted"


def link_genai(source: Path, target: Path) -> None:
    """Write a directory's graph with inputs and outputs of ours, link its weights, and write its spec.json. Raises
    ModelRefused for a graph whose cache cannot be rolled back, and OSError."""
    import onnx

    facts = read_genai_facts(source, title(source))
    model = onnx.load_model(source / facts.graph, load_external_data=False)
    _rename(model.graph, read_json(source / GENAI_CONFIG)["model"]["decoder"], facts)
    onnx.save_model(model, target / MODEL_FILE)
    (target / facts.data).symlink_to((source / facts.data).resolve())
    written: Facts = {
        "architecture": facts.family,
        "layers": facts.layers,
        "kv_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
        "vocabulary_fingerprint": fingerprint_of(source, facts.vocabulary_size),
        "weights": facts.stored,
        "linked": title(source),
        "data": facts.data,
    }
    write_facts(target, written)


def _rename(graph: Any, decoder: dict[str, Any], facts: GenaiFacts) -> None:
    """Give a graph the inputs and outputs of ours, without what only its own mask needed."""
    from onnx import TensorProto, helper, numpy_helper

    names = {decoder["inputs"]["input_ids"]: "input_ids", decoder["outputs"]["logits"]: "logits"}
    for side, prefix in ((decoder["inputs"], "past"), (decoder["outputs"], "present")):
        theirs = [name for layer in range(facts.layers) for name in name_caches(side, prefix, layer)]
        names |= dict(zip(theirs, cache_names(LayerRange(0, facts.layers), prefix), strict=True))
    attention = next(node for node in graph.node if node.op_type == "GroupQueryAttention")
    names |= {attention.input[5]: _LENGTHS, attention.input[6]: _TOTAL}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [
            name if names.get(name) in (_LENGTHS, _TOTAL) else names.get(name, name) for name in node.output
        ]
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    nodes = list(graph.node)
    head = next(number for number, node in enumerate(nodes) if "logits" in node.output)
    graph.initializer.append(numpy_helper.from_array(np.array([-1, facts.hidden], np.int64), _ROWS_SHAPE))
    nodes[head:head] = [
        helper.make_node("Reshape", [nodes[head].input[0], _ROWS_SHAPE], [_FLAT]),
        helper.make_node("Gather", [_FLAT, _ROWS], [_WANTED], axis=0),
    ]
    nodes[head + 2].input[0] = _WANTED
    kept = _keep_needed(nodes, {value.name for value in graph.output})
    inputs = [value for value in graph.input if any(value.name in node.input for node in kept)]
    own = [
        (_LENGTHS, TensorProto.INT32, ["batch"]),
        (_TOTAL, TensorProto.INT32, []),
        (_ROWS, TensorProto.INT64, ["wanted"]),
    ]
    outputs = [value for value in graph.output if value.name != "logits"]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["wanted", facts.vocabulary_size])
    for field, values in (
        (graph.node, kept),
        (graph.input, [*inputs, *(helper.make_tensor_value_info(*each) for each in own)]),
        (graph.output, [logits, *outputs]),
        (graph.value_info, []),
    ):
        del field[:]
        field.extend(values)


def _keep_needed(nodes: list[Any], wanted: set[str]) -> list[Any]:
    """Return the nodes that some output needs, in their order."""
    kept: list[Any] = []
    needed = set(wanted)
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.insert(0, node)
            needed |= set(node.input)
    return kept


def find_linked_weights(prepared: Path, facts: dict[str, Any]) -> Path | None:
    """Return the directory that holds a linked graph's weights; None where they are beside it."""
    return (prepared / facts["data"]).resolve().parent if "linked" in facts else None


def refuse_part(facts: dict[str, Any], layers: LayerRange) -> None:
    """Refuse a range of a linked graph's layers. Raises ModelRefused."""
    if "linked" in facts and layers != LayerRange(0, facts["layers"]):
        raise ModelRefused(f"{facts['linked']}: its graph is its own, whose layers are not cut: leave shards out")
