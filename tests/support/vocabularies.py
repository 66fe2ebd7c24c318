"""Small tokenizers of different kinds, as GGUF files hold them: what drafts are translated between in tests."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFWriter

from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer

_OTHERS = [value for value in range(256) if not (0x21 <= value < 0x7F or 0xA1 <= value < 0xAD or value >= 0xAE)]
LETTERS = [chr(0x100 + _OTHERS.index(value)) if value in _OTHERS else chr(value) for value in range(256)]
_MERGES = [
    "h e",
    "Ġ t",
    "Ġt he",
    "l l",
    "he ll",
    "hell o",
    "Ġ hello",
    "i n",
    "in g",
    "o r",
    "Ġ w",
    "Ġw or",
    "Ġwor l",
    "Ġworl d",
]
_WORDS = [*LETTERS, *(merge.replace(" ", "") for merge in _MERGES)]
_PIECES = ["▁t", "▁the", "he", "▁w", "▁▁", "in", "ing", "▁hel", "lo", "▁a", "or", "▁wo", "rld", "日本", "▁an", "▁and"]
_CHARACTERS = [*"▁abcdefghijklmnopqrstuvwxyz.,!日本語", "\n"]


def byte_level(directory: Path, *, controls: list[str], add_bos: bool = False) -> Tokenizer:
    """A byte-level vocabulary as GPT-2's and Llama 3's; the second control token begins a text, the third ends it."""
    tokens = [*controls, *_WORDS]
    kinds = [3] * len(controls) + [1] * len(_WORDS)
    writer = _writer(directory, "gpt2", tokens, kinds, add_bos=add_bos)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_merges(_MERGES)
    return write_vocabulary(writer, directory)


def pieces(directory: Path, *, controls: list[str], prefix: bool, add_bos: bool = True) -> Tokenizer:
    """A SentencePiece vocabulary with byte fallback, as Gemma's (without `prefix`) and Llama 2's (with it)."""
    added = ["\n\n", "▁▁▁▁".replace("▁", " ")]
    texts = [f"<0x{value:02X}>" for value in range(256)]
    joined = [*_PIECES, *_CHARACTERS]
    tokens = [*controls, *added, *texts, *joined]
    kinds = [3] * len(controls) + [4] * len(added) + [6] * len(texts) + [1] * len(joined)
    writer = _writer(directory, "llama", tokens, kinds, add_bos=add_bos)
    writer.add_token_scores([0.0] * (len(tokens) - len(joined)) + [-float(rank) for rank in range(len(joined))])
    writer.add_add_space_prefix(prefix)
    return write_vocabulary(writer, directory)


def _writer(directory: Path, kind: str, tokens: list[str], kinds: list[int], *, add_bos: bool) -> GGUFWriter:
    writer = GGUFWriter(directory / "v.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    return writer


def write_vocabulary(writer: GGUFWriter, directory: Path) -> Tokenizer:
    """Write the vocabulary to a file, and load its tokenizer as a model is prepared."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    target = directory / "prepared"
    target.mkdir()
    TokenizerRecipe().prepare(directory / "v.gguf", target, lambda *_: None)
    return Tokenizer.load(target)
