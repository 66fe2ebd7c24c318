"""Libraries that come in several builds, each a distribution of its own: onnxruntime-gpu is ONNX Runtime, too."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_BUILDS = {"onnxruntime": tuple(f"onnxruntime-{kind}" for kind in ("gpu", "qnn", "directml", "openvino"))}


def find_build(library: str) -> tuple[str, str] | None:
    """Return the distribution that a library is installed by, and its version; None where it is not installed."""
    for name in (library, *_BUILDS.get(library, ())):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None
