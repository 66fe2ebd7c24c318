"""Directories of onnxruntime-genai: run as they are by onnx_rt, refused by name by all others and where nothing rolls
back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from adapters.contract import ModelRefused
from adapters.genai_facts import GENAI_CONFIG
from adapters.hf_directory import check_small_files
from orchestrator.planning.model_check import check_for_serving
from tests.support import tiny_models
from tests.support.environments import make_environment, run_there
from tests.support.own_graphs import GENAI, TEXT, GraphForm, compute, expect_refusal

# As it takes the transformers that is here; nothing of ours is built for it.
BUILDER = "onnxruntime-genai==0.18.0"


@pytest.fixture(scope="module")
def form() -> GraphForm:
    return GENAI


def test_a_check_has_one_runtime_for_it(own_graph: Path) -> None:
    check = check_for_serving(str(own_graph), Path(), 1 << 24)
    assert [verdict.runtime for verdict in check.runtimes if verdict.loads] == ["onnx_rt"]
    assert check.format == "onnxruntime-genai"
    assert "onnx_rt" in check.cluster_yaml


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / GENAI_CONFIG).read_text())
        for key, value in changes.items():
            place = config["model"] if key in config["model"] else config["model"]["decoder"]
            place[key] = value
        (directory / GENAI_CONFIG).write_text(json.dumps(config))

    return change


def edit_graph(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        model = onnx.load_model(directory / "model.onnx", load_external_data=False)
        change(model.graph)
        onnx.save_model(model, directory / "model.onnx")

    return harm


def rename_operation(old: str, new: str) -> Callable[[Path], None]:
    def change(graph: Any) -> None:
        for node in graph.node:
            node.op_type = new if node.op_type == old else node.op_type

    return edit_graph(change)


def add_input(graph: Any) -> None:
    graph.input.append(onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["b", "s"]))


def halve_caches(graph: Any) -> None:
    for value in graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def name_other_file(graph: Any) -> None:
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../weights.data" if entry.key == "location" else entry.value


def cut(directory: Path) -> None:
    graph = directory / "model.onnx"
    graph.write_bytes(graph.read_bytes()[: graph.stat().st_size // 2])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, r"model\.onnx: it is no whole graph"),
        (lambda directory: (directory / "model.onnx").unlink(), r"model\.onnx: cannot be read"),
        (lambda directory: (directory / "model.onnx.data").unlink(), r"model\.onnx\.data is missing"),
        (lambda directory: (directory / "tokenizer.json").unlink(), r"it has no tokenizer\.json\. Write one"),
        (edit_config(decoder={}), "it describes no decoder"),
        (edit_config(filename="../model.onnx"), "is no file beside it"),
        (edit_config(num_hidden_layers=-1), "num_hidden_layers: -1 is no whole number above 0"),
        (edit_config(num_hidden_layers=9), "nodes of GroupQueryAttention for 9 layers"),
        (edit_config(context_length=8), "a context of 8 tokens has no room"),
        (rename_operation("GroupQueryAttention", "MultiHeadAttention"), "0 nodes of GroupQueryAttention"),
        (edit_graph(add_input), "it reads position_ids"),
        (edit_graph(halve_caches), "not in float32, so it was made for another device"),
        (edit_graph(name_other_file), "not in one file beside it"),
        (rename_operation("MatMul", "MatMulNBits"), "it is no whole graph"),
        (rename_operation("MatMul", "Einsum"), "are not what a product gives"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    harm: Callable[[Path], None], words: str, own_graph_copy: Path
) -> None:
    harm(own_graph_copy)
    expect_refusal(GENAI, own_graph_copy, words)


def test_a_hubs_repository_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="Download it, and name the directory's path"):
        check_small_files(tmp_path, {GENAI_CONFIG, "model.onnx", "model.onnx.data", "tokenizer.json"})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_what_its_own_builder_writes_computes_what_it_was_built_to(precision: str, tmp_path: Path) -> None:
    source = tiny_models.write_model(tmp_path / "source", "qwen3")
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    plain = {key: value.get("content", value) if isinstance(value, dict) else value for key, value in tokenizer.items()}
    (source / "tokenizer_config.json").write_text(json.dumps(plain))  # transformers takes no other form
    python, built = make_environment(tmp_path / "venv", [BUILDER]), tmp_path / "built"
    places: list[str | Path] = ["-i", source, "-o", built, "-c", tmp_path / "cache"]
    run_there(python, "-m", "onnxruntime_genai.models.builder", *places, "-p", precision, "-e", "cpu")
    shutil.copy(source / "tokenizer.json", built)
    linked = compute(GENAI.load(built, tmp_path / "store"))
    whole = compute_as_exported(built)
    assert np.abs(linked - whole).max() <= 0.001 * whole.std()


def compute_as_exported(directory: Path) -> np.ndarray:
    """Return the logits of TEXT, as the graph gives them in one forward over an empty cache."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])
    decoder = json.loads((directory / GENAI_CONFIG).read_text())["model"]["decoder"]
    empty = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)
    caches = {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    given = {"input_ids": np.array([TEXT]), "attention_mask": np.ones((1, len(TEXT)), np.int64), **caches}
    return np.asarray(session.run(["logits"], given)[0][0])
