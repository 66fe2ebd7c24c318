"""What `model.tensor_parallel` may not say: refused where it stands, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from tests.support import tiny_gguf, tiny_models


def write_split(directory: Path, keys: str) -> Path:
    tiny_models.write_model(directory / "tiny", "qwen3", kind="BF16")
    tiny_gguf.write(directory / "tiny.gguf", tiny_gguf.Tiny("llama"))
    path = directory / "c.yaml"
    source = "tiny.gguf" if "llama_cpp" in keys else "tiny"
    path.write_text(f"# split\nmodel: {{source: {source}, {keys}}}\n")
    return path


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("tensor_parallel: 2", "openvino_rt cannot split layers; set adapter: torch_device, or leave"),
        (
            "adapter: llama_cpp, tensor_parallel: 2",
            "llama_cpp cannot split layers; set adapter: torch_device, or leave",
        ),
        (
            "adapter: torch_device, tensor_parallel: 2, static_shapes: 'on'",
            "graphs of fixed shape hold whole targets; leave one of static_shapes and",
        ),
        (
            "adapter: torch_device, tensor_parallel: 2, device: auto",
            "a plan chooses ranks where the device is 'auto'",
        ),
        (
            "adapter: torch_device, tensor_parallel: 2, shards: [{layers: 1}, {layers: 3}]",
            "a target is in layer shards or its layers are split, not both",
        ),
        (
            "adapter: torch_device, tensor_parallel: 5",
            "5 ranks cannot share a model with 4 attention heads and an MLP of 96; 4 can at most. Set tensor_parallel",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_line_and_a_way_out(tmp_path: Path, keys: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(write_split(tmp_path, keys))
    assert f"c.yaml:2: model.tensor_parallel: {said}" in str(refused.value)


@pytest.mark.parametrize("device", ["CUDA", "cuda", "CUDA:0"])
def test_all_devices_of_a_name_begin_with_the_first(tmp_path: Path, device: str) -> None:
    path = write_split(tmp_path, f"adapter: torch_device, tensor_parallel: 4, device: '{device}'")
    model = engine_options(load_config(path), tmp_path).model
    assert (model.device, model.tensor_parallel) == ("CUDA:0", 4)
