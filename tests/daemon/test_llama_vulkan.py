"""A daemon on a GPU of llama.cpp, for which Mesa's software Vulkan stands: the text with drafts, what is said of
layers, and memory that is not there."""

from __future__ import annotations

import re

import pytest

from tests.daemon.test_llama_cpp import reshape
from tests.daemon.test_replaced_models import MODEL, ask, configure
from tests.support import tiny_gguf, vulkan
from tests.support.daemon import running

pytestmark = [pytest.mark.slow, vulkan.NEEDS_VULKAN]
ON_GPU = f", adapter: llama_cpp, device: {vulkan.DEVICE}"
LONG = 300  # attention sums over 256 positions at a time
TAIL = "devices: {threads: 1}\ndrafts: "


@pytest.fixture
def source(tmp_path, monkeypatch):
    for name, value in vulkan.SHOW_SOFTWARE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OUTRIDER_LIBLLAMA", str(vulkan.find_build()))
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, reshape(MODEL))
    return path


def test_drafts_of_the_processor_change_no_token_of_a_gpus(tmp_path, source):
    with running(configure(tmp_path, str(source), tmp_path / "store", model=ON_GPU, tail=f"{TAIL}[]")) as plain:
        expected = ask(plain, LONG)
        ready = plain.status()["ready"]
        assert (ready["device"], ready["row_invariant"]) == (vulkan.DEVICE, True)
        assert ready["device_layers"].startswith(f"3 of 3 layers on {vulkan.DEVICE} (weights ")
        assert set(ready["device_memory"]) == {"process", "weights", "kv_cache", "workspace"}
        assert plain.stop() == 0
    draft = f"{{method: model, source: {source}, adapter: llama_cpp, device: CPU, kv_cache: 8 MiB}}"
    tail = f"{TAIL}[{draft}]"
    with running(configure(tmp_path, str(source), tmp_path / "store", model=ON_GPU, tail=tail)) as drafted:
        assert ask(drafted, LONG) == expected
        assert drafted.status()["totals"]["accepted"] > 0
        assert drafted.stop() == 0


def test_a_gpu_without_memory_for_its_layers_leaves_them_to_the_host_and_says_so(tmp_path, source, monkeypatch):
    monkeypatch.setenv("GGML_VK_FORCE_MAX_BUFFER_SIZE", "4096")  # less than a layer's tensors have
    with running(configure(tmp_path, str(source), tmp_path / "store", model=ON_GPU, tail=f"{TAIL}[]")) as daemon:
        assert ask(daemon)
        told = daemon.status()["ready"]["device_layers"]
        assert int(told[0]) < 2
        assert told.endswith(" found no memory")
        assert re.search(r"ran out of memory: [^;]*; now 2 of 3 layers on Vulkan0 ", daemon.log.read_text())
        assert daemon.stop() == 0


def test_a_number_of_layers_is_what_is_loaded(tmp_path, source):
    model = f"{ON_GPU}, device_layers: 2"
    with running(configure(tmp_path, str(source), tmp_path / "store", model=model, tail=f"{TAIL}[]")) as daemon:
        assert ask(daemon)
        assert daemon.status()["ready"]["device_layers"].startswith(f"2 of 3 layers on {vulkan.DEVICE} ")
        assert daemon.stop() == 0
