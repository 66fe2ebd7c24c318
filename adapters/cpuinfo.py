"""What the system says of this machine's processor."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_ISA = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
ISA_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables of the environment that keep runtimes from instruction sets: another processor, as far as bits go."""
_CPUINFO = Path("/proc/cpuinfo")


def read_cpuinfo() -> dict[str, str]:
    """Return the facts of the first processor; none where the system does not tell."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                facts.setdefault(key.strip(), value.strip())
    return facts


def list_instruction_sets() -> tuple[str, ...]:
    """Return those that matter for products of matrices, and what the environment keeps runtimes from."""
    facts = read_cpuinfo()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    caps = (f"{name}={os.environ[name]}" for name in ISA_CAPS if os.environ.get(name))
    return (*(flag for flag in _ISA if flag in flags), *caps)
