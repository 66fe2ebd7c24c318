"""ik_llama.cpp through the bindings of its Python package, `ik_llama_cpp`.

The package declares the structures that are given by value, and some of the functions. Those that it does not declare
stand in `_MORE`. The defaults that the library gives are compared with what these structures are known to hold: where
they differ, the bindings and the library are not of one version.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import AdapterUnavailable, Logits, RuntimeFailed
from adapters.hardware import processor

DISTRIBUTION: Final = "ik-llama-cpp-python"
INSTALL: Final = "pip install 'outrider[llama]'"
_TESTED: Final = ("0.1.5",)
"""Versions whose structures and state format are known to be those that this module reads."""
_BUILT_FOR: Final = {"x86_64": ("avx2", "fma", "f16c")}
"""Instruction sets that the package's wheels need, by the machine."""

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_MORE: Final[dict[str, tuple[list[Any], Any]]] = {
    "llama_get_logits": ([_POINTER], ctypes.POINTER(ctypes.c_float)),
    "llama_kv_cache_clear": ([_POINTER], None),
    "llama_kv_cache_seq_rm": ([_POINTER, _INT, _INT, _INT], ctypes.c_bool),
    "llama_model_has_encoder": ([_POINTER], ctypes.c_bool),
    "llama_model_has_recurrent": ([_POINTER], ctypes.c_bool),
    "llama_n_ctx_train": ([_POINTER], _INT),
    "llama_n_layer": ([_POINTER], _INT),
    "llama_n_vocab": ([_POINTER], _INT),
    "llama_state_seq_get_data": ([_POINTER, _POINTER, _SIZE, _INT, ctypes.c_uint32], _SIZE),
    "llama_state_seq_get_size": ([_POINTER, _INT, ctypes.c_uint32], _SIZE),
    "llama_state_seq_set_data": ([_POINTER, _POINTER, _SIZE, _INT, ctypes.c_uint32], _SIZE),
}
_LOG: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_WARNING: Final = 3
_KEPT_LINES: Final = 20
MOST_CONTEXTS: Final = 24
"""That a process may have open: ggml has room for 64 of its own contexts (GGML_MAX_CONTEXTS), of which each of these
takes two and models take some. Behind the last the library reads through a null pointer."""
_SPINS: Final = "GOMP_SPINCOUNT"

_log = logging.getLogger(__name__)


class ForkLibrary:
    """See the module. Handles are addresses; who closes a model has closed its contexts. One thread at a time uses a
    context."""

    def __init__(self) -> None:
        """Raises AdapterUnavailable where the package is not installed, is not of a version that is known, or is not
        built for this processor."""
        check_processor()
        try:
            self.version = version(DISTRIBUTION)
            with _spinning_briefly():
                from ik_llama_cpp import _ctypes_api as api
        except (PackageNotFoundError, ImportError, OSError) as error:
            raise AdapterUnavailable(f"ik_llama.cpp is not installed ({error}): {INSTALL}") from None
        if self.version not in _TESTED:
            raise AdapterUnavailable(
                f"{DISTRIBUTION} {self.version} is installed, and this adapter knows {', '.join(_TESTED)}: {INSTALL}"
            )
        self._api: Any = api
        self.name = f"ik_llama.cpp ({DISTRIBUTION} {self.version})"
        self._calls: dict[str, Any] = {}
        for name, (arguments, result) in _MORE.items():
            call = getattr(api._lib, name)
            call.argtypes, call.restype = arguments, result
            self._calls[name] = call
        self.contexts = 0
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._hear = _LOG(self._keep_line)
        api._lib.llama_log_set(self._hear, None)
        _check_defaults(api)
        api.llama_backend_init()

    def _keep_line(self, level: int, text: bytes | None, _data: object) -> None:
        line = (text or b"").decode(errors="replace").strip()
        if not line:
            return
        if level >= _WARNING:
            self._said.append(line)
        _log.debug("%s", line)

    @classmethod
    @lru_cache(maxsize=1)
    def find(cls) -> ForkLibrary:
        """Return the library, which a process loads once. Raises AdapterUnavailable."""
        return cls()

    @property
    def last_words(self) -> str:
        """The last lines that the library said of something wrong."""
        return "\n".join(self._said)

    def load_model(self, path: Path, tell: Callable[[float], None]) -> int:
        """Read a file into memory, its matrices repacked for this processor's kernels. Returns 0 where that failed."""
        self._said.clear()
        asked = self._api.llama_model_default_params()
        asked.use_mmap, asked.repack_tensors, asked.n_gpu_layers, asked.flash_attn = False, True, 0, True

        def on_progress(fraction: float, _data: object) -> bool:
            tell(fraction)
            return True

        kept = self._api.llama_progress_callback(on_progress)
        asked.progress_callback = kept
        return int(self._api.llama_model_load_from_file(str(path).encode(), asked) or 0)

    def close_model(self, model: int) -> None:
        """Give a model's memory back."""
        self._api.llama_free_model(model)

    def describe_model(self, model: int) -> tuple[int, int, int]:
        """Return how many layers, tokens of the vocabulary, and positions of its training a model has."""
        calls = self._calls
        return calls["llama_n_layer"](model), calls["llama_n_vocab"](model), calls["llama_n_ctx_train"](model)

    def find_state_kind(self, model: int) -> str:
        """Return what a model has beside a KV cache, in words; "" where it has that alone."""
        if self._calls["llama_model_has_encoder"](model):
            return "an encoder"
        return "a recurrent state" if self._calls["llama_model_has_recurrent"](model) else ""

    def open_context(self, model: int, cells: int, rows: int, threads: int) -> int:
        """Open a sequence's context of so many positions, for forwards of at most `rows`. Returns 0 where that
        failed."""
        self._said.clear()
        asked = self._api.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch, asked.n_seq_max = cells, rows, rows, 1
        asked.n_threads = asked.n_threads_batch = threads
        asked.flash_attn, asked.offload_kqv = True, False
        context = int(self._api.llama_init_from_model(model, asked) or 0)
        self.contexts += context != 0
        return context

    def close_context(self, context: int) -> None:
        """Give a context's memory back."""
        self._api.llama_free(context)
        self.contexts -= 1

    def cut(self, context: int, positions: int) -> None:
        """Forget all positions behind the first so many."""
        self._calls["llama_kv_cache_seq_rm"](context, 0, positions, -1)

    def clear(self, context: int) -> None:
        """Forget all positions."""
        self._calls["llama_kv_cache_clear"](context)

    def new_batch(self, rows: int) -> Any:
        """Return room for the tokens of a forward, for `decode`."""
        batch = self._api.llama_batch_init(rows, 0, 1)
        for row in range(rows):
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
        return batch

    def free_batch(self, batch: Any) -> None:
        """Give a batch's memory back."""
        self._api.llama_batch_free(batch)

    def decode(self, context: int, batch: Any, tokens: Sequence[int], start: int, wanted: range) -> int:
        """Run tokens from position `start` on; the logits of the `wanted` rows are kept. Returns 0 where all went
        well."""
        self._said.clear()
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = start + row
            batch.logits[row] = row in wanted
        return int(self._api.llama_decode(context, batch))

    def read_logits(self, context: int, rows: int, outputs: int) -> Logits:
        """Return the logits of the last forward's wanted rows, in their order, as the library holds them."""
        return np.ctypeslib.as_array(self._calls["llama_get_logits"](context), (rows, outputs))

    def read_state(self, context: int) -> NDArray[np.uint8]:
        """Return the sequence's cache as the library writes it. Raises RuntimeFailed."""
        size = self._calls["llama_state_seq_get_size"](context, 0, 0)
        state = np.empty(size, np.uint8)
        if not size or self._calls["llama_state_seq_get_data"](context, state.ctypes.data, size, 0, 0) != size:
            raise RuntimeFailed(f"{self.name} does not give a sequence's state: {self.last_words or 'no reason given'}")
        return state

    def write_state(self, context: int, state: NDArray[np.uint8]) -> None:
        """Let an empty context hold what `read_state` gave. Raises RuntimeFailed."""
        if self._calls["llama_state_seq_set_data"](context, state.ctypes.data, len(state), 0, 0) != len(state):
            raise RuntimeFailed(f"{self.name} does not take a sequence's state: {self.last_words or 'no reason given'}")


def check_processor() -> None:
    """Raise AdapterUnavailable where the package's library would end the process by an instruction that the processor
    has not. Nothing is said of one that does not tell what it has."""
    told = processor().isa
    lacking = [one for one in _BUILT_FOR.get(platform.machine(), ()) if one not in told] if told else []
    if lacking:
        raise AdapterUnavailable(
            f"{DISTRIBUTION} is built for processors with {', '.join(lacking)}, which this one has not; "
            "choose adapter: openvino_rt"
        )


@contextmanager
def _spinning_briefly() -> Iterator[None]:
    """Load OpenMP so that a thread which waits for another one gives its core away soon. As shipped it keeps it for
    milliseconds, many times in a forward: beside another program that takes a core that made forwards ten times as
    long."""
    if _SPINS in os.environ:
        yield
        return
    os.environ[_SPINS] = "10000"
    try:
        yield
    finally:
        del os.environ[_SPINS]


def _check_defaults(api: Any) -> None:
    """Raise AdapterUnavailable where the library's defaults are not where the bindings say."""
    model, context = api.llama_model_default_params(), api.llama_context_default_params()
    found = (model.n_ubatch, model.use_mmap, model.repack_tensors, context.n_batch, context.yarn_ext_factor)
    if found != (512, True, False, 2048, -1.0):
        raise AdapterUnavailable(f"the bindings of {DISTRIBUTION} do not fit its library: install it again: {INSTALL}")
