"""The library of llama.cpp that is used (adapters/libllama.py), which a process loads once."""

from __future__ import annotations

from functools import cache
from typing import Final

from adapters.libllama import FORK, LibraryPlace, find_library
from adapters.llama_cpp.fork import ForkLibrary
from adapters.llama_cpp.mainline import MainlineLibrary
from adapters.llama_cpp.native import NativeLibrary, check_processor

_BUILT_FOR_MANY: Final = (FORK, "xllamacpp")
"""Packages whose wheels are built for many processors. `llama_cpp` is built where it is installed."""


def check_place(place: LibraryPlace) -> None:
    """Raise AdapterUnavailable where a package's library is not built for this processor."""
    if place.package in _BUILT_FOR_MANY:
        check_processor(place.version)


def choose_library() -> NativeLibrary:
    """Return the library that is used. Raises AdapterUnavailable."""
    return load_library(find_library())


@cache
def load_library(place: LibraryPlace) -> NativeLibrary:
    """Return the library at a place. Raises AdapterUnavailable."""
    check_place(place)
    if place.file is None:
        return ForkLibrary()
    return MainlineLibrary(place.file, place.version if place.package else str(place.file), place.version)
