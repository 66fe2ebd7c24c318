"""Models of the hub arrive whole, once, at one commit; whatever goes wrong is told in a line with the way out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from adapters.contract import ModelRefused
from adapters.hf_hub import HubId, parse_id
from tests.adapters.test_model_source import write_gguf
from tests.support import tiny_models
from tests.support.daemon import outrider_process
from tests.support.hub_server import Hub, serving
from tests.support.tiny_gguf import Tiny, list_split, write
from tests.support.tiny_ir import write_ir
from tests.support.tiny_llama_files import write_llama_file

ROOT = Path(__file__).parents[2]
# In a process of its own, because the library reads its environment once, when it is imported.
RESOLVE = """
import json, os, sys
from pathlib import Path
from adapters.contract import AdapterError
from adapters.model_source import resolve
stages = []
for source in sys.argv[1:]:
    stages.clear()
    try:
        told = lambda stage, fraction: stages.append((stage, fraction))
        found = resolve(source, Path(), told, os.environ.get("ADAPTER", "openvino_rt"))
        said = {"name": found.name, "source": found.source, "path": str(found.path),
                "files": [path.name for path in found.files], "stages": stages}
    except AdapterError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(said), flush=True)
"""
LARGE = "model.safetensors"
LARGE_BYTES = 26 << 20  # the library writes in pieces of 10 MiB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tiny_models.write_model(tmp_path_factory.mktemp("tiny") / "m", "qwen3", kind="F16", shards=2)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf").read_bytes()


@pytest.fixture
def hub(files: dict[str, bytes], gguf: bytes) -> Iterator[Hub]:
    noise = {"README.md": b"words", "pytorch_model.bin": b"pickle", "consolidated.safetensors": bytes(100)}
    small = {name: raw for name, raw in files.items() if "safetensors" not in name}
    models = {
        "org/Tiny": files | noise | {"onnx/model.onnx": b"graph"},
        "org/pickle": small | {"pytorch_model.bin": b"pickle"},
        "org/gated": dict(files),
        "org/ggufs": {"q4/small-Q4_1.gguf": gguf, "config.txt": b""},
        "org/strange": small | {"config.json": b'{"architectures": ["MyModel"], "auto_map": {}}', LARGE: b""},
        "org/code": small | {"config.json": b'{"architectures": ["MyModel"], "auto_map": {"AutoModel": "x.MyModel"}}'},
    }
    with serving(Hub(models, gated={"org/gated"})) as served:
        yield served


def environment(hub: Hub, home: Path, **changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)} | changes


def check_config(hub: Hub, home: Path, config: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return run_outrider(hub, home, "config", "check", str(config), **changes)


def run_outrider(hub: Hub, home: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a program that has yet to import the hub's library."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
            patch.delenv(name)
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **changes}.items():
            patch.setenv(name, value)
        return outrider_process(*arguments)


def resolve_sources(hub: Hub, home: Path, *sources: str, **changes: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *sources],
        env=environment(hub, home, **changes),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:org/name", HubId("org/name", "main")),
        ("hf:org/name-1.5B_x@v1.0", HubId("org/name-1.5B_x", "v1.0")),
        ("hf:org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("hf:org/name/q4/x-Q4_1.gguf@v1", HubId("org/name", "v1", "q4/x-Q4_1.gguf")),
    ],
)
def test_ids(source: str, expected: HubId) -> None:
    assert parse_id(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "hf:",
        "hf:name",
        "hf:a/b/c",
        "hf:a/b@",
        "hf:a/..",
        "hf:../b",
        "hf:a/b/c.bin",
        "hf:a/b/../c.gguf",
        "hf:a/b c",
        "hf:a/b@x y",
    ],
)
def test_what_is_no_id(source: str) -> None:
    with pytest.raises(ModelRefused, match="write hf:ORG/NAME"):
        parse_id(source)


def test_a_model_comes_once_and_stays_at_its_commit(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    first, again = resolve_sources(hub, tmp_path, "hf:org/Tiny", "hf:org/Tiny")
    commit = hub.commit("org/Tiny")
    assert first["source"] == f"hf:org/Tiny@{commit}"
    assert first["name"] == "tiny"
    assert Path(first["path"]) == tmp_path / "hub" / "models--org--Tiny" / "snapshots" / commit
    assert set(first["files"]) == set(files)
    assert {path.name for path in Path(first["path"]).iterdir()} == set(files)  # no pickle, no README, no onnx
    assert first["stages"][-1] == ["download org/Tiny", 1.0]
    assert [fraction for _, fraction in first["stages"]] == sorted(fraction for _, fraction in first["stages"])
    assert again == first | {"stages": []}
    assert all(len(hub.downloads(f"/{name}")) == 1 for name in files)
    hub.requests.clear()
    hub.models["org/Tiny"]["config.json"] += b" "  # the hub moves on; this machine stays where it is
    (later, offline) = (
        resolve_sources(hub, tmp_path, "hf:org/Tiny")[0],
        resolve_sources(hub, tmp_path, "hf:org/Tiny", HF_HUB_OFFLINE="1")[0],
    )
    assert later == offline == again
    assert hub.requests == []
    (moved,) = resolve_sources(hub, tmp_path, f"hf:org/Tiny@{hub.commit('org/Tiny')}")
    assert moved["source"].endswith(hub.commit("org/Tiny"))
    assert moved["source"] != first["source"]


def test_one_gguf_file_of_a_model(hub: Hub, tmp_path: Path, gguf: bytes) -> None:
    source = "hf:org/ggufs/q4/small-Q4_1.gguf"
    first, again = resolve_sources(hub, tmp_path, source, source)
    assert first["source"] == f"{source}@{hub.commit('org/ggufs')}"
    assert Path(first["path"]).read_bytes() == gguf
    assert (first["name"], first["files"]) == ("small", [])
    assert again == first | {"stages": []}
    assert len(hub.downloads("small-Q4_1.gguf")) == 1


def split_model(directory: Path) -> dict[str, bytes]:
    """A model of megabytes in three files, the first with its metadata alone."""
    directory.mkdir()
    tiny = Tiny("llama", layers=1, vocabulary=8, hidden=512, mlp=4096)
    write(directory / "m-Q4_0.gguf", tiny, tensors_each=6, bare_first=True)
    return {path.name: path.read_bytes() for path in list_split(directory / "m-Q4_0.gguf")}


def test_all_files_of_a_split_model_come_by_the_name_of_the_first(hub: Hub, tmp_path: Path) -> None:
    split = split_model(tmp_path / "m")
    first, *others = split
    hub.models["org/split"] = {f"q4/{name}": raw for name, raw in split.items()} | {"q4/other.gguf": b"GGUF"}
    source = f"hf:org/split/q4/{first}"
    come, again, offline = (
        *resolve_sources(hub, tmp_path, source, source),
        *resolve_sources(hub, tmp_path, source, HF_HUB_OFFLINE="1"),
    )
    assert (come["name"], come["files"]) == ("m", list(split))
    assert come["source"] == f"{source}@{hub.commit('org/split')}"
    assert {name: Path(come["path"]).with_name(name).read_bytes() for name in split} == split
    assert come["stages"][-1] == ["download org/split", 1.0]
    assert [fraction for _, fraction in come["stages"]] == sorted(fraction for _, fraction in come["stages"])
    assert again == offline == come | {"stages": []}
    assert all(len(hub.downloads(f"/{name}")) == 1 for name in split)
    assert hub.downloads("/other.gguf") == []
    (other,) = resolve_sources(hub, tmp_path, f"hf:org/split/q4/{others[0]}")
    assert f"Name the first one: {first}" in other["text"]


def test_a_model_in_openvinos_form_comes_once_and_its_graph_before_its_weights(hub: Hub, tmp_path: Path) -> None:
    directory = write_ir(tmp_path / "ir", "llama")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    states = files["openvino_model.xml"].replace(b'variable_shape="?,4,?,32"', b'variable_shape="?,64,4"')
    noise = {"openvino_detokenizer.xml": b"graph", "openvino_tokenizer.xml": b"graph", "onnx/model.onnx": b"graph"}
    hub.models |= {"OpenVINO/tiny-int4-ov": files | noise, "org/recurrent": files | {"openvino_model.xml": states}}
    source = "hf:OpenVINO/tiny-int4-ov"
    first, again = resolve_sources(hub, tmp_path, source, source)
    assert (first["name"], set(first["files"])) == ("tiny-int4-ov", set(files))
    assert again == first | {"stages": []}
    assert len(hub.downloads("openvino_model.bin")) == 1
    (refused,) = resolve_sources(hub, tmp_path, "hf:org/recurrent")
    assert "in a state (past_key_values." in refused["text"]
    config = tmp_path / "c.yaml"
    for adapter, words in (("openvino_rt", ""), ("torch_device", "Set adapter: openvino_rt")):
        config.write_text(f"model: {{source: '{source}', adapter: {adapter}}}\n")
        done = check_config(hub, tmp_path, config, XDG_STATE_HOME=str(tmp_path / "state"))
        assert (done.returncode, words in done.stderr) == (1 if words else 0, True), done.stderr
    assert len(hub.downloads("openvino_model.bin")) == 1


def test_faults_of_a_split_model_are_told_before_the_weights_are_asked_for(hub: Hub, tmp_path: Path) -> None:
    split = split_model(tmp_path / "m")
    first, second, third = split
    hub.models |= {
        "org/less": {first: split[first], third: split[third]},
        "org/mixed": {first: split[first], second: split[third], third: split[second]},
        "org/cut": split | {third: split[third][:-5000]},
        "org/whole": dict(split),
    }
    wanted = {
        f"hf:org/less/{first}": [f"{second} is missing, one of the files of a split model"],
        f"hf:org/mixed/{first}": [f"{second}: split.no: it is 2"],
        f"hf:org/cut/{first}": [f"{third}: it is truncated"],
        f"hf:org/whole/{second}": ["file 2 of 3", f"Name the first one: {first}"],
        "hf:org/whole/m.gguf": [f"GGUF files of the model: {first}."],
    }
    for words, answer in zip(wanted.values(), resolve_sources(hub, tmp_path, *wanted), strict=True):
        assert answer["error"] == "ModelRefused", answer
        assert all(word in answer["text"] for word in words), answer["text"]
    config = tmp_path / "c.yaml"
    for source, told in ((f"hf:org/whole/{first}", ""), (f"hf:org/whole/{third}", f"Name the first one: {first}")):
        drafts = f"drafts: [{{method: model, source: {source}}}]"
        config.write_text(f"model: {{source: 'hf:org/whole/{first}'}}\n{drafts}\n")
        done = check_config(hub, tmp_path, config, XDG_STATE_HOME=str(tmp_path / "state"))
        assert (done.returncode, told in done.stderr) == (1 if told else 0, True), done.stderr
    assert hub.downloads(".gguf") == []


def test_what_goes_wrong_is_told_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    sources = {
        "hf:org/none": ("ModelRefused", ["no such model", "HF_TOKEN"]),
        "hf:org/na--me": ("ModelRefused", ["na--me", "Cannot have --"]),
        "hf:org/gated": ("ModelRefused", ["gated", f"{hub.url}/org/gated", "hf auth login"]),
        "hf:org/ggufs": ("ModelRefused", ["no config.json", "GGUF", "q4/small-Q4_1.gguf"]),
        "hf:org/ggufs/other.gguf": ("ModelRefused", ["no such file", "q4/small-Q4_1.gguf"]),
        "hf:org/Tiny@v9": ("ModelRefused", ["no such revision", "v9"]),
        "hf:org/pickle": ("ModelRefused", ["pytorch_model.bin", "pickle", "save_pretrained"]),
        "hf:org/strange": ("ModelRefused", ["MyModel", "no decoder"]),
        "hf:org/code": ("ModelRefused", ["MyModel", "auto_map", "never run"]),
    }
    for (source, (kind, words)), answer in zip(sources.items(), resolve_sources(hub, tmp_path, *sources), strict=True):
        assert answer["error"] == kind, answer
        assert answer["text"].startswith(source.partition("@")[0])
        assert all(word in answer["text"] for word in words), answer["text"]
        assert "\n" not in answer["text"]
    assert hub.downloads(LARGE) == []  # a model that cannot be run costs no gigabytes
    (offline,) = resolve_sources(hub, tmp_path, "hf:org/none", HF_HUB_OFFLINE="1")
    assert (offline["error"], "HF_HUB_OFFLINE" in offline["text"]) == ("DownloadFailed", True)
    (unreachable,) = resolve_sources(hub, tmp_path, "hf:org/none", HF_ENDPOINT="http://127.0.0.1:9")
    assert (unreachable["error"], "Check the network" in unreachable["text"]) == ("DownloadFailed", True)


def test_a_configuration_names_its_line(hub: Hub, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("# a comment\nmodel:\n  source: hf:org/none\n")
    done = check_config(hub, tmp_path, config)
    assert done.returncode == 1
    assert f"{config}:3: model.source: hf:org/none@main: there is no such model" in done.stderr
    assert check_config(hub, tmp_path, config, HF_HUB_OFFLINE="1").returncode == 0  # no fault of the file


def test_templates_are_tried_without_the_weights(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    tiny = Tiny("llama", layers=1, vocabulary=8, hidden=512, mlp=4096)
    write(tmp_path / "m.gguf", tiny, {"tokenizer.chat_template": "{{ 1 | frobnicate }}"})
    hub.models["org/file"] = {"m.gguf": (tmp_path / "m.gguf").read_bytes()}
    hub.models["org/directory"] = files | {"chat_template.jinja": b"{{ 1 | frobnicate }}"}
    config = tmp_path / "c.yaml"
    for source in ("hf:org/file/m.gguf", "hf:org/directory"):
        config.write_text(f"model:\n  source: {source}\n")
        for changes in ({}, {"HF_HUB_OFFLINE": "1"}):
            done = check_config(hub, tmp_path, config, XDG_STATE_HOME=str(tmp_path / "state"), **changes)
            assert done.returncode == 0
            if not changes or source == "hf:org/directory":  # its small files are here now
                assert f"{config}:2: model.source: chats with it will be refused" in done.stderr
                assert "frobnicate" in done.stderr
    for name in ("m.gguf", *(name for name in files if name.endswith(".safetensors"))):
        assert hub.downloads(f"/{name}") == []


def bad_ggufs(directory: Path) -> dict[str, bytes]:
    """GGUF files that cannot be served, and whose heads say so."""
    tiny = Tiny("llama", layers=1, vocabulary=8, hidden=512, mlp=4096)  # megabytes of weights
    byte_level = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "cut-of-tomorrow"}
    made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "cut.gguf": (byte_level, {}),
        "experts.gguf": ({"expert_count": 8}, {}),
        "lora.gguf": ({"general.type": "adapter"}, {}),
        "factors.gguf": ({}, {"rope_freqs.weight": np.ones(5, np.float32)}),
        "less.gguf": ({}, {"blk.0.ffn_up.weight": None}),
    }
    for name, (metadata, extra) in made.items():
        write(directory / name, tiny, metadata, extra)
    return {name: (directory / name).read_bytes() for name in made}


def test_heads_are_read_before_the_weights(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.models["org/bad"] = bad_ggufs(tmp_path)
    less = load(files[first := next(name for name in files if name.endswith("1-of-00002.safetensors"))])
    missing = next(iter(less))
    hub.models["org/less"] = files | {first: save({name: tensor for name, tensor in less.items() if name != missing})}
    wanted = {
        "hf:org/bad/cut.gguf": "tokenizer.ggml.pre",
        "hf:org/bad/experts.gguf": "llama.expert_count",
        "hf:org/bad/lora.gguf": "general.type",
        "hf:org/bad/factors.gguf": "rope_freqs.weight",
        "hf:org/bad/less.gguf": "blk.0.ffn_up.weight",
        "hf:org/less": missing,
    }
    for (source, words), answer in zip(wanted.items(), resolve_sources(hub, tmp_path, *wanted), strict=True):
        assert answer["error"] == "ModelRefused", answer
        assert words in answer["text"]
        name = source.partition("org/bad/")[2]
        assert sum(len(hub.models["org/bad"][file]) for file in [name] if file) > 4 << 20 or not name
    for name in (*hub.models["org/bad"], *(name for name in files if name.endswith(".safetensors"))):
        assert hub.downloads(f"/{name}") == []
        assert len(hub.heads(f"/{name}")) == 1


def test_what_only_llama_cpp_runs_is_downloaded_for_it_alone(hub: Hub, tmp_path: Path) -> None:
    raw = write_llama_file(tmp_path, "lfm2").read_bytes()
    hub.models["org/lfm2"] = {"m.gguf": raw}
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/lfm2/m.gguf")
    assert answer["text"].endswith("set adapter: llama_cpp.")
    assert hub.downloads("m.gguf") == []
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/lfm2/m.gguf", ADAPTER="llama_cpp", OUTRIDER_LIBLLAMA=__file__)
    assert Path(answer["path"]).read_bytes() == raw


def test_a_head_of_several_megabytes_comes_in_ranges(hub: Hub, tmp_path: Path) -> None:
    """A vocabulary makes a head longer than the first range; what is bad stands behind it."""
    tiny = Tiny("llama", layers=1, vocabulary=90_000, hidden=64, mlp=64, heads=2, kv_heads=1)
    write(tmp_path / "wide.gguf", tiny, extra={"blk.0.ffn_up.weight": None})
    hub.models["org/wide"] = {"wide.gguf": (tmp_path / "wide.gguf").read_bytes()}
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/wide/wide.gguf")
    assert "blk.0.ffn_up.weight" in answer["text"]
    assert hub.heads("wide.gguf") == ["bytes=0-1048575", "bytes=1048576-4194303"]
    assert hub.downloads("wide.gguf") == []


def test_config_check_reads_the_heads_of_models_of_the_hub(hub: Hub, tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "bad").mkdir()
    hub.models["org/bad"] = bad_ggufs(tmp_path / "bad")
    config = tmp_path / "c.yaml"
    for source, draft, words in (
        ("hf:org/bad/experts.gguf", "", "model.source: experts.gguf: llama.expert_count"),
        ("hf:org/ggufs/q4/small-Q4_1.gguf", "hf:org/bad/less.gguf", "drafts[0].source: less.gguf: it lacks"),
        ("hf:org/ggufs/q4/small-Q4_1.gguf", "hf:org/Tiny", "drafts[0].source: hf:org/Tiny: the target's vocabulary"),
        ("hf:org/Tiny", "hf:org/Tiny", ""),
    ):
        drafts = f"\ndrafts: [{{method: model, source: {draft}}}]" if draft else ""
        config.write_text(f"model: {{source: {source}}}{drafts}\nstore: {{directory: {tmp_path / 'store'}}}\n")
        done = check_config(hub, tmp_path, config)
        assert (done.returncode, len(done.stderr.splitlines())) == ((1, 1) if words else (0, 0)), done.stderr
        assert words in done.stderr
    assert hub.downloads(".gguf") == []
    assert hub.downloads(".safetensors") == []


def test_models_check_reads_heads_alone(hub: Hub, tmp_path: Path, files: dict[str, bytes], gguf: bytes) -> None:
    draft = "hf:org/ggufs/q4/small-Q4_1.gguf"
    done = run_outrider(hub, tmp_path, "models", "check", "hf:org/Tiny", "--draft", draft, "--json")
    answer = json.loads(done.stdout)
    weights = sum(len(raw) for name, raw in files.items() if name.endswith(".safetensors"))
    loading = {verdict["runtime"]: verdict["weights_bytes"] for verdict in answer["runtimes"] if verdict["loads"]}
    assert set(loading.values()) == {weights}
    assert "llama_cpp" not in loading
    assert (answer["architecture"], answer["drafts"][0]["match"]) == ("Qwen3ForCausalLM", "differs")
    assert "source: hf:org/Tiny" in answer["cluster_yaml"]
    whole = json.loads(run_outrider(hub, tmp_path, "models", "check", draft, "--json").stdout)
    assert {verdict["weights_bytes"] for verdict in whole["runtimes"]} == {len(gguf)}
    assert hub.downloads(".gguf") == []
    assert hub.downloads(".safetensors") == []
    away = run_outrider(hub, tmp_path / "new", "models", "check", "hf:org/Tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert (away.returncode, len(away.stderr.splitlines())) == (1, 1)
    assert "cannot be downloaded from" in away.stderr


def enlarge(raw: bytes) -> bytes:
    """Add a tensor that nobody reads to a file of weights, so that it takes a while."""
    wide = np.random.default_rng(0).standard_normal(LARGE_BYTES // 4).astype(np.float32)
    return save(load(raw) | {"model.layers.0.self_attn.rotary_emb.inv_freq": wide})


def large(files: dict[str, bytes]) -> dict[str, bytes]:
    """A repository with one large file of weights."""
    small = {name: raw for name, raw in files.items() if "safetensors" not in name}
    parts = [load(raw) for name, raw in files.items() if name.endswith(".safetensors")]
    return small | {LARGE: enlarge(save({name: tensor for part in parts for name, tensor in part.items()}))}


def test_a_download_whose_connection_breaks_goes_on(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.models["org/large"] = large(files)
    hub.break_after = 15 << 20
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/large")
    assert (Path(answer["path"]) / LARGE).read_bytes() == hub.models["org/large"][LARGE]
    assert hub.downloads(LARGE) == ["", f"bytes={10 << 20}-"]


def test_after_a_sudden_death_files_that_are_whole_are_kept(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    first, second = sorted(name for name in files if name.endswith(".safetensors"))
    hub.models["org/large"] = files | {second: enlarge(files[second])}
    hub.stall_after = 15 << 20
    command = [sys.executable, "-c", RESOLVE, "hf:org/large"]
    with subprocess.Popen(command, env=environment(hub, tmp_path)) as child:
        assert hub.stalled.wait(60)
        while not list(tmp_path.glob(f"hub/models--org--large/snapshots/*/{first}")):
            time.sleep(0.01)
        child.kill()
    hub.stall_after = 0
    hub.go_on.set()
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/large")
    assert (Path(answer["path"]) / second).read_bytes() == hub.models["org/large"][second]
    assert (hub.downloads(first), len(hub.downloads(second))) == ([""], 2)


def test_too_little_space_is_told_before_the_weights_are_asked_for(
    hub: Hub, tmp_path: Path, files: dict[str, bytes]
) -> None:
    hub.models["org/huge"] = large(files)
    hub.sizes = {LARGE: 1 << 60}
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/huge")
    assert answer["error"] == "DownloadFailed"
    assert "are free" in answer["text"]
    assert "HF_HOME" in answer["text"]
    assert hub.downloads(LARGE) == []


def test_a_cache_that_another_tool_filled_is_used(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    """The layout of the hub's cache, without the list of files that newer versions keep."""
    commit = "0123456789abcdef" * 2 + "01234567"
    storage = tmp_path / "hub" / "models--org--cached"
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    for name, raw in files.items():
        (snapshot / name).write_bytes(raw)
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/cached", HF_HUB_OFFLINE="1")
    assert answer["source"] == f"hf:org/cached@{commit}"
    shutil.move(snapshot / "model-00002-of-00002.safetensors", tmp_path)
    (answer,) = resolve_sources(hub, tmp_path, "hf:org/cached", HF_HUB_OFFLINE="1")
    assert "model-00002-of-00002.safetensors" in answer["text"]
