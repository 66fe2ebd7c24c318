"""What the libraries of llama.cpp do alike: their C functions by ctypes, over structures that each declares itself."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    AdapterUnavailable,
    Exactness,
    Logits,
    NumericalClass,
    Precision,
    RuntimeFailed,
    Unsupported,
)
from adapters.hardware import processor
from adapters.llama_cpp.state import CacheFormat
from device_profiles.device_names import find_device_name

CPU: Final = "CPU"

CallTable = dict[str, tuple[list[Any], Any]]
"""By the name of a C function: the types of its arguments, and of what it returns."""

POINTER, INT, SIZE, BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_bool
ON_PROGRESS: Final = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)

_ON_LINE: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_WARNING: Final = 3  # a level of ggml's
# Of what the library said, for the message of a failure. Not tuned.
_KEPT_LINES: Final = 20
_SPINS: Final = "GOMP_SPINCOUNT"
_BUILT_FOR: Final = {"x86_64": ("avx2", "fma", "f16c")}
"""Instruction sets that the wheels of packages need, by the machine."""

IN_ANY_ROWS: Final = NumericalClass(Precision.FP32, Precision.FP16, quantization_group=32)
"""Activations are quantised in groups of 32 or of 256, as a tensor's own format has them."""
_MOST_ALIKE_ROWS: Final = 7
"""In mainline, matrices of a file as they are have the same bits up to so many rows (ADR 0109)."""
IN_PAIRS: Final = replace(IN_ANY_ROWS, segment_rows=2, forward_rows=2, output_rows=2)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Structures:
    """The types of the structures that are given by value."""

    model: type[ctypes.Structure]
    context: type[ctypes.Structure]
    batch: type[ctypes.Structure]


GpuKind = Literal["discrete", "integrated", "software"]


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """A GPU, under ggml's name. One in software is the processor's work."""

    name: str
    full_name: str
    total_bytes: int
    free_bytes: int
    kind: GpuKind


class NativeLibrary(ABC):
    """See the module. Handles are addresses; who closes a model has closed its contexts. One thread at a time uses a
    context. A device is one of `list_devices`, or CPU."""

    most_contexts = 0
    """How many contexts a process may have open, 0: any number."""
    splits_single_rows = False
    """Whether attention sums the positions of a single row otherwise than those of several rows, in long contexts."""
    least_fed_rows = 1
    """Of a forward that is given rows of an embedding and no tokens."""
    joins = False
    """Whether `share_pass` computes several contexts in one pass over the weights."""
    has_faults = False
    """Whether it computes some files otherwise than llama.cpp (fork_faults.py)."""

    def __init__(self, name: str, version: str, handle: Any, structures: Structures, calls: CallTable) -> None:
        """`name`: for people. `version`: changes with the library. `calls`: functions that this one has beside those
        that all have. Raises AdapterUnavailable where one of them is missing."""
        self.name, self.version = name, version
        self._structures = structures
        table = _list_calls(structures) | calls
        if missing := [call for call in table if not hasattr(handle, call)]:
            raise AdapterUnavailable(f"{name} has no function {missing[0]}: {self.way_out}")
        self._calls: dict[str, Any] = {}
        for call, (arguments, result) in table.items():
            self._calls[call] = getattr(handle, call)
            self._calls[call].argtypes, self._calls[call].restype = arguments, result
        self._open: dict[int, Callable[[], None] | None] = {}
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._hear = _ON_LINE(self._keep_line)
        self._calls["llama_log_set"](self._hear, None)
        self._check_defaults(self._calls["llama_model_default_params"](), self._calls["llama_context_default_params"]())
        self._calls["llama_backend_init"]()

    @property
    @abstractmethod
    def way_out(self) -> str:
        """What to do where the library is not one that this adapter can use."""

    @property
    def last_words(self) -> str:
        """The last lines that the library said of something wrong."""
        return "\n".join(self._said)

    def _keep_line(self, level: int, text: bytes | None, _data: object) -> None:
        line = (text or b"").decode(errors="replace").strip()
        if not line:
            return
        if level >= _WARNING:
            self._said.append(line)
        _log.debug("%s", line)

    @abstractmethod
    def _check_defaults(self, model: Any, context: Any) -> None:
        """Raise AdapterUnavailable where the library's defaults are not where the structures say."""

    @abstractmethod
    def list_devices(self) -> list[GgmlDevice]:
        """Return the devices that a model can be loaded onto, beside the processor."""

    def check_device(self, device: str) -> None:
        """Raise Unsupported where the library has no such device."""
        names = [CPU, *(device.name for device in self.list_devices())]
        if find_device_name(device, names) is None:
            raise Unsupported(f"{self.name} has no device {device!r} here; it has {', '.join(names)}")

    @abstractmethod
    def list_classes(self, device: str, exactness: Exactness) -> list[list[NumericalClass]]:
        """Return the numerical classes of a device, as `Adapter.classes`, of models with a KV cache alone."""

    def list_unpadded_classes(self, exactness: Exactness, *, attends: bool) -> list[list[NumericalClass]]:
        """Return those of models with a recurrent state, which nothing may be padded for. `attends`: they have a KV
        cache, too. In the last one a forward has a single row: prompts are slow, and bits depend on nothing."""
        if exactness is not Exactness.BIT:
            return [[IN_ANY_ROWS]]
        alone = [replace(IN_ANY_ROWS, fixed_width=1)]
        if attends and self.splits_single_rows:
            return [alone]
        return [[IN_ANY_ROWS], [replace(IN_ANY_ROWS, most_rows=_MOST_ALIKE_ROWS)], alone]

    @abstractmethod
    def _set_model_options(self, options: Any, device: str, layers: int, *, repack: bool) -> object:
        """Set what this library's models are loaded with; what is returned is kept until the model is there."""

    @abstractmethod
    def _set_context_options(self, options: Any, rows: int, device: str) -> None:
        """Set what this library's contexts are opened with."""

    @abstractmethod
    def close_model(self, model: int) -> None:
        """Give a model's memory back."""

    def load_lora(self, model: int, file: Path) -> int:
        """Read a LoRA adapter of a model; closing that gives its memory back. Returns 0 where it failed. Raises
        Unsupported where this library applies none."""
        raise Unsupported(f"{self.name} applies no LoRA adapters")

    def apply_lora(self, context: int, lora: int) -> None:
        """Let a context compute with an adapter, from its first forward on. Raises RuntimeFailed."""
        raise Unsupported(f"{self.name} applies no LoRA adapters")

    @abstractmethod
    def describe_model(self, model: int) -> tuple[int, int]:
        """Return how many layers, and tokens of the vocabulary, a model has."""

    @abstractmethod
    def find_other_kind(self, model: int) -> str:
        """Return what a model is beside a decoder, in words; "" where it is nothing else."""

    @abstractmethod
    def is_recurrent(self, model: int) -> bool:
        """Return whether a model has a recurrent state, beside a KV cache or alone."""

    @abstractmethod
    def cut(self, context: int, positions: int) -> None:
        """Forget all positions behind the first so many."""

    @abstractmethod
    def read_state(self, context: int) -> NDArray[np.uint8]:
        """Return the sequence's cache as the library writes it. Raises RuntimeFailed."""

    @abstractmethod
    def read_sequence(self, context: int) -> NDArray[np.uint8]:
        """Return all that a sequence holds, a recurrent state too, for `write_state`. Raises RuntimeFailed."""

    @abstractmethod
    def write_state(self, context: int, state: NDArray[np.uint8]) -> None:
        """Let an empty context hold what `CacheFormat.join` or `read_sequence` gave. Raises RuntimeFailed."""

    @abstractmethod
    def read_format(self, context: int) -> CacheFormat:
        """Return the format of a model's states, learnt from a short one. Raises RuntimeFailed where it is not of those
        that are known."""

    def load_model(
        self, path: Path, device: str, layers: int, tell: Callable[[float], bool], *, repack: bool = True
    ) -> int:
        """Read a file into memory. `layers`: how many of the last are on the device, of which the output head is one;
        ALL_LAYERS for all. `tell` hears how much is read, and says whether to go on. `repack`: matrices lie as the
        kernels for many rows want them, where the library does that. Returns 0 where it failed, or did not go on."""
        self._said.clear()
        options = self._calls["llama_model_default_params"]()
        kept = self._set_model_options(options, device, layers, repack=repack)

        def on_progress(fraction: float, _data: object) -> bool:
            return tell(fraction)

        options.progress_callback = type(options.progress_callback)(on_progress)
        model = int(self._calls["llama_model_load_from_file"](os.fsencode(path), options) or 0)
        del kept
        return model

    def make_room(self) -> bool:
        """See that a context can be opened: those that were used the longest ago, of whatever model, are given up.
        Return whether one can. One thread uses all models of a process."""
        while 0 < self.most_contexts <= len(self._open):
            give_up = next(filter(None, self._open.values()), None)
            if give_up is None:
                return False
            give_up()
        return True

    def open_context(
        self,
        model: int,
        cells: int,
        rows: int,
        threads: int,
        device: str,
        give_up: Callable[[], None] | None = None,
    ) -> int:
        """Open a sequence's context of so many positions, for forwards of at most `rows`. `give_up` closes it, and
        keeps its cache elsewhere; None where it stays. Returns 0 where that failed."""
        self._said.clear()
        options = self._calls["llama_context_default_params"]()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = cells, rows, rows, 1
        options.n_threads = options.n_threads_batch = threads
        self._set_context_options(options, rows, device)
        context = int(self._calls["llama_init_from_model"](model, options) or 0)
        if context:
            self._open[context] = give_up
        return context

    def touch_context(self, context: int) -> None:
        self._open[context] = self._open.pop(context)

    def close_context(self, context: int) -> None:
        self._calls["llama_free"](context)
        del self._open[context]

    def new_batch(self, rows: int, width: int = 0) -> Any:
        """Return room for the tokens of a forward, for `decode`; for rows of an embedding where they have a `width`."""
        batch = self._calls["llama_batch_init"](rows, width, 1)
        for row in range(rows):
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
        return batch

    def free_batch(self, batch: Any) -> None:
        self._calls["llama_batch_free"](batch)

    def decode(
        self, context: int, batch: Any, tokens: Sequence[int] | NDArray[np.float32], start: int, wanted: range
    ) -> int:
        """Run tokens, or rows of an embedding as wide as the batch's, from position `start` on; the logits of the
        `wanted` rows are kept. Returns 0 where all went well."""
        self._said.clear()
        batch.n_tokens = len(tokens)
        if isinstance(tokens, np.ndarray):
            ctypes.memmove(batch.embd, tokens.ctypes.data, tokens.nbytes)
        else:
            for row, token in enumerate(tokens):
                batch.token[row] = token
        for row in range(len(tokens)):
            batch.pos[row] = start + row
            batch.logits[row] = row in wanted
        return int(self._calls["llama_decode"](context, batch))

    def read_logits(self, context: int, rows: int, outputs: int) -> Logits:
        """Return the logits of the last forward's wanted rows, in their order, as the library holds them."""
        return np.ctypeslib.as_array(self._calls["llama_get_logits"](context), (rows, outputs))

    def share_pass(self, threads: int) -> AbstractContextManager[None]:
        """Compute what is decoded within in one pass, at its end; `read_joined` has the logits then. All of it is of
        one model, and of different contexts. Raises OutOfMemory."""
        raise Unsupported(f"{self.name} computes one context after another")

    def read_joined(self, place: int, outputs: int) -> Logits:
        """Return the logits of the context that was decoded as the `place`th within `share_pass`, as the library holds
        them: those of the wanted rows, or of all rows."""
        raise Unsupported(f"{self.name} computes one context after another")

    def _read_bytes(self, kind: str, context: int, *rest: int) -> NDArray[np.uint8]:
        """Return a state of a context, by the functions for its kind; `rest`: what both of them end with. Raises
        RuntimeFailed."""
        size = self._calls[f"{kind}_get_size"](context, *rest)
        state = np.empty(size, np.uint8)
        if not size or self._calls[f"{kind}_get_data"](context, state.ctypes.data, size, *rest) != size:
            raise self._refuse_state("give")
        return state

    def _refuse_state(self, verb: str) -> RuntimeFailed:
        return RuntimeFailed(f"{self.name} does not {verb} a sequence's state: {self.last_words or 'no reason given'}")


def check_processor(distribution: str) -> None:
    """Raise AdapterUnavailable where a package's library would end the process by an instruction that the processor has
    not. Nothing is said of one that does not tell what it has."""
    flags = processor().isa
    lacking = [flag for flag in _BUILT_FOR.get(platform.machine(), ()) if flag not in flags] if flags else []
    if lacking:
        raise AdapterUnavailable(
            f"{distribution} is built for processors with {', '.join(lacking)}, which this one has not; "
            "choose adapter: openvino_rt"
        )


@contextmanager
def spinning_briefly() -> Iterator[None]:
    """Load OpenMP so that a thread which waits for another one gives its core away soon. As shipped it keeps it for
    milliseconds, many times in a forward: beside another program that takes a core that made forwards ten times as
    long."""
    if _SPINS in os.environ:
        yield
        return
    os.environ[_SPINS] = "500"
    try:
        yield
    finally:
        del os.environ[_SPINS]


def _list_calls(structures: Structures) -> CallTable:
    return {
        "llama_backend_init": ([], None),
        "llama_batch_free": ([structures.batch], None),
        "llama_batch_init": ([INT, INT, INT], structures.batch),
        "llama_context_default_params": ([], structures.context),
        "llama_decode": ([POINTER, structures.batch], INT),
        "llama_free": ([POINTER], None),
        "llama_get_logits": ([POINTER], ctypes.POINTER(ctypes.c_float)),
        "llama_init_from_model": ([POINTER, structures.context], POINTER),
        "llama_log_set": ([_ON_LINE, POINTER], None),
        "llama_model_default_params": ([], structures.model),
        "llama_model_has_encoder": ([POINTER], BOOL),
        "llama_model_load_from_file": ([ctypes.c_char_p, structures.model], POINTER),
    }
