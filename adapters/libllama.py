"""Which library of llama.cpp is used, without loading it.

The user's own build comes first (`OUTRIDER_LIBLLAMA`), then the packages that are installed: `ik_llama_cpp`, whose
kernels are quickest on processors, and mainline in `xllamacpp` or in the bindings `llama_cpp`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from adapters.builds import describe_lacking
from adapters.content_digest import hash_file
from adapters.contract import AdapterUnavailable
from adapters.cpuinfo import list_instruction_sets

VARIABLE: Final = "OUTRIDER_LIBLLAMA"
"""The environment variable. What the operator has set in it goes before what a configuration says."""

_named: list[str] = []  # what a configuration has named
DISTRIBUTION: Final = "ik-llama-cpp-python"
FORK: Final = "ik_llama_cpp"
FORK_VARIABLE: Final = "IK_LLAMA_CPP_LIB_PATH"
"""Where the fork's package looks for a library in front of its own."""


@dataclass(frozen=True, slots=True)
class _Mainline:
    """A package that has mainline's library in it, by these patterns."""

    distribution: str
    patterns: tuple[str, ...]


_MAINLINE: Final[Mapping[str, _Mainline]] = MappingProxyType(
    {
        "xllamacpp": _Mainline("xllamacpp", ("xllamacpp*.so", "xllamacpp*.pyd")),
        "llama_cpp": _Mainline(
            "llama-cpp-python", ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll", "bin/llama.dll")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class LibraryPlace:
    """`package`: the one that it comes in, "" for the user's own build. `version`: changes with the library."""

    package: str
    file: Path | None
    version: str


def find_library() -> LibraryPlace:
    """Return which library is used. Raises AdapterUnavailable where there is none, or not where it is said to be."""
    own = name_build()
    if own:
        file = Path(own)
        return LibraryPlace("", file, f"libllama {_digest_build(file, VARIABLE)}")
    if find_spec(FORK) is not None:
        return LibraryPlace(FORK, None, _name_fork())
    place = find_any_mainline()
    if place is not None:
        return place
    raise AdapterUnavailable(f"{describe_lacking('llama_cpp')}, or name a library of your own build in {VARIABLE}")


def find_any_mainline() -> LibraryPlace | None:
    """Return the library in the first of mainline's packages that is installed, None without any."""
    return next((place for place in map(find_mainline, _MAINLINE) if place is not None), None)


def find_mainline(package: str) -> LibraryPlace | None:
    """Return the library in one of mainline's packages; None where that is not installed, or has none."""
    spec, known = find_spec(package), _MAINLINE[package]
    directories = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    files = [
        file for directory in directories for pattern in known.patterns for file in sorted(directory.glob(pattern))
    ]
    if not files:
        return None
    try:
        release = version(known.distribution)
    except PackageNotFoundError:
        release = _digest_build(files[0], package)
    return LibraryPlace(package, files[0], f"{known.distribution} {release}")


def name_build() -> str:
    """Return the library's file, "" where none is named."""
    return os.environ.get(VARIABLE, "")


def use_build(file: Path | None) -> None:
    """Name a library to this process and to those that it starts, None: none. What the operator has named stays."""
    if name_build() not in ("", *_named):
        return
    _named[:] = [] if file is None else [str(file)]
    if file is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = str(file)


def is_portable() -> bool:
    """Return whether the library that is used is of the fork's wheel, which was built for AVX2. Raises
    AdapterUnavailable where there is none."""
    return find_library().package == FORK and find_fork_build() is None


def find_build_directory() -> Path:
    """Return where a library of the fork lies that was built in this environment for this machine's processor."""
    sets = blake2b(" ".join(list_instruction_sets()).encode(), digest_size=8).hexdigest()
    return Path(sys.prefix, "share", "outrider", f"{DISTRIBUTION}-{sets}")


def find_fork_build() -> Path | None:
    """Return a library of the fork that is used in place of its wheel's: the one that is named in FORK_VARIABLE, else
    one that `outrider build-kernels` left; None where there is neither."""
    if named := os.environ.get(FORK_VARIABLE, ""):
        return Path(named)
    built = find_build_directory() / "libllama.so"
    return built if built.is_file() else None


def _name_fork() -> str:
    own = find_fork_build()
    if own is not None:
        return f"{DISTRIBUTION}, library {_digest_build(own, FORK_VARIABLE)}"
    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)}"
    except PackageNotFoundError as error:
        raise AdapterUnavailable(describe_lacking("llama_cpp")) from error


def _digest_build(file: Path, told_by: str) -> str:
    """Return what changes with a library and those of ggml beside it."""
    try:
        whole = file.resolve(strict=True)
        files = sorted({whole, *whole.parent.glob("*ggml*")})
        return _digest_files(
            tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())
        )
    except OSError as error:
        raise AdapterUnavailable(f"{told_by} names {file}, which cannot be read ({error})") from None


@cache
def _digest_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    digests = "".join(hash_file(file) for file, _, _ in files)
    return blake2b(digests.encode(), digest_size=8).hexdigest()
