"""`config check` on bad configurations and bad files: one line each, which names the key or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from tests.support import tiny_models
from tests.support.tiny_gguf import Tiny, write

Prepare = Callable[[Path], str]
SMALL = Tiny("llama", layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, vocabulary=8)
BYTES = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.scores": None}


def gguf(metadata: dict[str, Any] | None = None, tiny: Tiny = SMALL, extra: dict[str, Any] | None = None) -> Prepare:
    """A configuration of a GGUF file with something in it that is wrong."""

    def prepare(directory: Path) -> str:
        write(directory / "m.gguf", tiny, metadata, extra)
        return "model: {source: m.gguf}"

    return prepare


def raw_gguf(change: Callable[[bytes], bytes]) -> Prepare:
    def prepare(directory: Path) -> str:
        write(directory / "m.gguf", SMALL)
        (directory / "m.gguf").write_bytes(change((directory / "m.gguf").read_bytes()))
        return "model: {source: m.gguf}"

    return prepare


def model(
    name: str = "llama",
    *,
    adapter: str = "openvino_rt",
    drop: str = "",
    add: str = "",
    leave: str = "",
    more: str = "",
    **changes: Any,
) -> Prepare:
    """A configuration of a directory with something in it that is wrong: keys of config.json, tensors, files; `more`:
    its other sections."""

    def prepare(directory: Path) -> str:
        made = tiny_models.write_model(directory / "m", name)
        config = json.loads((made / "config.json").read_text()) | changes
        (made / "config.json").write_text(json.dumps(config))
        tensors = load_file(made / "model.safetensors")
        if drop:
            del tensors[drop]
        if add:
            tensors[add] = np.ones((2, 3), np.float32)
        save_file(tensors, made / "model.safetensors")
        if leave:
            (made / leave).unlink()
        return f"model: {{source: m, adapter: {adapter}}}{more}"

    return prepare


def beside(name: str, content: bytes) -> Prepare:
    """A configuration of a directory with a small file of another content."""

    def prepare(directory: Path) -> str:
        (tiny_models.write_model(directory / "m", "llama") / name).write_bytes(content)
        return "model: {source: m}"

    return prepare


def draft(write_draft: Callable[[Path], Any], source: str = "d.gguf", more: str = "") -> Prepare:
    """A configuration of a good target with a draft that cannot serve."""

    def prepare(directory: Path) -> str:
        write(directory / "m.gguf", SMALL)
        write_draft(directory)
        return f"model: {{source: m.gguf}}\ndrafts: [{{method: model, source: {source}{more}}}]"

    return prepare


def text(content: str) -> Prepare:
    """A configuration whose own keys are wrong."""
    return lambda directory: content


def write_reduced(directory: Path) -> str:
    from device_profiles.workload import vocabulary_fingerprint

    source = tiny_models.write_model(directory / "whole", "llama")
    tiny_models.write_reduced(directory / "m", source, np.arange(64), vocabulary_fingerprint(["a"]))
    return "model: {source: m}"


def write_pickle(directory: Path) -> str:
    (directory / "m.bin").write_bytes(b"x")
    return "model: {source: m.bin}"


CASES: dict[str, tuple[Prepare, str]] = {
    # what a GGUF file is
    "a lora": (gguf({"general.type": "adapter", "adapter.type": "lora"}), "general.type"),
    "a projector": (gguf({"general.type": "mmproj"}), "general.type"),
    "a part": (gguf({"split.count": 3}), "split.count"),
    "an architecture": (gguf(tiny=Tiny("gptneox", layers=1)), "general.architecture"),
    "experts": (gguf({"expert_count": 8}), "llama.expert_count"),
    "truncated": (raw_gguf(lambda raw: raw[:-4000]), "m.gguf: it is truncated"),
    "cut in its head": (raw_gguf(lambda raw: raw[:300]), "m.gguf: its metadata is cut short"),
    "no gguf": (raw_gguf(lambda raw: b"PK" + raw), "m.gguf: it is not a GGUF file"),
    # what a GGUF file says
    "no layers": (gguf({"block_count": None}), "llama.block_count"),
    "a text for a number": (gguf({"context_length": "long"}), "llama.context_length"),
    "uneven heads": (gguf({"attention.head_count_kv": [1, 2]}), "llama.attention.head_count_kv"),
    "heads that do not divide": (gguf({"attention.head_count_kv": 3}), "llama.attention.head_count_kv"),
    "an unknown scaling": (gguf({"rope.scaling.type": "longrope"}), "llama.rope.scaling.type"),
    "a base below zero": (gguf({"rope.freq_base": -1.0}), "llama.rope.freq_base"),
    "half a rope": (gguf({"rope.dimension_count": 8}), "llama.rope.dimension_count"),
    "a scale of logits": (gguf({"logit_scale": 0.1}), "llama.logit_scale"),
    "a key of tomorrow": (gguf({"attention.gate_type": "swish"}), "llama.attention.gate_type"),
    # its tensors
    "a tensor less": (gguf(extra={"blk.0.attn_k.weight": None}), "blk.0.attn_k.weight"),
    "a tensor more": (gguf(extra={"blk.0.attn_sinks.weight": np.ones(2, np.float32)}), "blk.0.attn_sinks.weight"),
    "a tensor of another shape": (gguf(extra={"output_norm.weight": np.ones(31, np.float32)}), "output_norm.weight"),
    "factors of another length": (gguf(extra={"rope_freqs.weight": np.ones(3, np.float32)}), "rope_freqs.weight"),
    "a tensor of integers": (gguf(extra={"output_norm.weight": np.ones(32, np.int32)}), "output_norm.weight"),
    # its vocabulary
    "an unknown cut": (gguf(BYTES | {"tokenizer.ggml.pre": "cut-of-tomorrow"}), "tokenizer.ggml.pre"),
    "no merges": (gguf(BYTES), "tokenizer.ggml.merges"),
    "tokens without rows": (gguf({"tokenizer.ggml.tokens": ["a", "b"]}), "tokenizer.ggml.tokens"),
    "another kind of tokenizer": (gguf({"tokenizer.ggml.model": "rwkv"}), "'rwkv'"),
    "a template of a number": (gguf({"tokenizer.chat_template": 5}), "tokenizer.chat_template"),
    "an unknown token outside": (gguf({"tokenizer.ggml.unknown_token_id": 9}), "tokenizer.ggml.unknown_token_id"),
    "a name of a number": (gguf({"general.basename": "m", "general.name": 5}), "general.name"),
    "a space of a number": (gguf({"tokenizer.ggml.add_space_prefix": 5}), "tokenizer.ggml.add_space_prefix"),
    # directories
    "a list for a generation": (beside("generation_config.json", b"[]"), "generation_config.json"),
    "a broken tokenizer": (beside("tokenizer_config.json", b"{"), "tokenizer_config.json"),
    "a tokenizer of a text": (beside("tokenizer_config.json", b'"x"'), "tokenizer_config.json"),
    "a template of bytes": (beside("chat_template.jinja", b"\xff\xfe{{"), "chat_template.jinja"),
    "an architecture of code": (model(architectures=["MyModel"], auto_map={"AutoModel": "x.py"}), "auto_map"),
    "already quantised": (model(quantization_config={"bits": 4}), "quantization_config"),
    "a text in yarn": (
        model(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}),
        "rope_scaling: beta_fast",
    ),
    "no size": (model(hidden_size=None), "hidden_size"),
    "a text for a flag": (model(tie_word_embeddings="no"), "tie_word_embeddings"),
    "a tensor less in a directory": (
        model(drop="model.layers.1.mlp.up_proj.weight"),
        "model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor more in a directory": (model(add="model.layers.0.extra.weight"), "model.layers.0.extra.weight"),
    "other sizes": (model(intermediate_size=32), "model.layers.0.mlp.gate_proj.weight"),
    "no tokenizer": (model(leave="tokenizer.json"), "tokenizer.json"),
    "a cap that OpenVINO has not": (model("gemma2"), "attn_logit_softcapping"),
    "a cap that ONNX Runtime has not": (model("gemma2-uncapped", adapter="onnx_rt"), "final_logit_softcapping"),
    "a cap that a standby has not": (
        model("gemma2-uncapped", more="\nfailover: {standby: [{device: CPU}, {adapter: onnx_rt}]}"),
        "failover.standby[1].adapter: m: gemma2 with soft-capped logits",
    ),
    "vocabularies apart": (model(vocab_size=200), "model.embed_tokens.weight"),
    # drafts
    "a draft of another vocabulary": (
        draft(lambda at: write(at / "d.gguf", SMALL, tokens=["other", *(f"t{index}" for index in range(1, 8))])),
        "drafts[0].source",
    ),
    "a draft of another architecture": (
        draft(lambda at: write(at / "d.gguf", Tiny("mamba", layers=1))),
        "drafts[0].source: d.gguf: general.architecture",
    ),
    "a draft with a tensor less": (
        draft(lambda at: write(at / "d.gguf", SMALL, extra={"blk.0.ffn_up.weight": None})),
        "blk.0.ffn_up.weight",
    ),
    "a draft that is not there": (draft(lambda at: None, "models/d.gguf"), "drafts[0].source"),
    "a draft of few outputs as the target": (
        write_reduced,
        "draft_vocab_size",
    ),
    # the configuration
    "a file that is not there": (text("model: {source: ./models/foo.gguf}"), "model.source: ./models/foo.gguf"),
    "no such package": (text("model: {source: 'package:no_such_thing_9f/x.gguf'}"), "model.source"),
    "a pickle": (write_pickle, "model.source"),
    "a key that is none": (text("model: {source: 'simulated:toy', adapter: simulated, wieghts: int8}"), "wieghts"),
    "a unit that is none": (
        text("model: {source: 'simulated:toy', adapter: simulated}\nlimits: {kv_cache: 3 bananas}"),
        "limits.kv_cache",
    ),
    "simulated on another adapter": (text("model: {source: 'simulated:toy', adapter: onnx_rt}"), "model.source"),
}


def test_there_are_forty() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_told_in_one_line_by_its_key_or_tensor(outrider, tmp_path: Path, case: str) -> None:
    prepare, named = CASES[case]
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{prepare(tmp_path)}\nstore: {{directory: {tmp_path / 'store'}}}\n")
    done = outrider("config", "check", path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert named in lines[0]
    assert f"{path}:" in lines[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_good_file_passes(outrider, tmp_path: Path, family: str, kind: Kind) -> None:
    tiny = Tiny(family, layers=1, kind=kind, qk_norm=family == "qwen3", bias=family == "qwen2")
    write(tmp_path / "m.gguf", tiny, {"general.type": "model"})
    (tmp_path / "c.yaml").write_text(f"model: {{source: m.gguf}}\nstore: {{directory: {tmp_path / 'store'}}}\n")
    assert outrider("config", "check", tmp_path / "c.yaml").returncode == 0


@pytest.mark.parametrize(
    ("source", "told", "not_told"),
    [
        ("./models/foo.gguf", "there is no directory", "hf:"),
        ("models/foo.gguf", "there is no directory", "write hf:models/foo.gguf"),
        ("there/smallm.gguf", "there is no smallm.gguf in", "write hf:"),
        ("there/smallm.gguf", "but small.gguf", "write hf:"),
        ("there/other.gguf", "which holds small.gguf", "write hf:"),
        ("org/name", "write hf:org/name", "holds"),
        ("org/name/sub/q4.gguf", "write hf:org/name/sub/q4.gguf", "holds"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_there(outrider, tmp_path, source, told, not_told):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "small.gguf").touch()
    (tmp_path / "c.yaml").write_text(f"model: {{source: {source}}}\n")
    error = outrider("config", "check", tmp_path / "c.yaml").stderr
    assert told in error
    assert not_told not in error.replace(", or hf:ORG/NAME for a model", "")
