"""LoRA adapters in cluster.yaml: what does not go with the model, its runtimes or its names is refused at its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.planning.applied import build_option_filter
from orchestrator.planning.wanted import build_request_from_config
from policies.planning.plan import Option, Role
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_lora import draw_pairs, write_lora, write_peft

TINY = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64)
GOOD = """\
model:
  source: tiny.gguf
  name: tiny
  adapter: llama_cpp
  adapters:
    - {name: pirate, source: pirate.gguf}
    - {name: poet, source: poet}
"""
FURTHER = "models: [{source: tiny.gguf, name: 'tiny:poet', adapter: llama_cpp}]\n"


def write_config(directory: Path, text: str) -> Path:
    arrays = write(directory / "tiny.gguf", TINY)
    write(directory / "wide.gguf", replace(TINY, hidden=256, heads=4))
    write_lora(directory / "pirate.gguf", draw_pairs(arrays))
    write_peft(directory / "poet", TINY, draw_pairs(arrays))
    (directory / "cluster.yaml").write_text(text)
    return directory / "cluster.yaml"


def test_adapters_reach_the_workers_and_a_plan_runs_their_model_where_they_are_applied(tmp_path):
    path = write_config(tmp_path, GOOD.replace("llama_cpp", "auto"))
    config = load_config(path)
    options = engine_options(config, tmp_path)
    assert [(lora.name, lora.source) for lora in options.model.loras] == [("pirate", "pirate.gguf"), ("poet", "poet")]
    request = build_request_from_config(config, tmp_path)
    assert request.target.runtimes == ("llama_cpp",)
    fits = build_option_filter(config, request)
    named = {"profile": "x", "role": Role.TARGET, "model": "tiny", "weights": "as_file", "cost": None}
    options_by_runtime = {
        runtime: Option(runtime=runtime, layer_bytes=1.0, kv_bytes_per_token=1.0, **named)  # type: ignore[arg-type]
        for runtime in ("llama_cpp", "openvino_rt")
    }
    assert [runtime for runtime, option in options_by_runtime.items() if fits(option, "CPU")] == ["llama_cpp"]


def test_a_pool_needs_one_member_that_applies_them(tmp_path):
    pool = GOOD.replace("llama_cpp", "openvino_rt")
    able = "  replicas: [{}, {adapter: llama_cpp}]\n"
    assert load_config(write_config(tmp_path, pool + able)).model.adapters[1].name == "poet"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("llama_cpp", "openvino_rt", r"cluster.yaml:5: model.adapters: openvino_rt applies no LoRA adapters"),
        ("llama_cpp", "torch_device", r"torch_device applies no LoRA adapters of this form. Set adapter: llama_cpp"),
        (
            "tiny.gguf\n  name: tiny\n  adapter: llama_cpp",
            "simulated:toy\n  adapter: simulated",
            "simulated applies no LoRA",
        ),
        ("pirate.gguf", "nobody.gguf", r"cluster.yaml:6: model.adapters\[0\].source: nobody.gguf: there is no adapter"),
        ("pirate.gguf", "tiny.gguf", r"cluster.yaml:6: model.adapters\[0\].source: tiny.gguf: it is a model"),
        ("pirate.gguf", "hf:a/b", r"model.adapters\[0\].source: hf:a/b: adapters are not downloaded"),
        ("name: poet", "name: pirate", r"cluster.yaml:6: model.adapters\[0\].name: 'pirate' is the name of two"),
        ("name: poet", "name: 'a:b'", r"cluster.yaml:7: model.adapters\[1\].name"),
        ("tiny.gguf\n", "wide.gguf\n", r"cluster.yaml:6: .* blk.0.attn_q.weight: it is for 128 x 128 values"),
        (
            "    - {name: poet, source: poet}\n",
            f"    - {{name: poet, source: poet}}\n{FURTHER}",
            "and so they do a model",
        ),
    ],
)
def test_what_does_not_go_with_them_is_refused_at_its_line(tmp_path, old, new, why):
    path = write_config(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=why):
        load_config(path)
