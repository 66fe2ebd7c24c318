"""What `outrider bench pairs` runs a model on: no runtime that cannot read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_lab.bench.pairs import list_model_places

from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from tests.support import tiny_gguf, tiny_models


@pytest.mark.parametrize("source", ["tiny", "tiny.gguf"])
def test_a_runtime_for_files_alone_runs_no_directory(tmp_path: Path, source: str) -> None:
    pytest.importorskip("ik_llama_cpp", reason="it is not installed: outrider extras install llama")
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama"))
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{source: {source}, adapter: auto}}\nstore: {{directory: {tmp_path}/store}}\n")
    places, skipped = list_model_places(engine_options(load_config(path), tmp_path).model)
    assert ("llama_cpp" in {place.adapter for place in places}) == (source == "tiny.gguf")
    assert any("llama_cpp reads nothing else" in line for line in skipped) == (source == "tiny")
