"""What a runtime's error means, by its type and its words: runtimes have no types for most of what can happen."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from adapters.contract import DeviceLost, MemoryCorrupt, NoKernel, OutOfMemory, Overheated, RuntimeFailed
from adapters.cpuinfo import ISA_CAPS

_NO_KERNEL = ("could not create a primitive descriptor",)
"""oneDNN looks for code that fits the shapes, the formats and the instruction sets; it allocates next to nothing."""

_OUT_OF_MEMORY = (
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED and the like
    "bad_alloc",
    "bfcarena",
    "can't alloc",
    "cannot allocate",
    "cl_mem_object_allocation_failure",
    "cl_out_of_host_memory",
    "could not create a memory",
    "could not create a primitive",  # oneDNN drops its reason; shapes that it knows fail so without memory only
    "failed to allocate",
    "not enough memory",
    "out of memory",
    "out_of_device_memory",
    "out_of_host_memory",
    "unable to allocate",
)
_CORRUPT = ("ecc error", "ecc_uncorrectable", "eccuncorrectable", "uncorrectable ecc")
_CORRUPT_XID = re.compile(r"xid\W*(?:\([^)]*\)\W*)?(?:48|64|94|95)\b")
"""The numbers under which NVIDIA's driver reports memory errors that it could not correct."""
_HOT = ("thermal", "overheat", "over temperature", "overtemperature", "temperature limit", "too hot")
_LOST = (
    "cuda error",
    "cuda_error",
    "cudaerror",
    "cudnn_status_execution_failed",
    "cublas_status_execution_failed",
    "cl_device_not_available",
    "device lost",
    "device removed",
    "device was removed",
    "device_lost",
    "device_removed",
    "fallen off the bus",
    "hip error",
    "no longer available",
    "npu hang",
    "xid ",
)
_WORDS = (
    (NoKernel, _NO_KERNEL),  # before the words for memory, which are a part of its own
    (OutOfMemory, _OUT_OF_MEMORY),
    (MemoryCorrupt, _CORRUPT),
    (Overheated, _HOT),
    (DeviceLost, _LOST),
)


def classify_failure(
    error: BaseException, runtime: str, *, out_of_memory: Sequence[type[BaseException]] = (), last_line: bool = False
) -> DeviceLost:
    """Return a failure of a forward or of a load as the contract's.

    `out_of_memory`: the runtime's own types for that; whether the model can go on is for the caller to say.
    `last_line`: where nothing in a text of several lines tells what happened, its last line is shown, else its first.
    """
    lines = str(error).strip().splitlines() or ["no reason given"]
    kinds = [_find_kind(line.lower()) for line in lines]
    cause = next((line for line, kind in zip(lines, kinds, strict=True) if kind), lines[-1 if last_line else 0])
    if NoKernel in kinds and OutOfMemory not in kinds:
        return NoKernel(f"{runtime} has no code for a part of the model on this device: {cause}{_describe_caps()}")
    if isinstance(error, (MemoryError, *out_of_memory)) or OutOfMemory in kinds:
        return OutOfMemory(f"{runtime} ran out of memory: {cause}")
    if MemoryCorrupt in kinds:
        return MemoryCorrupt(f"{runtime} met a memory error that could not be corrected: {cause}")
    if Overheated in kinds:
        return Overheated(f"{runtime} stopped, as the device is too hot: {cause}")
    if DeviceLost in kinds:
        return DeviceLost(f"{runtime} lost its device: {cause}")
    return RuntimeFailed(f"{runtime} failed: {cause}")


def _describe_caps() -> str:
    """Return what keeps runtimes from instruction sets here, and the way out; "" where nothing does."""
    caps = [f"{name}={value}" for name in ISA_CAPS if (value := os.environ.get(name))]
    return f" (the environment has {' and '.join(caps)}, which takes instruction sets away: unset it)" if caps else ""


def _find_kind(line: str) -> type[DeviceLost] | None:
    if _CORRUPT_XID.search(line):
        return MemoryCorrupt
    for kind, words in _WORDS:
        if any(word in line for word in words):
            return kind
    return None
