"""ik_llama.cpp runs what it computes as llama.cpp does, and refuses the rest by name before it is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters.contract import AdapterUnavailable, LoadOptions, ModelRefused, Segment, silent
from adapters.llama_cpp import library as library_choice
from adapters.registry import get, list_devices
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from tests.support.conformance import NO_MAINLINE
from tests.support.model_rows import loads_models
from tests.support.tiny_llama_files import ARCHITECTURES, TOKENS, write_llama_file

REFUSED = {
    "mixtral": "loses what runs past the layers of llama with experts",
    "llama4": "loses what runs past the layers of llama4",
    "granite": "loses what runs past the layers of granite",
    "starcoder2": "ends the process over starcoder2",
    "gemma4": r"passes over rope_freqs\.weight",
    "olmo2": "unknown model architecture: 'olmo2'",
    "lfm2": "is not known to run the recurrent state of lfm2",
    "qwen35moe": "is not known to run the recurrent state of qwen35moe",
    "mamba": "is not known to run the recurrent state of mamba",
}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        list_devices("llama_cpp")
    except AdapterUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package with mainline stands beside it."""
    monkeypatch.setattr(library_choice, "find_any_mainline", lambda: None)


@pytest.mark.usefixtures("alone")
def test_a_cut_that_it_does_not_know_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    source = write_llama_file(tmp_path, "qwen3moe", metadata={"tokenizer.ggml.pre": "minicpm5"})
    (tmp_path / "prepared").mkdir()
    adapter = get("llama_cpp")
    adapter.prepare(source, tmp_path / "prepared", silent)
    with pytest.raises(ModelRefused, match=r"does not know the tokenizer's 'minicpm5'.*pip install xllamacpp"):
        adapter.load(tmp_path / "prepared", LoadOptions(), silent)


@loads_models("llama_cpp", "GGUF", [name for name in ARCHITECTURES if name not in REFUSED], write_llama_file)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.usefixtures("alone")
def test_what_it_does_not_compute_is_refused_and_the_rest_is_run(tmp_path: Path, architecture: str) -> None:
    source = write_llama_file(tmp_path, architecture)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    adapter = get("llama_cpp")
    adapter.prepare(source, prepared, silent)
    options = LoadOptions(device="CPU", kv_cache_bytes=8 << 20, slots=2, threads=1)
    if architecture in REFUSED:
        with pytest.raises(ModelRefused, match=rf"tiny-{architecture}\.gguf: .*{REFUSED[architecture]}"):
            adapter.load(prepared, options, silent)
        return
    model = adapter.load(prepared, options, silent)
    tokens = [(7 * place * place + 11 * place + 3) % len(TOKENS) for place in range(300)]
    try:
        whole = model.forward([Segment(0, 0, tokens, (298, 300))]).logits.copy()
        model.forward([Segment(1, 0, tokens[:250], (0, 0))])
        grown = model.forward([Segment(1, 250, tokens[250:], (48, 50))]).logits
    finally:
        model.close()
    assert whole.std() > 0.01
    assert np.abs(whole - grown).max() < 0.05 * whole.std()  # the second context was copied into a larger one


@NO_MAINLINE
@pytest.mark.parametrize("architecture", ["lfm2", "llama4"])
def test_mainline_runs_what_it_does_not_where_both_are_installed(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "prepared").mkdir()
    adapter = get("llama_cpp")
    adapter.prepare(write_llama_file(tmp_path, architecture), tmp_path / "prepared", silent)
    options = LoadOptions(kv_cache_bytes=8 << 20, slots=2, threads=1)
    model = adapter.load(tmp_path / "prepared", options, silent)
    logits = model.forward([Segment(0, 0, [5, 6, 7], (0, 3))]).logits
    assert model.capabilities.device_name.startswith("processor, by llama.cpp (xllamacpp ")
    model.close()
    assert np.isfinite(logits).all()


@pytest.mark.usefixtures("alone")
def test_config_check_says_what_it_does_not_run_and_what_does(tmp_path: Path) -> None:
    write_llama_file(tmp_path, "lfm2")
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model:\n  source: tiny-lfm2.gguf\n  adapter: llama_cpp\nstore: {{directory: {tmp_path}}}\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: model\.source: tiny-lfm2\.gguf: .*recurrent.*xllamacpp"):
        load_config(path)
