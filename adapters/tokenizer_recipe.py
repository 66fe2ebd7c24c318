"""The recipe of the model store that makes a tokenizer from a model, whatever it came in."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from adapters.contract import Progress
from adapters.gguf_header import read_header
from adapters.tokenizer_files import FORMAT
from adapters.tokenizer_gguf import write_gguf_tokenizer
from adapters.tokenizer_hf import write_hf_tokenizer


class TokenizerRecipe:
    """Makes tokenizer.json, tokenizer.meta.json and, if the model has one, chat_template.jinja."""

    name = "tokenizer"

    def recipe(self) -> str:
        """Return the format and the version of the library that writes tokenizer.json."""
        return f"tokenizer format {FORMAT}; tokenizers {version('tokenizers')}"

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the tokenizer of a GGUF file or a Hugging Face directory into the directory `target`.

        Raises ModelRefused for a vocabulary of another kind, an unknown way to cut text (the message lists
        ones that are), or damage; OSError when `target` cannot be written.
        """
        if source.is_dir():
            write_hf_tokenizer(source, target, progress)
        else:
            write_gguf_tokenizer(read_header(source), target, progress)
