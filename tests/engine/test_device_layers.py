"""How many layers a GPU of llama.cpp gets: by the file's own tensors, and fewer where they find no memory."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from adapters.contract import ALL_LAYERS, LoadOptions, ModelRefused, OutOfMemory, Unsupported
from adapters.gguf_facts import read_facts
from adapters.gguf_layer_bytes import read_layer_bytes
from adapters.gguf_splits import read_model_header
from adapters.libllama import VARIABLE
from adapters.llama_cpp.adapter import LAYER_COSTS, LlamaCppAdapter
from adapters.llama_cpp.contexts import MOST_ROWS
from adapters.llama_cpp.library import load_library
from adapters.llama_cpp.mainline import MainlineLibrary
from adapters.model_source import resolve
from device_profiles.units import MIB
from orchestrator.fitting.device_layers import (
    load_planned,
    plan_device_layers,
    read_layered_model,
    tell_device_layers,
)
from orchestrator.worker.loading.models import mark_bits
from policies.models.device_layers import LayerPlan, LayerRequest, count_sides
from tests.support import vulkan
from tests.support.options import build_options
from tests.support.stub_libllama import NEEDS_COMPILER, build_stub
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_llama_files import ARCHITECTURES, write_llama_file

MODEL = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64, mlp=256, layers=8)
KV_BYTES = 1 << 18


@pytest.fixture
def adapter(tmp_path) -> LlamaCppAdapter:
    """On a library that loads nothing, with a GPU of its own memory and one in the host's: 3 of 4 MiB are free."""
    file = build_stub(tmp_path / "libllama.so")
    library = MainlineLibrary(file, str(file), "stub")
    return LlamaCppAdapter(lambda: library)


@pytest.fixture
def source(tmp_path) -> Path:
    write(tmp_path / "tiny.gguf", MODEL)
    return tmp_path / "tiny.gguf"


def options_for(directory: Path, **changed):
    usual = {"device": "Vulkan0", "kv_cache_bytes": KV_BYTES}
    return build_options(directory, "tiny.gguf", "llama_cpp", **usual | changed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_a_file_is_somewhere_once(tmp_path, architecture):
    path = write_llama_file(tmp_path, architecture)
    header = read_model_header(path)
    facts = read_facts(header)
    sizes = read_layer_bytes(header, facts.layers)
    assert sum(sizes.layers) + sizes.head + sizes.rest == sum(one.size for one in header.tensors)
    assert min(sizes.layers) > 0
    assert sizes.rest >= sizes.tied >= 0
    model = read_layered_model(resolve(str(path), tmp_path, adapter="llama_cpp"))
    kept = 2 * facts.count_kv_elements(facts.all_layers) * 256 + facts.state_bytes
    assert kept <= 256 * sum(model.layer_kv_bytes) < kept + 256 * facts.layers
    assert model.head_bytes > 0


@NEEDS_COMPILER
def test_a_gpu_gets_the_layers_that_its_free_memory_holds(tmp_path, adapter, source):
    file = resolve(str(source), tmp_path, adapter="llama_cpp")
    plan = plan_device_layers(options_for(tmp_path), adapter, file, 1)
    assert plan is not None
    assert 1 < plan.on_device < plan.layers == MODEL.layers + 1
    assert plan.device.total <= 3 << 20
    assert plan.device.kv_cache > 0 < plan.host.kv_cache
    assert "may be filled" in plan.reason
    assert plan.sum_host(7).process == 7
    assert plan.sum_host(0).weights == plan.host.weights  # the device has memory of its own
    shared = plan_device_layers(options_for(tmp_path, device="Vulkan1"), adapter, file, 1)
    assert shared is not None
    assert shared.sum_host(0).weights == shared.host.weights + shared.device.weights
    fewer = plan_device_layers(options_for(tmp_path, device_layers=2), adapter, file, 1)
    assert fewer is not None
    assert (fewer.on_device, fewer.reason) == (2, "model.device_layers allows no more")
    longer = plan_device_layers(options_for(tmp_path, kv_cache_bytes=1 << 21), adapter, file, 1)
    assert longer is not None
    assert longer.on_device < plan.on_device


@NEEDS_COMPILER
def test_the_processor_has_all_layers_and_a_number_of_them_is_refused_there(tmp_path, adapter, source):
    file = resolve(str(source), tmp_path, adapter="llama_cpp")
    assert plan_device_layers(options_for(tmp_path, device="CPU"), adapter, file, 1) is None
    with pytest.raises(Unsupported, match="llama_cpp CPU has all layers there; leave device_layers out"):
        plan_device_layers(options_for(tmp_path, device="CPU", device_layers=3), adapter, file, 1)


@NEEDS_COMPILER
def test_what_neither_side_holds_is_refused_with_the_way_out(tmp_path, adapter, source):
    file = resolve(str(source), tmp_path, adapter="llama_cpp")
    with pytest.raises(ModelRefused, match=r"Vulkan0, with the host's memory: .*Lower limits\.kv_cache"):
        plan_device_layers(options_for(tmp_path, kv_cache_bytes=1 << 50), adapter, file, 1)


@NEEDS_COMPILER
def test_layers_that_find_no_memory_are_fewer_and_said(tmp_path, adapter, source, caplog):
    file = resolve(str(source), tmp_path, adapter="llama_cpp")
    tried: list[int] = []

    def load(plan: LayerPlan | None) -> LayerPlan:
        assert plan is not None
        tried.append(plan.on_device)
        if plan.on_device > 1:
            raise OutOfMemory("ErrorOutOfDeviceMemory")
        return plan

    with caplog.at_level(logging.WARNING):
        loaded = load_planned(options_for(tmp_path), adapter, file, 1, load)
    assert tried == sorted(tried, reverse=True)
    assert loaded.on_device == tried[-1] <= 1 < tried[0]
    assert loaded.reason == f"{tried[-2]} found no memory"
    assert caplog.messages[-1].startswith("tiny on llama_cpp Vulkan0: ErrorOutOfDeviceMemory; now")

    def fail(plan: LayerPlan | None) -> None:
        raise OutOfMemory("none for anything")

    with pytest.raises(OutOfMemory, match="none for anything"):
        load_planned(options_for(tmp_path), adapter, file, 1, fail)


@NEEDS_COMPILER
def test_classes_are_a_devices_own_and_a_number_of_layers_own(tmp_path, adapter, source):
    processor, discrete, integrated = adapter.devices()
    options = options_for(tmp_path)
    marks = {mark_bits(one, options) for one in (processor, discrete, integrated)}
    marks |= {mark_bits(discrete, options, layers) for layers in (1, 2, ALL_LAYERS)}
    assert len(marks) == 5
    widths = [[one.fixed_width for one in tier] for tier in adapter.classes(LoadOptions(device="Vulkan0"))]
    assert widths[-1] == [1]
    assert all(width for tier in widths for width in tier)


@NEEDS_COMPILER
def test_a_plan_tells_the_layers_of_each_device_that_may_leave_some(tmp_path, source, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(build_stub(tmp_path / "libllama.so")))
    places = [("openvino_rt", "CPU"), ("llama_cpp", "CPU"), *[("llama_cpp", "Vulkan0")] * 2]
    [told] = tell_device_layers(options_for(tmp_path, device="CPU"), 1, places)
    assert " of 9 layers on Vulkan0 (weights " in told
    [refused] = tell_device_layers(options_for(tmp_path, kv_cache_bytes=1 << 50), 1, places)
    assert "Lower limits.kv_cache" in refused


@pytest.mark.slow
@vulkan.NEEDS_VULKAN
@pytest.mark.parametrize("on_device", [7, 4, 1])
def test_what_is_counted_of_a_gpu_is_what_the_library_allocates_there(tmp_path, caplog, on_device):
    write(tmp_path / "tiny.gguf", Tiny("llama", hidden=512, heads=8, kv_heads=4, head_dim=64, mlp=1024, layers=6))
    library = load_library(vulkan.find_place())
    options = options_for(tmp_path, device_layers=on_device)
    file = resolve("tiny.gguf", tmp_path, adapter="llama_cpp")
    plan = plan_device_layers(options, LlamaCppAdapter(lambda: library), file, 1)
    assert plan is not None
    assert plan.on_device == on_device
    with caplog.at_level(logging.DEBUG, "adapters.llama_cpp.native"):
        model = library.load_model(file.path, vulkan.DEVICE, on_device, lambda fraction: True)
        context = library.open_context(model, 256, MOST_ROWS, 1, vulkan.DEVICE)
    library.close_context(context)
    library.close_model(model)
    said = re.findall(rf"{vulkan.DEVICE} +(\w+) buffer size = +([\d.]+) MiB", caplog.text)
    found = {name: float(size) * MIB for name, size in said}
    assert found["model"] == pytest.approx(plan.device.weights, rel=0.01, abs=MIB / 100)
    assert found["compute"] == pytest.approx(plan.device.workspace, rel=0.25, abs=MIB)
    whole = count_sides(read_layered_model(file), LAYER_COSTS, LayerRequest(0, 1), on_device)[0]
    assert found.get("KV", 0) == pytest.approx(whole.kv_cache, rel=0.01)
