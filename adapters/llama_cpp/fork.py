"""ik_llama.cpp through the bindings of its Python package, `ik_llama_cpp`.

The package declares the structures that are given by value. The defaults that the library gives are compared with what
these are known to hold: where they differ, the bindings and the library are not of one version.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import AdapterUnavailable, Exactness, Logits, NumericalClass, OutOfMemory
from adapters.libllama import DISTRIBUTION, FORK_VARIABLE, find_build_directory, find_fork_build
from adapters.llama_cpp.native import (
    BOOL,
    IN_ANY_ROWS,
    IN_PAIRS,
    INT,
    POINTER,
    SIZE,
    CallTable,
    GgmlDevice,
    NativeLibrary,
    Structures,
    check_processor,
    spinning_briefly,
)
from adapters.llama_cpp.native_build import OUTDATED, is_outdated
from adapters.llama_cpp.state import StateFormat, read_format
from device_profiles.numerical_class import FIXED_WIDTH

INSTALL: Final = "outrider extras install llama"
_TESTED: Final = ("0.1.5",)
"""Versions whose structures and state format are known to be those that this module reads."""
_FLAGS: Final = INT
_MORE: Final[CallTable] = {
    "llama_free_model": ([POINTER], None),
    "llama_kv_cache_seq_rm": ([POINTER, INT, INT, INT], BOOL),
    "llama_model_has_recurrent": ([POINTER], BOOL),
    "llama_n_layer": ([POINTER], INT),
    "llama_n_vocab": ([POINTER], INT),
    "llama_state_seq_get_data": ([POINTER, POINTER, SIZE, INT, _FLAGS], SIZE),
    "llama_state_seq_get_size": ([POINTER, INT, _FLAGS], SIZE),
    "llama_state_seq_set_data": ([POINTER, POINTER, SIZE, INT, _FLAGS], SIZE),
}
_JOINING: Final[CallTable] = {
    "ggml_joint_begin": ([], None),
    "ggml_joint_compute": ([INT], INT),
    "ggml_joint_end": ([], None),
    "ggml_joint_output": ([INT, ctypes.POINTER(INT)], ctypes.POINTER(ctypes.c_float)),
}
"""Functions of ours, in libraries that were built here (kernels/joint_graphs.h). Libraries of earlier versions go on
being used (ADR 0156), so one that takes or does something else gets another name."""
_log = logging.getLogger(__name__)


class ForkLibrary(NativeLibrary):
    """See the module. Its matrices are repacked for this processor's kernels; it has no other device."""

    has_faults = True
    least_fed_rows = 2
    """It reads the token of a forward of one, and there is none (`llama_build_graph`)."""
    most_contexts = 24
    """ggml has room for 64 of its own contexts (GGML_MAX_CONTEXTS), of which each of these takes two and models take
    some. Behind the last the library reads through a null pointer."""

    def __init__(self) -> None:
        """Raises AdapterUnavailable where the package is not installed, is not of a version that is known, or is not
        built for this processor."""
        check_processor(DISTRIBUTION)
        try:
            installed = version(DISTRIBUTION)
            own = find_fork_build()
            if own is not None:
                os.environ[FORK_VARIABLE] = str(own)  # which the package reads as it is imported
            with spinning_briefly():
                from ik_llama_cpp import _ctypes_api as api
        except (PackageNotFoundError, ImportError, OSError) as error:
            raise AdapterUnavailable(f"ik_llama.cpp is not installed ({error}): {INSTALL}") from None
        if installed not in _TESTED:
            raise AdapterUnavailable(
                f"{DISTRIBUTION} {installed} is installed, and this adapter knows {', '.join(_TESTED)}: {INSTALL}"
            )
        structures = Structures(api.llama_model_params, api.llama_context_params, api.llama_batch)
        release = f"{DISTRIBUTION} {installed}" + ("" if own is None else ", built here")
        self._adds_alike = own is not None and own.parent == find_build_directory()
        self.joins = self._adds_alike and hasattr(api._lib, "ggml_joint_begin")
        calls = _MORE | (_JOINING if self.joins else {})
        name = f"ik_llama.cpp ({release})"
        if is_outdated():
            name = f"ik_llama.cpp ({DISTRIBUTION} {installed}, {OUTDATED}: outrider build-kernels)"
            _log.warning("%s", name)
        super().__init__(name, release, api._lib, structures, calls)

    @property
    def way_out(self) -> str:
        return f"install it again: {INSTALL}"

    def _check_defaults(self, model: Any, context: Any) -> None:
        defaults = (model.n_ubatch, model.use_mmap, model.repack_tensors, context.n_batch, context.yarn_ext_factor)
        if defaults != (512, True, False, 2048, -1.0):
            raise AdapterUnavailable(f"the bindings of {DISTRIBUTION} do not fit its library: {self.way_out}")

    def list_devices(self) -> list[GgmlDevice]:
        return []

    def list_classes(self, device: str, exactness: Exactness) -> list[list[NumericalClass]]:
        if exactness is not Exactness.BIT:
            return [[IN_ANY_ROWS]]
        padded = [[IN_PAIRS], [replace(IN_ANY_ROWS, fixed_width=FIXED_WIDTH)]]
        return [[IN_ANY_ROWS], *padded] if self._adds_alike else padded

    def _set_model_options(self, options: Any, device: str, layers: int, *, repack: bool) -> object:
        options.use_mmap, options.repack_tensors, options.n_gpu_layers, options.flash_attn = not repack, repack, 0, True
        return None

    def _set_context_options(self, options: Any, rows: int, device: str) -> None:
        options.flash_attn, options.offload_kqv = True, False

    def close_model(self, model: int) -> None:
        self._calls["llama_free_model"](model)

    def describe_model(self, model: int) -> tuple[int, int]:
        return self._calls["llama_n_layer"](model), self._calls["llama_n_vocab"](model)

    def find_other_kind(self, model: int) -> str:
        return "has an encoder" if self._calls["llama_model_has_encoder"](model) else ""

    def is_recurrent(self, model: int) -> bool:
        return bool(self._calls["llama_model_has_recurrent"](model))

    def cut(self, context: int, positions: int) -> None:
        self._calls["llama_kv_cache_seq_rm"](context, 0, positions, -1)

    def read_state(self, context: int) -> NDArray[np.uint8]:
        return self._read_bytes("llama_state_seq", context, 0, 0)

    def read_sequence(self, context: int) -> NDArray[np.uint8]:
        return self.read_state(context)

    def write_state(self, context: int, state: NDArray[np.uint8]) -> None:
        if self._calls["llama_state_seq_set_data"](context, state.ctypes.data, len(state), 0, 0) != len(state):
            raise self._refuse_state("take")

    @contextmanager
    def share_pass(self, threads: int) -> Iterator[None]:
        self._calls["ggml_joint_begin"]()
        try:
            yield
            if self._calls["ggml_joint_compute"](threads) < 0:
                raise OutOfMemory(f"{self.name} has no memory for a pass over several sequences", can_go_on=True)
        finally:
            self._calls["ggml_joint_end"]()

    def read_joined(self, place: int, outputs: int) -> Logits:
        rows = INT()
        logits = self._calls["ggml_joint_output"](place, ctypes.byref(rows))
        return np.ctypeslib.as_array(logits, (rows.value, outputs))

    def read_format(self, context: int) -> StateFormat:
        return read_format(self.read_state(context))
