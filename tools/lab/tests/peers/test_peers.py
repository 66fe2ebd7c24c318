"""What engines beside ours are given: the file's exact values in the form that they read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from outrider_lab.peers import ort_genai, ov_genai
from outrider_lab.peers.contract import EngineMissing, PeerOptions
from outrider_lab.peers.convert import find_hf_directory, find_openvino_ir
from outrider_lab.peers.hf_export import describe_config, write_hf_directory
from outrider_lab.peers.llama_server import find_gguf

from adapters.contract import ModelRefused, Precision
from adapters.decoder.source import open_source
from adapters.decoder.spec import Rope
from adapters.hf_directory import open_weights
from adapters.quality import log_probabilities
from tests.support import tiny_gguf


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.meta.json").write_text(json.dumps({"bos_id": 1, "eos_id": 2}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_hugging_face_directory_holds_the_files_values(tmp_path, tokenizer, family):
    file, target = tmp_path / "tiny.gguf", tmp_path / "hf"
    target.mkdir()
    tiny = tiny_gguf.Tiny(family, bias=family == "qwen2", tied=True, kind=GGMLQuantizationType.Q4_1)
    tiny_gguf.write(file, tiny)
    write_hf_directory(file, tokenizer, target)
    exact, written = open_source(file, Precision.FP32), open_weights(target)
    near = {name: getattr(written.spec, name) for name in ("ropes", "query_scale")}
    assert written.spec == dataclasses.replace(exact.spec, **near)
    assert written.spec.query_scale == pytest.approx(exact.spec.query_scale)
    for ours, theirs in zip(exact.spec.ropes, written.spec.ropes, strict=True):
        assert theirs.inverse_frequencies == pytest.approx(ours.inverse_frequencies, rel=1e-4)
    for name in ("embedding", "0.query", "1.down", "final_norm"):
        assert np.array_equal(written.tensor(name).float32(), exact.tensor(name).float32())
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == 2
    assert (target / "tokenizer.json").is_file()


def test_what_no_plain_config_describes_is_refused(tmp_path):
    tiny_gguf.write(file := tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama"))
    spec = open_source(file).spec
    scaled = Rope(tuple(value / 8.0 for value in spec.ropes[0].inverse_frequencies))
    for wrong in ({"ropes": (scaled,) * spec.layers}, {"ropes": (spec.ropes[0], scaled)}, {"family": "gemma3"}):
        with pytest.raises(ModelRefused, match=r"Hugging Face directory|give that directory"):
            describe_config(dataclasses.replace(spec, **wrong))


def test_a_conversion_is_made_once_and_whole(tmp_path, tokenizer):
    tiny_gguf.write(file := tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama"))
    options = PeerOptions("plain", str(file), str(tokenizer), str(tmp_path / "work"), 2)
    found = find_hf_directory(options)
    kept = (found / "model.safetensors").stat().st_mtime_ns
    assert find_hf_directory(options) == found
    assert (found / "model.safetensors").stat().st_mtime_ns == kept
    (tokenizer / "tokenizer.meta.json").unlink()
    broken = dataclasses.replace(options, work=str(tmp_path / "other"))
    with pytest.raises(OSError, match=r"tokenizer\.meta\.json"):
        find_hf_directory(broken)
    left = {path.name for path in (tmp_path / "other").iterdir()}
    assert left <= {"digests.json"}, "nothing half-made is left"


def test_engines_are_given_all_files_of_a_split_model(tmp_path):
    pytest.importorskip("openvino_genai")
    tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.Tiny("llama"), tensors_each=11)
    first, second = tiny_gguf.list_split(tmp_path / "m.gguf")
    (other := tmp_path / "other").mkdir()
    given: list[list[bytes]] = []

    class Engine:
        @staticmethod
        def LLMPipeline(path: str, device: str, **_: object) -> None:  # the engine's name
            given.append([Path(path).read_bytes(), Path(path).with_name(second.name).read_bytes()])

    options = PeerOptions("plain", str(first), "", str(tmp_path / "work"), 1)
    made = find_openvino_ir(Engine, options)
    assert given == [[first.read_bytes(), second.read_bytes()]]
    assert find_openvino_ir(Engine, options) == made
    assert find_gguf(str(tmp_path)) == first
    tiny_gguf.write(other / "m.gguf", tiny_gguf.Tiny("llama", seed=6), tensors_each=11)
    tiny_gguf.list_split(other / "m.gguf")[1].replace(second)
    assert find_openvino_ir(Engine, options) != made


def test_engines_that_lack_something_say_what(tmp_path, monkeypatch):
    (directory := tmp_path / "hf").mkdir()
    options = PeerOptions("plain", str(directory), "", str(tmp_path / "work"), 1)
    pytest.importorskip("openvino_genai")
    with pytest.raises(EngineMissing, match="--model-of openvino_genai=DIR"):
        ov_genai.load(options)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_genai", None)
    with pytest.raises(EngineMissing, match="pip install onnxruntime-genai"):
        ort_genai.load(options)


def test_log_probabilities_are_of_the_tokens_that_follow():
    rows = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32))
    assert log_probabilities(rows + 3.0, [1, 2]) == pytest.approx(np.log([0.25, 0.8]), abs=1e-6)
