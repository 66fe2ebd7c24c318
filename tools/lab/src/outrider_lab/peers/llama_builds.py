"""Which llama.cpp a comparison runs, and for which processor it was built: its server on PATH, else the wheel's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adapters.hardware import processor
from outrider_lab.free_port import find_free_port
from outrider_lab.peers.contract import EngineMissing

PROGRAM = "llama-server"
WHEEL = "xllamacpp"
INSTALL = (
    f"{PROGRAM} is not on PATH: build llama.cpp for this machine as docs/benchmarks.md says"
    f" (https://github.com/ggml-org/llama.cpp), or pip install {WHEEL} for one that is built for AVX2"
)
_PROBE_S = 60.0
_TRACE = "4"  # the least verbosity at which every release tells its instruction sets
_FLAGS = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""Instruction sets as llama.cpp names them, and as the kernel does."""
_USED = re.compile(r"\b([A-Z0-9_]+) = 1\b")


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """A server of llama.cpp. `command` starts it, with the arguments of llama-server behind it; `program` says what it
    is. `number`: its build's, as "b11549", "" where only the server itself tells it."""

    command: tuple[str, ...]
    program: str
    number: str = ""


def find_server() -> LlamaBuild:
    """Return the server on PATH, else the one in an installed wheel. Raises EngineMissing where there is neither."""
    if (found := shutil.which(PROGRAM)) is not None:
        return LlamaBuild((found,), found)
    try:
        wheel = version(WHEEL)
    except PackageNotFoundError:
        raise EngineMissing(INSTALL) from None
    server = Path(__file__).with_name("llama_wheel.py")
    # -P: what lies beside that file is no module of its own.
    command = (sys.executable, "-P", str(server))
    return LlamaBuild(command, f"the wheel {WHEEL} {wheel}", f"b{wheel.rpartition('.')[2]}")


def name_build(build: LlamaBuild, told: str) -> str:
    """Return the build's number and commit; `told`: what the server says of itself, as "b11549-0c1e57098"."""
    number, _, commit = told.partition("-")
    if number not in ("", "b0"):
        return told
    if build.number:
        return f"{build.number} (by the version of the wheel)"
    return "of unknown number" if commit in ("", "unknown") else f"of unknown number, commit {commit}"


def read_instructions(build: LlamaBuild) -> list[str]:
    """Return the instruction sets that a server was built for, as llama.cpp names them: none where it does not tell.

    It tells them before it loads, so it is started with a file that is no model."""
    arguments = ["-m", os.devnull, "-lv", _TRACE, "--host", "127.0.0.1", "--port", str(find_free_port())]
    said = ""
    with suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(
            [*build.command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_S,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
    line = next((line for line in said.splitlines() if "system_info:" in line), "")
    return [name for name in _USED.findall(line) if name in _FLAGS]


def judge_build(instructions: Collection[str], flags: Collection[str] | None = None) -> str:
    """Say whether a server was built for this processor, whose `flags` are the kernel's names."""
    if not instructions:
        return "not told"
    flags = processor().isa if flags is None else flags
    unused = [name for name, flag in _FLAGS.items() if flag in flags and name not in instructions]
    built = ", ".join(instructions)
    if unused:
        return f"no: it is built for {built}, and this processor has {', '.join(unused)}, too"
    return f"yes: it is built for {built}, all of this processor's that it knows"
