"""What `device_layers` may not say: refused where it stands, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import ModelDraftOptions
from tests.support import tiny_gguf


def write_config(directory: Path, target: str, draft: str) -> Path:
    tiny_gguf.write(directory / "tiny.gguf", tiny_gguf.Tiny("llama"))
    path = directory / "c.yaml"
    path.write_text(
        f"# layers\nmodel: {{source: tiny.gguf, {target}}}\ndrafts:\n- {{method: model, source: tiny.gguf, {draft}}}\n"
    )
    return path


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("device_layers: 3", "adapter: llama_cpp", "2: model.device_layers: openvino_rt on CPU has all layers there"),
        (
            "adapter: llama_cpp, device_layers: 0",
            "adapter: llama_cpp",
            "2: model.device_layers: llama_cpp on CPU has all layers there. Set adapter: llama_cpp and a GPU",
        ),
        (
            "adapter: auto, device: auto, device_layers: 3",
            "adapter: llama_cpp",
            "2: model.device_layers: auto on auto has all layers there",
        ),
        (
            "adapter: llama_cpp",
            "adapter: llama_cpp, device_layers: 1",
            "4: drafts[0].device_layers: llama_cpp on CPU has all layers there",
        ),
    ],
)
def test_a_number_of_layers_is_refused_where_it_would_change_nothing(tmp_path, target, draft, said):
    with pytest.raises(ConfigError) as refused:
        load_config(write_config(tmp_path, target, draft))
    assert f"c.yaml:{said}" in str(refused.value)


def test_a_number_of_layers_reaches_the_model_that_it_is_for(tmp_path):
    gpu = "adapter: llama_cpp, device: vulkan0"
    options = engine_options(
        load_config(write_config(tmp_path, f"{gpu}, device_layers: 7", f"{gpu}, device_layers: all")), tmp_path
    )
    assert (options.model.device, options.model.device_layers) == ("Vulkan0", 7)
    [draft] = options.drafters
    assert isinstance(draft, ModelDraftOptions)
    assert draft.model.device_layers is None
