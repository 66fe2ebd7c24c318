"""The libraries that adapters run models by. Some come in several builds, each a distribution of its own:
onnxruntime-gpu is ONNX Runtime, too.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = {
    "llama_cpp": "ik-llama-cpp-python",
    "openvino_llama": "ik-llama-cpp-python",  # and OpenVINO, which is always installed
    "openvino_rt": "openvino",
    "onnx_rt": "onnxruntime",
    "torch_device": "torch",
}
"""The library that an adapter of ours runs models by."""
_WAYS_OUT = {
    "llama_cpp": "outrider extras install llama",
    "openvino_llama": "outrider extras install llama",
    "openvino_rt": "pip install openvino",
    "onnx_rt": "outrider extras install onnx",
    "torch_device": "outrider extras install torch",
}
_BUILDS = {"onnxruntime": tuple(f"onnxruntime-{kind}" for kind in ("gpu", "qnn", "directml", "openvino"))}


BIT_LIBRARIES = (
    "openvino",
    "ik-llama-cpp-python",
    "onnxruntime",
    "torch",
    "transformers",
    "torchao",
    "numpy",
    "gguf",
    "compressed-tensors",
    "nncf",
    "onnx",
    "onnx-ir",
)
"""What computes a model, converts its weights, or draws from what came out: another version may have other bits."""


def find_build(library: str) -> tuple[str, str] | None:
    """Return the distribution that a library is installed by, and its version; None where it is not installed."""
    for name in (library, *_BUILDS.get(library, ())):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def describe_lacking(adapter: str) -> str:
    library, way_out = LIBRARIES.get(adapter, "outrider"), _WAYS_OUT.get(adapter, "pip install outrider")
    return f"{library} is not installed: it is the runtime of {adapter}; {way_out}"


def list_bit_versions() -> dict[str, str]:
    """Return the versions of what decides bits here, by library; those that are not installed are left out."""
    builds = {library: find_build(library) for library in BIT_LIBRARIES}
    return {
        library: build[1] if build[0] == library else " ".join(build)
        for library, build in builds.items()
        if build is not None
    }
