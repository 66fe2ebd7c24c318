"""The cases of the conformance suite (adapters/conformance) over our own adapters."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.vulkan import NEEDS_VULKAN

NO_FORK = pytest.mark.skipif(find_spec("ik_llama_cpp") is None, reason="ik_llama_cpp is not installed")
NO_MAINLINE = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")

ADAPTERS = [
    pytest.param("simulated", id="simulated"),
    pytest.param("openvino_rt", id="openvino_rt", marks=pytest.mark.model),
    pytest.param("onnx_rt", id="onnx_rt", marks=pytest.mark.model),
    pytest.param("torch_device", id="torch_device", marks=pytest.mark.model),
    pytest.param("llama_cpp", id="llama_cpp", marks=pytest.mark.model),
    pytest.param("openvino_llama", id="openvino_llama", marks=[pytest.mark.model, NO_FORK]),
    # A model of tests/support/tiny_models.py behind the slash: sliding windows, and layers without.
    pytest.param("openvino_rt/gemma3", id="openvino_rt-gemma3"),
    pytest.param("onnx_rt/gemma3", id="onnx_rt-gemma3"),
    pytest.param("torch_device/gemma2", id="torch_device-gemma2"),  # attention scores softly capped
    # transformers' own class (tests/support/tiny_decoders.py): experts, and values that are shorter than keys.
    pytest.param("torch_device/deepseek_v3", id="torch_device-deepseek_v3", marks=pytest.mark.slow),
    # Graphs of fixed shape, as an NPU runs them.
    pytest.param("openvino_rt/llama/static", id="openvino_rt-llama-static"),
    pytest.param("openvino_rt/gemma3/static", id="openvino_rt-gemma3-static"),
    pytest.param("openvino_rt/llama3/static@int8", id="openvino_rt-static-int8"),  # the weights that an NPU gets
    # Behind the at sign: weights in another format than the file's.
    pytest.param("openvino_rt/llama3@int8", id="openvino_rt-int8"),
    pytest.param("openvino_rt/llama3@int4", id="openvino_rt-int4"),
    pytest.param("onnx_rt/llama3@int8", id="onnx_rt-int8"),
    pytest.param("onnx_rt/llama3@int4", id="onnx_rt-int4"),
    pytest.param("torch_device/llama3@int8", id="torch_device-int8"),
    pytest.param("torch_device/llama3@int4", id="torch_device-int4"),
    # Behind the number sign: a tier of numerical classes. The last one has forwards of one width.
    pytest.param("openvino_rt/llama3#1", id="openvino_rt-outputs"),
    pytest.param("openvino_rt/llama3#-1", id="openvino_rt-width"),
    pytest.param("onnx_rt/llama3#-1", id="onnx_rt-width"),
    pytest.param("torch_device/llama3#-1", id="torch_device-width"),
    pytest.param("torch_device/gemma2#-1", id="torch_device-gemma2-width"),
    pytest.param("torch_device/llama3@int4#-1", id="torch_device-int4-width"),
    pytest.param("llama_cpp#-1", id="llama_cpp-width"),
    # Hybrids, of tests/support/tiny_llama_files.py: their state cannot be rolled back.
    pytest.param("llama_cpp/qwen35", id="llama_cpp-qwen35"),
    pytest.param("llama_cpp/lfm2+xllamacpp", id="llama_cpp-lfm2", marks=NO_MAINLINE),
    # Behind the plus sign: the package that llama.cpp's library comes in.
    pytest.param("llama_cpp+xllamacpp", id="llama_cpp-mainline", marks=[pytest.mark.model, NO_MAINLINE]),
    pytest.param("llama_cpp+vulkan", id="llama_cpp-vulkan", marks=[pytest.mark.slow, NEEDS_VULKAN]),
]
DEVICES = dict.fromkeys(("llama_cpp", "openvino_llama", "openvino_rt", "onnx_rt", "torch_device"), "CPU")
DEVICES["simulated"] = "SIM"
