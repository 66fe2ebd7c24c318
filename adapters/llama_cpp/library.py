"""The library of llama.cpp that is used (adapters/libllama.py), which a process loads once."""

from __future__ import annotations

from functools import cache
from typing import Final

from adapters.contract import ModelRefused
from adapters.libllama import FORK, LibraryPlace, find_any_mainline, find_library
from adapters.llama_cpp.fork import ForkLibrary
from adapters.llama_cpp.mainline import MainlineLibrary
from adapters.llama_cpp.native import NativeLibrary, check_processor


class WrongLibrary(ModelRefused):
    """The libraries of llama.cpp that are here do not run a model as llama.cpp does; another host's may."""


_BUILT_FOR_MANY: Final = (FORK, "xllamacpp")
"""Packages whose wheels are built for many processors. `llama_cpp` is built where it is installed."""


def check_place(place: LibraryPlace) -> None:
    """Raise AdapterUnavailable where a package's library is not built for this processor."""
    if place.package in _BUILT_FOR_MANY:
        check_processor(place.version)


def choose_library() -> NativeLibrary:
    """Return the library that is used. Raises AdapterUnavailable."""
    return load_library(find_library())


def choose_library_for(used: NativeLibrary, name: str, fault: str) -> NativeLibrary:
    """Return the library that runs a file: mainline of a package where the one that is `used` has a `fault` with it, as
    `find_fault` tells. Raises ModelRefused where none does, AdapterUnavailable."""
    if not fault or not used.has_faults:
        return used
    place = find_any_mainline()
    if place is None:
        raise _refuse_fault(name, fault, used.name)
    return load_library(place)


def check_fault(name: str, fault: str) -> None:
    """Raise ModelRefused where the library that would be used has a `fault` with a file, and no other is installed. No
    library is loaded."""
    place = find_library()
    if fault and place.package == FORK and find_any_mainline() is None:
        raise _refuse_fault(name, fault, place.version)


@cache
def load_library(place: LibraryPlace) -> NativeLibrary:
    """Return the library at a place. Raises AdapterUnavailable."""
    check_place(place)
    if place.file is None:
        return ForkLibrary()
    return MainlineLibrary(place.file, place.version if place.package else str(place.file), place.version)


def _refuse_fault(name: str, fault: str, library: str) -> WrongLibrary:
    return WrongLibrary(
        f"{name}: {library} {fault}. Mainline llama.cpp may run it: pip install xllamacpp. Or choose another adapter."
    )
