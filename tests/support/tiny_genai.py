"""Tiny random models as directories of onnxruntime-genai, in the form that its model builder writes for CPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from adapters import registry
from adapters.contract import silent
from adapters.decoder.source import open_source
from adapters.genai_facts import GENAI_CONFIG
from adapters.onnx_rt.graph import cache_names
from tests.support import tiny_models
from tests.support.tiny_ir import TOKENIZER_FILES

_LENGTHS, _TOTAL = "mask/lengths", "mask/total"


def write_genai(directory: Path, name: str, **changes: Any) -> Path:
    """Write a model of tests/support/tiny_models.py as such a directory with its tokenizer, and return it. The same
    model's safetensors lie beside it, in DIRECTORY-safetensors."""
    source = tiny_models.write_model(directory.with_name(f"{directory.name}-safetensors"), name, **changes)
    directory.mkdir()
    adapter: Any = registry.get("onnx_rt")
    adapter.prepare(source, directory, silent)
    spec = open_source(source).spec
    (directory / "spec.json").unlink()
    (directory / "weights.bin").rename(directory / "model.onnx.data")
    model = onnx.load_model(directory / "model.onnx", load_external_data=False)
    _give_their_form(model.graph, cache_names(spec.all_layers, "past"))
    onnx.save_model(model, directory / "model.onnx")
    for file in TOKENIZER_FILES:
        shutil.copy(source / file, directory)
    for note in directory.glob("*.kept"):
        note.unlink()
    caches = {
        f"{side}_{kind}_names": f"{word}.%d.{kind}"
        for side, word in (("past", "past_key_values"), ("present", "present"))
        for kind in ("key", "value")
    }
    decoder = {
        "filename": "model.onnx",
        "head_size": spec.head_dim,
        "hidden_size": spec.hidden,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"}
        | {key: name for key, name in caches.items() if key.startswith("past")},
        "outputs": {"logits": "logits"} | {key: name for key, name in caches.items() if key.startswith("present")},
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
    }
    about = {"type": name, "context_length": spec.context_length, "vocab_size": spec.vocabulary_size}
    (directory / GENAI_CONFIG).write_text(json.dumps({"model": about | {"decoder": decoder}}, indent=1))
    return directory


def _give_their_form(graph: Any, caches: list[str]) -> None:
    """Make lengths of a mask, give logits of every row, and call keys and values as the builder does."""
    names = {name: name.replace("past.", "past_key_values.") for name in caches}
    names |= {"seqlens_k": _LENGTHS, "total_sequence_length": _TOTAL}
    makers = {name: node for node in graph.node for name in node.output}
    rows = next(node for node in graph.node if "wanted_rows" in node.input)
    flat = makers[rows.input[0]]
    names |= {rows.output[0]: flat.input[0]}
    kept = [node for node in graph.node if node is not rows and node is not flat]
    for node in kept:
        node.input[:] = [names.get(name, name) for name in node.input]
    for name, value in (("mask/one", np.array([1], np.int64)), ("mask/place", np.array(1, np.int64))):
        graph.initializer.append(numpy_helper.from_array(value, name))
    mask = [
        helper.make_node("ReduceSum", ["attention_mask", "mask/one"], ["mask/sum"]),
        helper.make_node("Sub", ["mask/sum", "mask/one"], ["mask/less"]),
        helper.make_node("Cast", ["mask/less"], [_LENGTHS], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask/shape"]),
        helper.make_node("Gather", ["mask/shape", "mask/place"], ["mask/width"], axis=0),
        helper.make_node("Cast", ["mask/width"], [_TOTAL], to=TensorProto.INT32),
    ]
    inputs = [value for value in graph.input if value.name not in ("seqlens_k", "total_sequence_length", "wanted_rows")]
    for value in inputs:
        value.name = names.get(value.name, value.name)
    inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]))
    logits = next(value for value in graph.output if value.name == "logits")
    width = logits.type.tensor_type.shape.dim[-1].dim_value
    logits.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", width]))
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            entry.value = "model.onnx.data" if entry.key == "location" else entry.value
    for field, values in ((graph.node, [*mask, *kept]), (graph.input, inputs)):
        del field[:]
        field.extend(values)
