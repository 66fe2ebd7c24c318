"""The names that adapters and their devices have, without importing any."""

import re

SHARDING_ADAPTERS = ("onnx_rt", "openvino_rt", "simulated", "torch_device")
"""Those of ours that load ranges of layers (adapters.contract.ShardingAdapter)."""
CONVERTING_ADAPTERS = tuple(name for name in SHARDING_ADAPTERS if name != "simulated")
"""Those of ours that make a graph of their own of a model, from GGUF files and from directories of safetensors."""
LLAMA_CPP = "llama_cpp"
"""The one that runs a model's GGUF file as it is, by llama.cpp's library, whatever its architecture."""
GGUF_ADAPTERS = (LLAMA_CPP,)
"""Those of ours that read GGUF files and nothing else."""
IN_PLACE_ADAPTERS = (LLAMA_CPP,)
"""Those of ours that load a model's own files where they lie (adapters.contract.FilesInPlace)."""
OWN_ADAPTERS = (LLAMA_CPP, *SHARDING_ADAPTERS)
"""Those of this distribution, installed or not."""
ADAPTER_NAME_PATTERN = "[a-z][a-z0-9_]{0,63}"
"""What one of another distribution is called."""

_KINDS = ("BATCH", "CPU", "CUDA", "DirectML", "GPU", "HETERO", "MULTI", "NPU", "OpenVINO", "QNN", "SIM", "VitisAI")
"""How our runtimes spell their devices, without numbers. OpenVINO's AUTO is told from `auto` by its case alone."""
_GGML_KINDS = ("CANN", "CPU", "CUDA", "GPUOpenCL", "MTL", "MUSA", "ROCm", "SYCL", "Vulkan", "WebGPU")
"""How ggml spells its devices; a number follows without a colon, as in CUDA0."""
_BY_ANY_CASE = {kind.casefold(): kind for kind in _KINDS}
_GGML_BY_ANY_CASE = {kind.casefold(): kind for kind in _GGML_KINDS}


def normalise_device(adapter: str, device: str) -> str:
    """Return a device's name as its runtime spells it: "cuda:0" is "CUDA:0", "directml:1" is "DirectML:1", and of
    llama.cpp "vulkan0" is "Vulkan0".

    What other distributions' adapters call their devices stays as it is, and so does a kind that is not known.
    """
    if re.fullmatch(ADAPTER_NAME_PATTERN, adapter) and adapter not in (*OWN_ADAPTERS, "auto"):
        return device
    if adapter == "llama_cpp":
        kind = device.rstrip("0123456789")
        return f"{_GGML_BY_ANY_CASE.get(kind.casefold(), kind)}{device[len(kind) :]}"
    kind = re.split("[:.]", device, maxsplit=1)[0]
    spelt = _BY_ANY_CASE.get(kind.casefold())
    return device if spelt is None else f"{spelt}{device[len(kind) :].upper()}"
