"""Directories of onnxruntime-genai: run as they are by onnx_rt, refused by name by all others and where nothing rolls
back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from adapters import registry
from adapters.contract import LayerRange, LoadedModel, LoadOptions, ModelRefused, NumericalClass, Precision, Segment
from adapters.genai_facts import GENAI_CONFIG, PADDING_ROWS
from adapters.hf_directory import check_small_files
from adapters.model_source import check_source, resolve
from adapters.model_store import ModelStore
from adapters.names import OWN_ADAPTERS
from adapters.variant import Variant
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.planning.model_check import check_for_serving
from orchestrator.planning.models import model_at_hand
from tests.support import tiny_models
from tests.support.model_rows import loads_models
from tests.support.tiny_genai import write_genai

OPTIONS = LoadOptions(
    kv_cache_bytes=1 << 24,
    slots=2,
    numerical_class=NumericalClass(Precision.FP32, Precision.FP32, 32, segment_rows=2, forward_rows=2),
)
TEXT = [(7 * place * place + 11 * place + 3) % 300 + 10 for place in range(48)]
PROMPT = 30
# As it takes the transformers that is here; nothing of ours is built for it.
BUILDER = "onnxruntime-genai==0.18.0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_genai(tmp_path_factory.mktemp("genai") / "My Tiny-ORT", "qwen3")


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def load(source: Path, store: Path, layers: LayerRange | None = None) -> LoadedModel:
    adapter: Any = registry.get("onnx_rt")
    prepared = ModelStore(store).prepare(
        resolve(str(source), Path()), Variant(adapter), lambda *_: None, needed_bytes=1
    )
    if layers is not None:
        return adapter.load_layers(prepared, OPTIONS, layers, lambda *_: None)
    return adapter.load(prepared, OPTIONS, lambda *_: None)


def compute(model: LoadedModel) -> np.ndarray:
    """Return the logits of TEXT: a prompt, six tokens that are taken back, and the rest one by one."""
    rows = [model.forward([Segment(0, 0, TEXT[:PROMPT], (0, PROMPT))]).logits.copy()]
    model.forward([Segment(0, PROMPT, [5] * 6, (0, 6))])
    for place in range(PROMPT, len(TEXT)):
        rows.append(model.forward([Segment(0, place, TEXT[place : place + 1], (0, 1))]).logits.copy())
    model.close()
    return np.concatenate(rows)


def test_it_is_a_source_with_the_sizes_of_its_model(directory: Path) -> None:
    file = resolve(str(directory), Path())
    facts = check_source(str(directory), Path(), "onnx_rt")
    same = check_source(f"{directory}-safetensors", Path(), "onnx_rt")
    assert facts is not None
    assert same is not None
    for name in ("family", "layers", "hidden", "heads", "vocabulary_size", "matrix_elements", "attention_elements"):
        assert getattr(facts, name) == getattr(same, name), name
    assert facts.context_length == same.context_length - PADDING_ROWS
    assert facts.count_kv_elements(facts.all_layers) == same.count_kv_elements(same.all_layers)
    assert file.weights_bytes == (directory / "model.onnx.data").stat().st_size


@loads_models(
    "onnx_rt", "onnxruntime-genai", {"qwen3": "Qwen3ForCausalLM"}, lambda place, name: write_genai(place / "ort", name)
)
def test_it_is_linked_and_computes_what_its_graph_does(directory: Path, tmp_path: Path) -> None:
    theirs = compute(load(Path(f"{directory}-safetensors"), tmp_path))
    assert (compute(load(directory, tmp_path)) == theirs).all()
    with pytest.raises(ModelRefused, match="layers are not cut: leave shards out"):
        load(directory, tmp_path, LayerRange(0, 2))


@pytest.mark.parametrize("adapter", [name for name in OWN_ADAPTERS if name not in ("onnx_rt", "simulated")])
def test_every_other_runtime_refuses_it_with_what_to_set(adapter: str, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"onnxruntime-genai's form.* Set adapter: onnx_rt\.$"):
        check_source(str(directory), Path(), adapter)
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {directory}\n  adapter: {adapter}\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: .*Set adapter: onnx_rt"):
        load_config(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("shards: [{layers: 2}, {layers: 2}]", "layers are not cut: leave shards out"),
        ("weights: int8", r"cluster\.yaml:4: model\.weights: .* run as it is; leave this out"),
    ],
)
def test_what_it_cannot_be_is_refused_by_the_configuration(
    keys: str, words: str, directory: Path, tmp_path: Path
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {directory}\n  adapter: onnx_rt\n  {keys}\n")
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def test_checks_and_plans_have_one_runtime_for_it(directory: Path, tmp_path: Path) -> None:
    check = check_for_serving(str(directory), Path(), 1 << 24)
    assert [verdict.runtime for verdict in check.runtimes if verdict.loads] == ["onnx_rt"]
    assert check.format == "onnxruntime-genai"
    assert "onnx_rt" in check.cluster_yaml
    planned = model_at_hand(str(directory), "", Path(), "auto", tmp_path / "store", adapter="auto")
    assert (planned.runtimes, planned.formats("cpu"), planned.whole) == (("onnx_rt",), ("as_file",), True)


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
def test_what_cannot_be_served_is_refused_by_name(harm: Callable[[Path], None], words: str, copy: Path) -> None:
    harm(copy)
    with pytest.raises(ModelRefused, match=words) as refusal:
        check_source(str(copy), Path(), "onnx_rt")
    assert "\n" not in str(refusal.value)


def test_a_hubs_repository_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="Download it, and name the directory's path"):
        check_small_files(tmp_path, {GENAI_CONFIG, "model.onnx", "model.onnx.data", "tokenizer.json"})


def test_safetensors_go_before_it(copy: Path) -> None:
    tiny_models.write_model(copy, "llama")
    assert GENAI_CONFIG not in {path.name for path in resolve(str(copy), Path()).content}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_what_its_own_builder_writes_computes_what_it_was_built_to(precision: str, tmp_path: Path) -> None:
    source = tiny_models.write_model(tmp_path / "source", "qwen3")
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    plain = {key: value.get("content", value) if isinstance(value, dict) else value for key, value in tokenizer.items()}
    (source / "tokenizer_config.json").write_text(json.dumps(plain))  # transformers takes no other form
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "zz_shared.pth").write_text(
        sysconfig.get_paths()["purelib"]
    )  # torch and transformers are those that are here
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", BUILDER], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"{BUILDER} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    built = tmp_path / "built"
    command = [
        python,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        source,
        "-o",
        built,
        "-p",
        precision,
        "-e",
        "cpu",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command += ["-c", tmp_path / "cache"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env=environment)
    shutil.copy(source / "tokenizer.json", built)
    linked = compute(load(built, tmp_path / "store"))
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
