"""Records the ids that llama.cpp gives the texts in tests/adapters/cut_ids.json, for every cut that is known here.

`python -m tests.support.llama_cpp_ids` writes the file anew. It needs `pip install xllamacpp`. The texts, tokens and
merges stay what they are in the file.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFWriter

from adapters.tokenizer_cuts import list_cuts
from tests.support.llama_vocabulary import MAINLINE, open_vocabulary

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


def begin_vocabulary(path: Path) -> GGUFWriter:
    """Return what writes a GGUF file, with what llama.cpp's libraries ask for before they look at a vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def write_cut_vocabulary(path: Path, recorded: dict[str, Any], cut: str) -> Path:
    """Write a GGUF file with the recorded vocabulary and no tensors."""
    writer = begin_vocabulary(path)
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


def record() -> None:
    """Write the file anew."""
    recorded = read_recorded()
    ids: list[list[list[int]]] = [[] for _ in recorded["texts"]]
    which = {}
    with TemporaryDirectory() as directory:
        for cut in list_cuts():
            file = write_cut_vocabulary(Path(directory) / "v.gguf", recorded, cut)
            with open_vocabulary(MAINLINE, file) as vocabulary:
                rows = [vocabulary.encode(text) for text in recorded["texts"]]
            for row, variants in zip(rows, ids, strict=True):
                if row not in variants:
                    variants.append(row)
            which[cut] = "".join(_VARIANTS[ids[at].index(row)] for at, row in enumerate(rows))
    recorded |= {"llama_cpp": f"xllamacpp {version('xllamacpp')}", "ids": ids, "which": which}
    IDS_FILE.write_text(json.dumps(recorded, separators=(",", ":")).replace('],"', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
