"""All that is known to be wrong with a model before a byte of its weights is read: from its files' heads, at once.

`outrider config check` asks so, `outrider serve` before anything is prepared, the load before it converts, and a
download before it fetches gigabytes. Each asks the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from adapters import registry
from adapters.contract import NO_REWIND, AdapterError, ModelRefused
from adapters.decoder.from_safetensors import SafetensorsWeights
from adapters.decoder.gguf_keys import NotConvertible
from adapters.decoder.gguf_spec import read_gguf_spec
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.decoder.limits import refuse_decoder
from adapters.decoder.spec import DecoderSizes, DecoderSpec
from adapters.gguf_facts import GgufFacts, read_facts
from adapters.gguf_header import GgufHeader
from adapters.gguf_splits import list_beside, read_model_header
from adapters.hf_directory import open_weights, read_declared_fingerprint, read_json, title
from adapters.llama_cpp.fork_faults import find_fault
from adapters.llama_cpp.library import check_fault
from adapters.names import LLAMA_CPP
from adapters.safetensors_file import Stored
from adapters.tokenizer_gguf import check_tokenizer
from adapters.tokenizer_hf import check_tokenizer as check_hf_tokenizer

_CHOSEN_LATER = ("", "auto")
"""How an adapter is called that a plan chooses."""


def check_files(path: Path, file_bytes: int | None = None, adapter: str = "") -> DecoderSizes:
    """Check a GGUF file (of a split model the first) or a model directory, and return its sizes: a DecoderSpec where
    our graphs compute it, and GgufFacts where llama.cpp's library does. `file_bytes` of a file of which `path` is the
    first part. `adapter`: what is to run it, "" or "auto" where a plan chooses among those that are here.

    Raises ModelRefused, by the key, the tensor or the file, for all that would be refused when it is loaded, but for
    values of weights, and for what llama.cpp's library finds in its own models.
    """
    if not path.is_dir():
        return _check_file(path, file_bytes, tuple(map(_mark, list_beside(path))), adapter)
    spec = open_weights(path, heads_only=True).spec
    _check_directory_tokenizer(path, spec)
    return spec


def _mark(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file; zeros where it cannot be looked at, which its reader tells."""
    try:
        facts = path.stat()
    except OSError:
        return (0, 0, 0)
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


@lru_cache(maxsize=16)  # a start asks several times, and a vocabulary of 262,144 tokens takes half a second
def _check_file(
    path: Path, file_bytes: int | None, marks: tuple[tuple[int, int, int], ...], adapter: str
) -> DecoderSizes:
    del marks  # of the key alone
    return check_header(read_model_header(path, file_bytes), adapter)


def check_header(header: GgufHeader, adapter: str = "") -> DecoderSizes:
    """Check the heads of a model's GGUF files, joined, as `check_files` does."""
    sizes = read_facts(header) if adapter == LLAMA_CPP else _read_sizes(header, adapter)
    check_tokenizer(header)
    return sizes


def check_library(path: Path) -> None:
    """Check that llama.cpp's library that is here runs a GGUF file, as far as its faults are known. Raises ModelRefused
    where it does not, and AdapterUnavailable."""
    header = read_model_header(path)
    check_fault(header.path.name, find_fault(header))


def _read_sizes(header: GgufHeader, adapter: str) -> DecoderSizes:
    """Return the shape of a file for our graphs; what only llama.cpp computes is taken where a plan may choose that,
    and refused with the way out elsewhere."""
    try:
        return read_gguf_spec(header)
    except NotConvertible as refusal:
        facts = read_facts(header)  # refuses what llama.cpp does not serve either
        if adapter in _CHOSEN_LATER and _has_llama_cpp():
            return facts
        raise ModelRefused(f"{refusal} llama.cpp's library runs it as it is: set adapter: {LLAMA_CPP}.") from refusal


def _has_llama_cpp() -> bool:
    try:
        return bool(registry.list_devices(LLAMA_CPP))
    except AdapterError:
        return False


def check_directory_heads(directory: Path, tensors: Mapping[str, Stored]) -> DecoderSpec:
    """Check a directory whose small files are there and whose weights are not, but for what their heads list."""
    config = read_json(directory / CONFIG_FILE)
    spec = SafetensorsWeights(config, tensors, title(directory), heads_only=True).spec
    _check_directory_tokenizer(directory, spec)
    return spec


def check_use(spec: DecoderSizes, name: str, adapter: str = "", *, static: bool = False, draft: bool = False) -> None:
    """Check what a model is to be: the `draft` of another, or a target, on an adapter ("" where none is chosen).
    Raises ModelRefused; `name` says of which model."""
    if spec.draft_outputs and not draft:
        raise ModelRefused(_describe_draft(name, spec.draft_outputs, spec.vocabulary_size))
    if draft and (why := explain_no_drafts(spec)):
        raise ModelRefused(f"{name}: {why}, its own either: it cannot draft. Choose another draft.")
    if not isinstance(spec, DecoderSpec):
        return
    try:
        refuse_decoder(adapter, spec, static=static)
    except ModelRefused as error:
        raise ModelRefused(f"{name}: {error}") from error


def explain_no_drafts(spec: DecoderSizes | None) -> str:
    """Return why nothing can be drafted for a model, "" where it can or where that is not known here."""
    return NO_REWIND if isinstance(spec, GgufFacts) and not spec.cuts_anywhere else ""


def _describe_draft(name: str, outputs: int, vocabulary_size: int) -> str:
    """Say why a draft of few outputs is no target."""
    return (
        f"{name}: it is a draft (draft_vocab_size), which can say {outputs} of {vocabulary_size} tokens only. "
        "Name it under `drafts`, and its target under `model`."
    )


def _check_directory_tokenizer(directory: Path, spec: DecoderSpec) -> None:
    if not read_declared_fingerprint(directory):  # such a draft has no tokenizer: it speaks its target's ids
        check_hf_tokenizer(directory, spec.vocabulary_size)
