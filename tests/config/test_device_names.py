"""Devices are written in any case, and are called what their runtimes call them from then on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.names import normalise_device
from tests.support.config import parse_config

ROOT = Path(__file__).parents[2]
OURS = {
    "openvino_rt": ("CPU", "GPU", "GPU.0", "GPU.1", "NPU", "HETERO:GPU,CPU", "MULTI:GPU.0,GPU.1", "BATCH:GPU"),
    "torch_device": ("CPU", "CUDA:0", "CUDA:12"),
    "onnx_rt": ("CPU", "CUDA", "CUDA:1", "DirectML", "DirectML:0", "OpenVINO:GPU", "QNN", "VitisAI"),
    "llama_cpp": ("CPU",),
    "simulated": ("SIM", "SIM.1"),
}
NAMED = [(adapter, device) for adapter, devices in OURS.items() for device in devices]


@given(st.sampled_from(NAMED), st.lists(st.booleans(), min_size=20, max_size=20))
def test_any_case_is_the_runtimes_own(named: tuple[str, str], upper: list[bool]) -> None:
    adapter, device = named
    written = "".join(sign.upper() if up else sign.lower() for sign, up in zip(device, upper, strict=False))
    assert normalise_device(adapter, written) == normalise_device("auto", written) == device


@pytest.mark.parametrize("device", ["CPU", "CUDA0", "Vulkan12", "MTL0", "ROCm1", "BLAS", "MyOwn0"])
def test_what_ggml_calls_its_devices_stays_and_kinds_that_are_known_are_taken_in_any_case(device: str) -> None:
    assert normalise_device("llama_cpp", device) == device
    if device not in ("BLAS", "MyOwn0"):
        assert normalise_device("llama_cpp", device.lower()) == device


@pytest.mark.parametrize(
    ("adapter", "device"), [("vulkan", "cuda:0"), ("openvino_rt", "auto"), ("openvino_rt", "AUTO"), ("onnx_rt", "x:y")]
)
def test_the_plans_auto_and_what_others_call_their_devices_stay_as_they_are(adapter: str, device: str) -> None:
    assert normalise_device(adapter, device) == device


@pytest.mark.parametrize(
    ("adapter", "written", "spelt"),
    [
        ("torch_device", "cuda", "CUDA:0"),
        ("torch_device", "cuda1", "CUDA:1"),
        ("llama_cpp", "cuda:1", "CUDA1"),
        ("llama_cpp", "WebGPU", "WebGPU"),
        ("openvino_rt", "gpu:1", "GPU.1"),
        ("openvino_rt", "gpu", "GPU"),
        ("onnx_rt", "cuda1", "CUDA:1"),
        ("simulated", "sim1", "SIM.1"),
    ],
)
def test_another_separator_is_the_runtimes_own(adapter: str, written: str, spelt: str) -> None:
    assert normalise_device(adapter, written) == spelt


PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
EXAMPLES = [
    (adapter, device)
    for page in PAGES
    for adapter, device in re.findall(r"`?adapter: (\w+)`?, `?device: \"?([\w:.]+)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("adapter", "device"), sorted(set(EXAMPLES)))
def test_pages_spell_devices_as_their_runtimes_do(adapter: str, device: str) -> None:
    assert normalise_device(adapter, device) == device


def test_every_key_that_names_a_device_takes_any_case() -> None:
    config = parse_config(
        "model: {source: x, adapter: torch_device, device: cuda:0,\n"
        "  shards: [{layers: 1, device: Cuda:1}, {layers: 1}]}\n"
        "drafts: [{method: model, source: y, adapter: onnx_rt, device: directml:0}]\n"
        "failover: {standby: [{adapter: openvino_rt, device: gpu.1}, {}]}\n"
        "models: [{source: z, name: z, device: cpu}]\n",
        Path("c.yaml"),
    )
    assert (config.model.device, config.model.shards[0].device) == ("CUDA:0", "CUDA:1")
    assert config.drafts[0].device == "DirectML:0"  # type: ignore[union-attr]  # a model draft
    assert [one.device for one in config.failover.standby] == ["GPU.1", None]
    assert config.models[0].device == "CPU"
