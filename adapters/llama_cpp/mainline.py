"""Mainline llama.cpp: a libllama of a Python package, or of the user's own build, on whatever devices it was built for.

The structures that are given by value change from build to build. Those of the builds that were looked at stand here;
the defaults that a library gives tell which of them is its own. Looked at: `xllamacpp` 2026.10.11549, `llama.h` of the
source in `llama-cpp-python` 0.3.36, and release v0.5.0 of llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import AdapterUnavailable, Exactness, NumericalClass, RuntimeFailed
from adapters.llama_cpp.mainline_state import MainlineFormat, read_format, without_head
from adapters.llama_cpp.native import (
    BOOL,
    IN_ANY_ROWS,
    IN_PAIRS,
    INT,
    ON_PROGRESS,
    POINTER,
    SIZE,
    CallTable,
    GgmlDevice,
    GpuKind,
    NativeLibrary,
    Structures,
    spinning_briefly,
)
from device_profiles.device_names import is_processor, is_same_device

_UINT, _FLOAT = ctypes.c_uint32, ctypes.c_float
_GPU, _GPU_IN_HOST_MEMORY = 1, 2
"""ggml's kinds of devices that hold layers. Its accelerators help the processor with products, and hold none."""
_IN_SOFTWARE: Final = ("llvmpipe", "swiftshader")
"""What drivers are called that let the processor compute. ggml says of them that they are GPUs."""
_METAL: Final = "MTL"
"""Apple's GPUs work in the host's memory, and ggml does not say so."""
_RESERVE: Final = ("reserve", ctypes.c_uint8 * 256)
"""What ends the structures of options: the library of another build may write more than stands here."""
_READ, _BY_DEVICE = 0, -1
"""How a file is loaded: into memory, or mapped where the device can."""
# The library's value; ADR 0109: without it a state of 256 positions takes 16 ms to read.
_FLASH_ON: Final = 1
_FIXED_WIDTHS: Final = ((4, 2), (8,), (1,))
"""In tiers. Measured with xllamacpp on x86: flash attention divides the positions of a single row from 512 on, so no
class has single rows beside others. Formats that are not repacked (Q4_1) keep their bits from two rows on; of those
that are (Q4_K) four rows go through one kernel, and what is left over through another."""
_FIXED_WIDTHS_OF_GPUS: Final = ((8, 16, 4), (1,))
"""In tiers. ggml has kernels of their own for up to 8 rows, and for some numbers of them. Measured with Vulkan in
software: {1}, {2 to 4}, {5}, {6 to 8}, {12 to 24}."""
_MORE: Final[CallTable] = {
    "ggml_backend_dev_count": ([], SIZE),
    "ggml_backend_dev_description": ([POINTER], ctypes.c_char_p),
    "ggml_backend_dev_get": ([SIZE], POINTER),
    "ggml_backend_dev_memory": ([POINTER, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE)], None),
    "ggml_backend_dev_name": ([POINTER], ctypes.c_char_p),
    "ggml_backend_dev_type": ([POINTER], ctypes.c_int),
    "ggml_backend_load_all_from_path": ([ctypes.c_char_p], None),
    "llama_get_memory": ([POINTER], POINTER),
    "llama_memory_seq_rm": ([POINTER, INT, INT, INT], BOOL),
    "llama_model_free": ([POINTER], None),
    "llama_model_get_vocab": ([POINTER], POINTER),
    "llama_model_is_diffusion": ([POINTER], BOOL),
    "llama_model_is_hybrid": ([POINTER], BOOL),
    "llama_model_is_recurrent": ([POINTER], BOOL),
    "llama_model_n_layer": ([POINTER], INT),
    "llama_state_get_data": ([POINTER, POINTER, SIZE], SIZE),
    "llama_state_get_size": ([POINTER], SIZE),
    "llama_state_seq_get_data": ([POINTER, POINTER, SIZE, INT], SIZE),
    "llama_state_seq_get_size": ([POINTER, INT], SIZE),
    "llama_state_seq_set_data": ([POINTER, POINTER, SIZE, INT], SIZE),
    "llama_vocab_n_tokens": ([POINTER], INT),
}
_LORA: Final[CallTable] = {
    "llama_adapter_lora_init": ([POINTER, ctypes.c_char_p], POINTER),
    "llama_set_adapters_lora": ([POINTER, ctypes.POINTER(POINTER), SIZE, ctypes.POINTER(_FLOAT)], INT),
}
"""Of builds that apply several adapters at a time; those before have other functions, and serve models without."""


def _list_model_fields(*more: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a model's options. `more`: what some builds have behind `load_mode`."""
    return [
        ("devices", POINTER),
        ("tensor_buft_overrides", POINTER),
        ("n_gpu_layers", INT),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        *more,
        ("main_gpu", INT),
        ("tensor_split", POINTER),
        ("progress_callback", ON_PROGRESS),
        ("progress_callback_user_data", POINTER),
        ("kv_overrides", POINTER),
        *((name, BOOL) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc")),
        ("load_mtp", BOOL),
        _RESERVE,
    ]


class _ModelOptions(ctypes.Structure):
    _fields_ = _list_model_fields(("lazy_mode", ctypes.c_int))


class _ShorterModelOptions(ctypes.Structure):
    """As in build 10434."""

    _fields_ = _list_model_fields()


def _list_context_fields(*unknown: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a context's options. `unknown`: what some builds have in front of the flags."""
    return [
        *((name, _UINT) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, _UINT) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, INT) for name in ("n_threads", "n_threads_batch")),
        *((f"{name}_type", ctypes.c_int) for name in ("ctx", "rope_scaling", "pooling", "attention", "flash_attn")),
        *((name, _FLOAT) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, _FLOAT) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", _UINT),
        ("defrag_thold", _FLOAT),
        ("cb_eval", POINTER),
        ("cb_eval_user_data", POINTER),
        *((name, ctypes.c_int) for name in ("type_k", "type_v")),
        ("abort_callback", POINTER),
        ("abort_callback_data", POINTER),
        *unknown,
        *((name, BOOL) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", POINTER),
        ("n_samplers", SIZE),
        ("ctx_other", POINTER),
        _RESERVE,
    ]


class _ContextOptions(ctypes.Structure):
    _fields_ = _list_context_fields()


class _LongerContextOptions(ctypes.Structure):
    """As in xllamacpp 2026.10.11549."""

    _fields_ = _list_context_fields(("unknown", POINTER))


_MODEL_OPTIONS: Final = (_ModelOptions, _ShorterModelOptions)
_CONTEXT_OPTIONS: Final = (_ContextOptions, _LongerContextOptions)


class _Batch(ctypes.Structure):
    _fields_ = [  # ctypes reads a plain list
        ("n_tokens", INT),
        ("token", ctypes.POINTER(INT)),
        ("embd", POINTER),
        ("pos", ctypes.POINTER(INT)),
        ("n_seq_id", ctypes.POINTER(INT)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(INT))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_MODEL_DEFAULTS: Final = {
    "devices": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS: Final = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


class MainlineLibrary(NativeLibrary):
    """See the module."""

    splits_single_rows = True
    """From 512 positions on, flash attention does (ADR 0109)."""

    def __init__(self, file: Path, name: str, version: str) -> None:
        """`name`: for people; `version` changes with the library.

        Raises AdapterUnavailable where the file cannot be loaded, or is not of a build whose structures are known.
        """
        self._file = file
        try:
            with spinning_briefly():
                handle = ctypes.CDLL(str(file))
        except OSError as error:
            raise AdapterUnavailable(f"{name} cannot be loaded ({error}): {self.way_out}") from None
        structures = Structures(
            _find_options(handle, "llama_model_default_params", _MODEL_OPTIONS, _MODEL_DEFAULTS),
            _find_options(handle, "llama_context_default_params", _CONTEXT_OPTIONS, _CONTEXT_DEFAULTS),
            _Batch,
        )
        self._applies_loras = all(hasattr(handle, call) for call in _LORA)
        calls = _MORE | _LORA if self._applies_loras else _MORE
        super().__init__(f"llama.cpp ({name})", version, handle, structures, calls)
        if not self._calls["ggml_backend_dev_count"]():  # each kind of device is a library of its own, beside it
            self._calls["ggml_backend_load_all_from_path"](str(file.parent).encode())

    @property
    def way_out(self) -> str:
        return (
            f"{self._file} is to be mainline llama.cpp's libllama of a build that this adapter knows, as that of "
            "xllamacpp 2026.10.11549 or llama-cpp-python 0.3.36. Install one of these, or choose another library "
            "(OUTRIDER_LIBLLAMA, adapters.llama_cpp.library)."
        )

    def _check_defaults(self, model: Any, context: Any) -> None:
        for defaults, expected in ((model, _MODEL_DEFAULTS), (context, _CONTEXT_DEFAULTS)):
            for field, value in expected.items():
                if getattr(defaults, field, value) != value:
                    raise AdapterUnavailable(
                        f"{self.name} has other structures: where {field} would stand by default is "
                        f"{getattr(defaults, field)!r}, not {value!r}: {self.way_out}"
                    )

    def list_devices(self) -> list[GgmlDevice]:
        return [device for device, _ in self._find_devices()]

    def _find_devices(self) -> list[tuple[GgmlDevice, int]]:
        calls, devices = self._calls, []
        for index in range(calls["ggml_backend_dev_count"]()):
            handle = calls["ggml_backend_dev_get"](index)
            kind = calls["ggml_backend_dev_type"](handle)
            if kind not in (_GPU, _GPU_IN_HOST_MEMORY):
                continue
            free, total = SIZE(), SIZE()
            calls["ggml_backend_dev_memory"](handle, free, total)
            name, full_name = (calls[f"ggml_backend_dev_{of}"](handle).decode() for of in ("name", "description"))
            devices.append(
                (GgmlDevice(name, full_name, total.value, free.value, _name_kind(kind, name, full_name)), handle)
            )
        return devices

    def list_classes(self, device: str, exactness: Exactness) -> list[list[NumericalClass]]:
        if exactness is not Exactness.BIT:
            return [[IN_ANY_ROWS]]
        first, widths = ([[IN_PAIRS]], _FIXED_WIDTHS) if is_processor(device) else ([], _FIXED_WIDTHS_OF_GPUS)
        return [*first, *([replace(IN_ANY_ROWS, fixed_width=width) for width in tier] for tier in widths)]

    def _set_model_options(self, options: Any, device: str, layers: int, *, repack: bool) -> object:
        handles = [handle for known, handle in self._find_devices() if is_same_device(known.name, device)]
        devices = (POINTER * 2)(*handles[:1])  # up to the first that is 0; none is the processor alone
        options.devices = ctypes.cast(devices, POINTER)
        options.n_gpu_layers = layers if handles else 0
        options.load_mode = _BY_DEVICE if handles else _READ
        options.use_extra_bufts = repack
        return devices

    def _set_context_options(self, options: Any, rows: int, device: str) -> None:
        options.flash_attn_type, options.kv_unified = _FLASH_ON, False
        options.n_outputs_max = options.n_outputs_max_per_seq = rows
        options.offload_kqv = options.op_offload = not is_processor(device)

    def close_model(self, model: int) -> None:
        self._calls["llama_model_free"](model)

    def load_lora(self, model: int, file: Path) -> int:
        if not self._applies_loras:
            return super().load_lora(model, file)
        self._said.clear()
        return int(self._calls["llama_adapter_lora_init"](model, os.fsencode(file)) or 0)

    def apply_lora(self, context: int, lora: int) -> None:
        if code := self._calls["llama_set_adapters_lora"](context, (POINTER * 1)(lora), 1, (_FLOAT * 1)(1.0)):
            raise RuntimeFailed(f"{self.name}: llama_set_adapters_lora returned {code}")

    def describe_model(self, model: int) -> tuple[int, int]:
        vocabulary = self._calls["llama_model_get_vocab"](model)
        return self._calls["llama_model_n_layer"](model), self._calls["llama_vocab_n_tokens"](vocabulary)

    def find_other_kind(self, model: int) -> str:
        if self._calls["llama_model_has_encoder"](model):
            return "has an encoder"
        return "writes in rounds of diffusion" if self._calls["llama_model_is_diffusion"](model) else ""

    def is_recurrent(self, model: int) -> bool:
        return any(self._calls[f"llama_model_is_{kind}"](model) for kind in ("recurrent", "hybrid"))

    def cut(self, context: int, positions: int) -> None:
        self._calls["llama_memory_seq_rm"](self._calls["llama_get_memory"](context), 0, positions, -1)

    def read_state(self, context: int) -> NDArray[np.uint8]:
        return without_head(self._read_bytes("llama_state", context))

    def read_sequence(self, context: int) -> NDArray[np.uint8]:
        return self._read_bytes("llama_state_seq", context, 0)

    def write_state(self, context: int, state: NDArray[np.uint8]) -> None:
        if self._calls["llama_state_seq_set_data"](context, state.ctypes.data, len(state), 0) != len(state):
            raise self._refuse_state("take")

    def read_format(self, context: int) -> MainlineFormat:
        return read_format(self.read_state(context), self.read_sequence(context))


def _name_kind(kind: int, name: str, full_name: str) -> GpuKind:
    if any(word in full_name.casefold() for word in _IN_SOFTWARE):
        return "software"
    return "integrated" if kind == _GPU_IN_HOST_MEMORY or name.startswith(_METAL) else "discrete"


def _find_options(
    handle: Any, call: str, known: Sequence[type[ctypes.Structure]], defaults: Mapping[str, object]
) -> type[ctypes.Structure]:
    """Return which of the known structures a library's defaults fit; the first one where none does."""
    give_defaults = getattr(handle, call, None)
    if give_defaults is None:
        return known[0]
    for options in known:
        give_defaults.argtypes, give_defaults.restype = [], options
        given = give_defaults()
        if all(getattr(given, field, value) == value for field, value in defaults.items()):
            return options
    return known[0]
