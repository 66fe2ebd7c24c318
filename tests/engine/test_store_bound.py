"""A worker that loads a model keeps the store within its bound, and what it has loaded stays."""

from __future__ import annotations

from pathlib import Path

from adapters.names import LLAMA_CPP
from orchestrator.fitting.worker_options import engine_options
from orchestrator.worker.loading.prepared import prepare_model
from tests.adapters.test_store_usage import put
from tests.support.config import parse_config
from tests.support.options import build_options
from tests.support.tiny_llama_files import write_llama_file


def test_a_load_lets_other_formats_go_and_keeps_its_own(tmp_path: Path) -> None:
    model = write_llama_file(tmp_path, "qwen3moe")
    other = put(tmp_path / "store", "other.gguf", "onnx_rt")
    stages: list[str] = []
    options = build_options(tmp_path, model.name, LLAMA_CPP)
    ready = prepare_model(options, lambda stage, fraction: stages.append(stage))
    assert other.exists(), "there is no bound"
    bounded = build_options(tmp_path, model.name, LLAMA_CPP, store_max_bytes=1)
    again = prepare_model(bounded, lambda stage, fraction: stages.append(stage))
    assert (again.prepared, again.prepared.exists(), other.exists()) == (ready.prepared, True, False)
    assert f"removed {other.parent.name}/{other.name}, for store.max_size" in stages


def test_a_worker_is_told_the_bound_of_the_file(tmp_path: Path) -> None:
    text = "model: {source: 'simulated:toy', adapter: simulated}\n"
    for extra, expected in (("store: {max_size: 2 GiB}\n", 2 << 30), ("", 0)):
        options = engine_options(parse_config(f"{text}{extra}", tmp_path / "cluster.yaml"), tmp_path)
        assert options.model.store_max_bytes == expected
