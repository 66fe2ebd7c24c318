"""The names that adapters and their devices have, without importing any."""

import re

from device_profiles.device_names import CUDA_KIND, split_device

SHARDING_ADAPTERS = ("onnx_rt", "openvino_rt", "simulated", "torch_device")
"""Those of ours that load ranges of layers (adapters.contract.ShardingAdapter)."""
CONVERTING_ADAPTERS = tuple(name for name in SHARDING_ADAPTERS if name != "simulated")
"""Those of ours that make a graph of their own of a model, from GGUF files and from directories of safetensors."""
TRANSFORMERS = "torch_device"
"""The one that runs any decoder of transformers from its directory, by that library's own class."""
HEAD_ADAPTERS = (TRANSFORMERS,)
"""Those of ours that keep hidden states for heads (adapters.contract.TakesHeads)."""
LLAMA_CPP = "llama_cpp"
"""The one that runs a model's GGUF file as it is, by llama.cpp's library, whatever its architecture."""
OPENVINO_LLAMA = "openvino_llama"
"""The one that reads prompts by OpenVINO and decodes by llama.cpp."""
GGUF_ADAPTERS = (LLAMA_CPP, OPENVINO_LLAMA)
"""Those of ours that read GGUF files and nothing else."""
IN_PLACE_ADAPTERS = (LLAMA_CPP,)
"""Those of ours that load a model's own files where they lie (adapters.contract.FilesInPlace)."""
OWN_ADAPTERS = (LLAMA_CPP, OPENVINO_LLAMA, *SHARDING_ADAPTERS)
"""Those of this distribution, installed or not."""
ADAPTER_NAME_PATTERN = "[a-z][a-z0-9_]{0,63}"
"""What one of another distribution is called."""

_KINDS = ("BATCH", "CPU", "CUDA", "DirectML", "GPU", "HETERO", "MULTI", "NPU", "OpenVINO", "QNN", "SIM", "VitisAI")
"""How our runtimes spell their devices, without numbers. OpenVINO's AUTO is told from `auto` by its case alone."""
_GGML_KINDS = ("CANN", "CPU", "CUDA", "GPUOpenCL", "MTL", "MUSA", "ROCm", "SYCL", "Vulkan", "WebGPU")
"""How ggml spells its devices; a number follows without a colon, as in CUDA0."""
_SEPARATORS = {LLAMA_CPP: "", "onnx_rt": ":", "openvino_rt": ".", "simulated": ".", "torch_device": ":"}
"""What stands before a device's number."""
_BY_ANY_CASE = {kind.casefold(): kind for kind in _KINDS}
_GGML_BY_ANY_CASE = {kind.casefold(): kind for kind in _GGML_KINDS}


def normalise_device(adapter: str, device: str) -> str:
    """Return a device's name as its runtime spells it: "cuda0" is "CUDA:0", "directml:1" is "DirectML:1", and of
    llama.cpp "vulkan:0" is "Vulkan0". torch counts its devices, so that its "CUDA" is "CUDA:0".

    What other distributions' adapters call their devices stays as it is, and so does a kind that is not known.
    """
    if re.fullmatch(ADAPTER_NAME_PATTERN, adapter) and adapter not in (*OWN_ADAPTERS, "auto"):
        return device
    kind, number = split_device(device)
    spelt = (_GGML_BY_ANY_CASE if adapter == LLAMA_CPP else _BY_ANY_CASE).get(kind)
    if spelt is None:
        return device
    if adapter == "torch_device" and kind == CUDA_KIND:
        number = number or "0"
    if number.isdecimal() and adapter in _SEPARATORS:
        return f"{spelt}{_SEPARATORS[adapter]}{number}"
    return f"{spelt}{device[len(spelt) :].upper()}"
