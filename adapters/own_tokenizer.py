"""The tokenizer of a model that other processes load, perhaps on hosts that share no files with this one."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Final

from adapters.contract import Progress
from adapters.gguf_header import read_header
from adapters.hf_hub import HUB_PREFIX, HubId, find_head, parse_id, pin_revision
from adapters.model_identity import ModelIdentity
from adapters.model_store import ModelStore
from adapters.served_model import find_kept, find_whole
from adapters.tokenizer_files import FORMAT
from adapters.tokenizer_gguf import write_gguf_tokenizer
from adapters.tokenizer_hf import write_hf_tokenizer
from device_profiles.units import MIB

_TOKENIZER_BYTES: Final = 256 * MIB  # free space that is asked for. Not tuned.


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


class HubTokenizerRecipe(TokenizerRecipe):
    """Makes the same from a model of the hub, by its small files and the head of a GGUF file: no weights are
    downloaded."""

    def __init__(self, pinned: HubId) -> None:
        self._pinned = pinned

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        """Write the tokenizer into the directory `target`; `source` is not looked at. Raises as `TokenizerRecipe` and
        `adapters.hf_hub.find_head` do."""
        path, header = find_head(self._pinned)
        if self._pinned.file:
            write_gguf_tokenizer(header or read_header(path), target, progress)
        else:
            write_hf_tokenizer(path, target, progress)


def prepare_own_tokenizer(
    store: ModelStore, source: str, base: Path, identity: ModelIdentity | None, progress: Progress
) -> Path:
    """Prepare (once) the tokenizer of a model, of this `identity` where it is known; returns its directory.

    What the store has of that model serves. Else a model of the hub is known by its commit, and costs its small files.
    Any other has to be at its place, and is read whole. Raises what `find_whole` and the store raise.
    """
    kept = find_kept(store, identity, TokenizerRecipe()) if identity is not None else None
    if kept is not None:
        return kept[0]
    if source.startswith(HUB_PREFIX):
        pinned = pin_revision(parse_id(source))
        return store.prepare_named(str(pinned), HubTokenizerRecipe(pinned), _TOKENIZER_BYTES, progress)
    return store.prepare(find_whole(store, source, base, identity, progress), TokenizerRecipe(), progress)
