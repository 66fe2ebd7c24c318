"""ik_llama.cpp built on this machine, for its processor: kernels of ours, and the bits of one row as of several.

The wheel is built for AVX2, and its kernels add up a single row in another order than rows of several, so that `bit`
pads each row that stands alone to two (docs/adr/0145-kernels-built-here.md). Here the source distribution of the same
release is built by CMake. Where several rows and one had loops of their own, those of several are taken for all.
K-quants of 4 to 6 bits get products of 512 bits (docs/adr/0150-sixteen-rows-of-weights.md).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from adapters.contract import AdapterUnavailable
from adapters.libllama import DISTRIBUTION, find_build_directory, find_fork_build

RELEASE: Final = "0.1.5"
_SOURCE_SHA256: Final = "33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad"
_SOURCES: Final = f"ik_llama_cpp_python-{RELEASE}/vendor/ik_llama.cpp"
_LIBRARIES: Final = ("src/libllama.so", "ggml/src/libggml.so")
_OPTIONS: Final = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON"),
    *("-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF"),
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # attention over KV caches in 4 bits: half of what there is to compile
)


class Edit(NamedTuple):
    """In `file`, between `begin` and `end`, `old` stands `times` times, and becomes `new`."""

    file: str
    begin: str
    end: str
    old: str
    new: str
    times: int


_KQUANTS: Final = "ggml/src/iqk/iqk_gemm_kquants.cpp"
_QUANTIZE: Final = "ggml/src/iqk/iqk_quantize.cpp"
_LEGACY: Final = "ggml/src/iqk/iqk_gemm_legacy_quants.cpp"
_BITS: Final = (4, 5, 6)
"""Of the K-quants that have kernels of ours (ADR 0150): those that files mostly have."""
_REPACKED: Final = (
    *((f"q{bits}_k", f"block_q{bits}_K", f"block_q{bits}_k_r4", 4, "QK_K") for bits in _BITS),
    ("q4_0", "block_q4_0", "block_iq4_nl_r8", 8, "QK4_0"),
)
"""What is arranged so: the types of rows and blocks, and how many rows and values a block has."""
EDITS: Final = (
    # Products with repacked K-quants, and attention: of one row they were another sum, or one over other pieces.
    Edit(
        *(_KQUANTS, "static void mul_mat_q2_k_r4_q8_k(", "> void set_functions("),
        *("if constexpr (nrc_y == 1)", "if constexpr (false)", 13),
    ),
    Edit("ggml/src/iqk/iqk_flash_attn.cpp", "int first_k = 0", "return true;\n}\n\n#else", " neq1 == 1 ", " false ", 3),
    # Matrices are arranged by sixteen rows, and multiplied so.
    Edit(
        *(_KQUANTS, "static void mul_mat_q6_k_r4_q8_k(", "> void set_functions("),
        *("template <typename Dequantizer", '#include "mul_mat_16_rows.h"\n\ntemplate <typename Dequantizer', 1),
    ),
    *(
        Edit(
            *(_KQUANTS, "bool iqk_set_kernels_kquants(", "bool iqk_convert_kquants_q8X_r8("),
            *(f"mul_mat_q{bits}_k_r4_q8_k, kernels", f"mul_mat_q{bits}_k_16_rows, kernels", 1),
        )
        for bits in _BITS
    ),
    Edit(
        *(_LEGACY, "static void mul_mat_q8_1_r8_q8_2(", "> void set_functions("),
        *(
            "template <typename Dequantizer",
            '#include "mul_mat_16_rows_of_q4_0.h"\n\ntemplate <typename Dequantizer',
            1,
        ),
    ),
    Edit(
        *(_LEGACY, "case GGML_TYPE_Q4_0_R8:", "case GGML_TYPE_Q5_0_R4:"),
        *("mul_mat_q4_0_r8_q8_2", "mul_mat_q4_0_16_rows", 2),
    ),
    Edit(
        *(_QUANTIZE, "bool iqk_modify_tensor(", "(ggml_type type) {\n    static"),
        *("const Repack * get_repack_info", '#include "repack_16_rows.h"\n\nconst Repack * get_repack_info', 1),
    ),
    *(
        Edit(
            *(_QUANTIZE, "const std::unordered_map<ggml_type, Repack> k_map", "GGML_TYPE_Q5_0_R4"),
            f"  {rows},  (Repack::repack_func)repack_{kind}}}",
            f"  ROWS_TOGETHER({rows}),  "
            f"(Repack::repack_func)REPACK_ROWS({row}, {block}, repack_{kind}, {rows}, {values})}}",
            1,
        )
        for kind, row, block, rows, values in _REPACKED
    ),
    Edit(
        *("ggml/src/iqk/iqk_mul_mat.cpp", "static inline int num_rows(", "#else", "switch (type) {"),
        " || ".join(f"type == GGML_TYPE_Q{bits}_K_R4" for bits in _BITS).join(
            ("if (", ") return 16;\n        switch (type) {")
        ),
        1,
    ),
    # The graphs of several contexts are computed in one pass.
    Edit(
        *("ggml/src/ggml.c", "return state_shared.ec;", "struct ggml_object * obj"),
        *("enum ggml_status ggml_graph", '#include "iqk/joint_graphs.h"\n\nenum ggml_status ggml_graph', 1),
    ),
    Edit(
        *("ggml/src/ggml-backend.cpp", "ggml_backend_cpu_graph_plan_compute(", "cpu_ctx->n_threads"),
        "GGML_CALL static enum ggml_status ggml_backend_cpu_graph_compute(ggml_backend_t backend, "
        "struct ggml_cgraph * cgraph) {\n",
        'extern "C" bool ggml_joint_defer(struct ggml_cgraph *);\n\n'
        "GGML_CALL static enum ggml_status ggml_backend_cpu_graph_compute(ggml_backend_t backend, "
        "struct ggml_cgraph * cgraph) {\n    if (ggml_joint_defer(cgraph)) {\n"
        "        return GGML_STATUS_SUCCESS;\n    }\n",
        1,
    ),
)
_KERNELS: Final = Path(__file__).parent / "kernels"
_STAMP: Final = "sources"
"""The file beside a library that says what it was built from."""
OUTDATED: Final = "built here from other kernels than this version of Outrider has"


@cache
def digest_sources() -> str:
    """Return a digest of all that decides what is built on a machine: the release, its options, and what is changed."""
    digest = hashlib.blake2b(f"{_SOURCE_SHA256} {_OPTIONS} {EDITS}".encode(), digest_size=8)
    for header in sorted(_KERNELS.glob("*.h")):
        digest.update(header.read_bytes())
    return digest.hexdigest()


def is_outdated() -> bool:
    """Return whether the library that is used was built here from other kernels than `build` would take."""
    library, directory = find_fork_build(), find_build_directory()
    if library is None or library.parent != directory:
        return False
    with suppress(OSError):
        return (directory / _STAMP).read_bytes() != digest_sources().encode()
    return True


def edit_sources(directory: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Change sources as `edits` say. Raises AdapterUnavailable where a file is not as it was known."""
    for edit in edits:
        path = directory / edit.file
        head, begin, rest = path.read_text(encoding="utf-8").partition(edit.begin)
        part, end, tail = rest.partition(edit.end)
        if not begin or not end or part.count(edit.old) != edit.times:
            raise AdapterUnavailable(
                f"{edit.file} of {DISTRIBUTION} {RELEASE} is not as it was known: nothing was built"
            )
        path.write_text(head + begin + part.replace(edit.old, edit.new) + end + tail, encoding="utf-8")
    for header in _KERNELS.glob("*.h"):
        shutil.copy2(header, directory / "ggml/src/iqk")


def find_tools() -> tuple[str, str]:
    """Return CMake and a C++ compiler. Raises AdapterUnavailable naming what lacks."""
    beside = Path(sys.executable).parent
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(beside))
    if cmake is None:
        raise AdapterUnavailable("cmake is not here: pip install cmake")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise AdapterUnavailable("there is no C++ compiler: install g++ or clang, or name one in CXX")
    return cmake, compiler


def build(source: Path | None, jobs: int, tell: Callable[[str], object]) -> Path:
    """Build the library, and put it where adapters.libllama finds it; returns the file. `source`: the distribution's
    archive, else pip downloads it. `tell` gets a line for each step. Raises AdapterUnavailable."""
    cmake, compiler = find_tools()
    target = find_build_directory()
    if is_outdated():
        tell(f"{target} was {OUTDATED}: it is replaced")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdapterUnavailable(
            f"{target} cannot be made: {error.strerror}; run it as who owns {sys.prefix}"
        ) from None
    with tempfile.TemporaryDirectory(prefix="outrider-build-") as scratch:
        directory = Path(scratch)
        archive = source or _download(directory, tell)
        tell(f"unpack {archive.name}")
        _unpack(archive, directory)
        sources = directory / _SOURCES
        edit_sources(sources)
        made = directory / "made"
        options = [*_OPTIONS, f"-DCMAKE_CXX_COMPILER={compiler}"]
        _run([cmake, "-S", str(sources), "-B", str(made), *options], "cmake finds no way to build it", tell)
        tell(f"compile with {jobs} jobs: some minutes")
        _run([cmake, "--build", str(made), "--target", "llama", "--parallel", str(jobs)], "it does not compile", tell)
        tell("check its products")
        _check_products(compiler, sources, made)
        for name in reversed(_LIBRARIES):  # libllama.so last: where it is, all is
            kept = target / Path(name).name
            shutil.copy2(made / name, kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
        (target / _STAMP).write_text(digest_sources(), encoding="utf-8")
    return target / Path(_LIBRARIES[0]).name


def _check_products(compiler: str, sources: Path, made: Path) -> None:
    program, library = made / "check_kernels", made / _LIBRARIES[1]
    command = [compiler, "-O2", f"-I{sources / 'ggml/include'}", str(_KERNELS / "check_kernels.cpp"), str(library)]
    _run(
        [*command, f"-Wl,-rpath,{library.parent}", "-o", str(program)], "its products cannot be checked", lambda _: None
    )
    _run([str(program)], "what was built does not multiply as it should", lambda _: None)


def _download(directory: Path, tell: Callable[[str], object]) -> Path:
    tell(f"download the sources of {DISTRIBUTION} {RELEASE}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", DISTRIBUTION]
    _run([*pip, "--dest", str(directory), f"{DISTRIBUTION}=={RELEASE}"], "pip does not download it", tell)
    return next(directory.glob("*.tar.gz"))


def _unpack(archive: Path, directory: Path) -> None:
    try:
        with archive.open("rb") as packed_bytes:
            if hashlib.file_digest(packed_bytes, "sha256").hexdigest() != _SOURCE_SHA256:
                raise AdapterUnavailable(f"{archive} is not the source distribution of {DISTRIBUTION} {RELEASE}")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
    except OSError as error:
        raise AdapterUnavailable(f"{archive} cannot be unpacked: {error.strerror}") from error


def _run(command: list[str], fault: str, tell: Callable[[str], object]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        for line in errors[:5]:
            tell(line)
        raise AdapterUnavailable(f"{fault}: {errors[0] if errors else f'exit status {done.returncode}'}")
