"""A GGUF file's vocabulary as llama.cpp's libraries read it: the ids that they give texts, and the bytes of ids."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused
from adapters.libllama import FORK, LibraryPlace, find_mainline
from adapters.llama_cpp.library import load_library
from adapters.llama_cpp.native import BOOL, INT, POINTER, NativeLibrary

MAINLINE = "xllamacpp"
_CALLS: dict[str, tuple[list[Any], Any]] = {
    "llama_model_get_vocab": ([POINTER], POINTER),
    "llama_tokenize": ([POINTER, ctypes.c_char_p, INT, ctypes.POINTER(INT), INT, BOOL, BOOL], INT),
    "llama_token_to_piece": ([POINTER, INT, ctypes.c_char_p, INT, INT, BOOL], INT),
}


class LlamaVocabulary:
    """See the module."""

    def __init__(self, calls: dict[str, Any], vocabulary: int) -> None:
        self._calls, self._vocabulary = calls, vocabulary

    def encode(self, text: str, *, special: bool = False, begins: bool = False) -> list[int]:
        """Return a text's ids. `special`: names of control tokens in it are these. `begins`: with what the file says
        that a text begins with."""
        raw = text.encode()
        room = (INT * (len(raw) + 8))()
        count = self._calls["llama_tokenize"](self._vocabulary, raw, len(raw), room, len(room), begins, special)
        assert count >= 0
        return list(room[:count])

    def read_piece(self, token: int) -> bytes:
        """Return the bytes of an id, for a control token its name."""
        room = ctypes.create_string_buffer(1024)
        count = self._calls["llama_token_to_piece"](self._vocabulary, token, room, len(room), 0, True)
        assert count >= 0
        return room.raw[:count]


@cache
def _load(package: str) -> tuple[NativeLibrary, dict[str, Any]]:
    place = LibraryPlace(FORK, None, "") if package == FORK else find_mainline(package)
    assert place is not None
    library = load_library(place)
    handle: Any = ctypes.CDLL(str(place.file)) if place.file else import_module("ik_llama_cpp._ctypes_api")._lib
    calls: dict[str, Any] = {}
    for name, (arguments, result) in _CALLS.items():
        calls[name] = handle[name]
        calls[name].argtypes, calls[name].restype = arguments, result
    return library, calls


@contextmanager
def open_vocabulary(package: str, file: Path) -> Iterator[LlamaVocabulary]:
    """Read a file's vocabulary alone, with the library in FORK or MAINLINE. Raises ModelRefused where it does not."""
    library, calls = _load(package)
    library._said.clear()
    options = library._calls["llama_model_default_params"]()
    options.vocab_only = True
    model = library._calls["llama_model_load_from_file"](str(file).encode(), options)
    if not model:
        raise ModelRefused(library.last_words)
    try:  # the fork's functions take the model
        yield LlamaVocabulary(calls, model if package == FORK else calls["llama_model_get_vocab"](model))
    finally:
        library.close_model(model)
