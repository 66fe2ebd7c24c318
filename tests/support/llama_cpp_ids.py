"""Records the ids that llama.cpp gives the texts in tests/adapters/cut_ids.json, for every cut that is known here.

`python -m tests.support.llama_cpp_ids` writes the file anew. It needs `pip install xllamacpp`, whose library exports
llama.cpp's C interface; nothing else here does. The texts, tokens and merges stay what they are in the file.
"""

from __future__ import annotations

import ctypes
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFWriter

from adapters.tokenizer_cuts import list_cuts

IDS_FILE = Path(__file__).parent.parent / "adapters" / "cut_ids.json"
_VARIANTS = "0123456789abcdefghijklmnopqrstuvwxyz"


def read_recorded() -> dict[str, Any]:
    """Return the file: `texts`, `tokens`, `merges`, for every text the different rows of `ids` that cuts give, and
    for every cut in `which` a letter per text that says which row."""
    found: dict[str, Any] = json.loads(IDS_FILE.read_text(encoding="utf-8"))
    return found


def list_ids(recorded: dict[str, Any], cut: str) -> list[list[int]]:
    """Return llama.cpp's ids of all texts with this cut."""
    which = recorded["which"][cut]
    return [rows[_VARIANTS.index(letter)] for rows, letter in zip(recorded["ids"], which, strict=True)]


def write_cut_vocabulary(path: Path, recorded: dict[str, Any], cut: str) -> Path:
    """Write a GGUF file with the recorded vocabulary and no tensors."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(recorded["tokens"])
    writer.add_token_types([3, 3] + [1] * (len(recorded["tokens"]) - 2))
    writer.add_token_merges(recorded["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


class _Parameters(ctypes.Structure):
    """llama_model_params of llama.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("layers", "split", "load", "lazy", "main")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "callback", "user", "kv")),
        ("vocab_only", ctypes.c_bool),
        ("others", ctypes.c_bool * 7),
    ]


class _LlamaCpp:
    def __init__(self) -> None:
        found = find_spec("xllamacpp")
        assert found is not None
        assert found.origin is not None
        library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("*.so"))))
        library.llama_model_default_params.restype = _Parameters
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        library.llama_model_free.argtypes = [ctypes.c_void_p]
        numbers = ctypes.POINTER(ctypes.c_int32)
        library.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, numbers, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool)
        ]
        library.llama_backend_init()
        self._library = library

    def encode(self, file: Path, texts: list[str]) -> list[list[int]]:
        parameters = self._library.llama_model_default_params()
        parameters.vocab_only = True
        model = self._library.llama_model_load_from_file(str(file).encode(), parameters)
        assert model, f"llama.cpp refuses {file}"
        vocabulary = self._library.llama_model_get_vocab(model)
        rows = []
        for text in texts:
            raw = text.encode()
            room = (ctypes.c_int32 * (len(raw) + 1))()
            count = self._library.llama_tokenize(vocabulary, raw, len(raw), room, len(room), False, False)
            rows.append(list(room[:count]))
        self._library.llama_model_free(model)
        return rows


def record() -> None:
    """Write the file anew."""
    recorded, llama = read_recorded(), _LlamaCpp()
    ids: list[list[list[int]]] = [[] for _ in recorded["texts"]]
    which = {}
    with TemporaryDirectory() as directory:
        for cut in list_cuts():
            rows = llama.encode(write_cut_vocabulary(Path(directory) / "v.gguf", recorded, cut), recorded["texts"])
            for row, variants in zip(rows, ids, strict=True):
                if row not in variants:
                    variants.append(row)
            which[cut] = "".join(_VARIANTS[ids[at].index(row)] for at, row in enumerate(rows))
    recorded |= {"llama_cpp": f"xllamacpp {version('xllamacpp')}", "ids": ids, "which": which}
    IDS_FILE.write_text(json.dumps(recorded, separators=(",", ":")).replace('],"', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
