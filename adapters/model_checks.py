"""All that is known to be wrong with a model before a byte of its weights is read: from its files' heads, at once.

`outrider config check` asks so, `outrider serve` before anything is prepared, the load before it converts, and a
download before it fetches gigabytes. Each asks the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from adapters import registry
from adapters.content_digest import full_identity
from adapters.contract import NO_REWIND, AdapterError, AdapterUnavailable, ModelRefused
from adapters.decoder.from_safetensors import SafetensorsWeights
from adapters.decoder.gguf_spec import read_gguf_spec
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.decoder.limits import explain_no_graph, refuse_decoder
from adapters.decoder.spec import DecoderSizes, DecoderSpec, NotConvertible
from adapters.gguf_facts import GgufFacts, read_facts
from adapters.gguf_header import GgufHeader
from adapters.gguf_splits import list_beside, read_model_header
from adapters.hf_directory import (
    has_own_graph,
    read_all_tensors,
    read_declared_fingerprint,
    read_graph_facts,
    read_json,
    title,
)
from adapters.hf_facts import (
    DirectoryFacts,
    read_directory_facts,
    refuse_form,
    refuse_without_transformers,
)
from adapters.ir_facts import IrFacts
from adapters.llama_cpp.fork_faults import find_fault
from adapters.llama_cpp.library import check_fault
from adapters.names import LLAMA_CPP, TRANSFORMERS
from adapters.safetensors_file import Stored
from adapters.tokenizer_gguf import check_tokenizer
from adapters.tokenizer_hf import check_tokenizer as check_hf_tokenizer

_T = TypeVar("_T")
_CHOSEN_HERE, _CHOSEN_ELSEWHERE = "auto", ""
"""How an adapter is called that a plan chooses: of those that are here, and of those that other hosts have."""


def check_files(path: Path, file_bytes: int | None = None, adapter: str = "") -> DecoderSizes:
    """Check a GGUF file (of a split model the first) or a model directory, and return its sizes: a DecoderSpec where
    our graphs compute it, GgufFacts where llama.cpp's library does, DirectoryFacts where transformers does, IrFacts of
    a directory that brings a graph of its own. `file_bytes` of a file of which `path` is the first part. `adapter`:
    what is to run it, "auto" where a plan chooses among those that are here, "" where it is not known which those are.

    Raises ModelRefused, by the key, the tensor or the file, for all that would be refused when it is loaded, but for
    values of weights, and for what llama.cpp's library finds in its own models. Raises WrongLibrary.
    """
    if not path.is_dir():
        return _check_head(_read_head(path, file_bytes, tuple(map(_mark, list_beside(path)))), path, adapter)
    if not has_own_graph(path):
        return check_directory_heads(path, read_all_tensors(path), adapter)
    facts = read_graph_facts(path)
    check_hf_tokenizer(path, facts.vocabulary_size)
    return facts


def _mark(path: Path) -> tuple[int, ...]:
    """Return what changes with a file; () where it cannot be looked at, which its reader tells."""
    try:
        return tuple(full_identity(path))
    except OSError:
        return ()


@dataclass(frozen=True, slots=True)
class _Head:
    """What the head of a model's GGUF files says: its shape for our graphs, its sizes for llama.cpp's library, and what
    is wrong with its tokenizer; each may be a refusal. `fault`: see fork_faults."""

    spec: DecoderSpec | ModelRefused
    facts: GgufFacts | ModelRefused
    tokenizer: ModelRefused | None
    fault: str


@lru_cache(maxsize=16)  # a start asks several times, and a vocabulary of 262,144 tokens takes half a second
def _read_head(path: Path, file_bytes: int | None, marks: tuple[tuple[int, ...], ...]) -> _Head:
    del marks  # of the key alone
    return _judge_header(read_model_header(path, file_bytes))


def check_header(header: GgufHeader, adapter: str = "") -> DecoderSizes:
    """Check the heads of a model's GGUF files, joined, as `check_files` does."""
    return _check_head(_judge_header(header), header.path, adapter)


def _judge_header(header: GgufHeader) -> _Head:
    fault = _attempt(lambda: find_fault(header))
    return _Head(
        _attempt(lambda: read_gguf_spec(header)),
        _attempt(lambda: read_facts(header)),
        _attempt(lambda: check_tokenizer(header)),
        fault if isinstance(fault, str) else "",  # what is damaged is refused before
    )


def _attempt(read: Callable[[], _T]) -> _T | ModelRefused:
    try:
        return read()
    except ModelRefused as refusal:
        return refusal


def _take(value: _T | ModelRefused) -> _T:
    """Return a value. Raises the refusal that it is."""
    if isinstance(value, ModelRefused):
        raise value.with_traceback(None)
    return value


def _check_head(head: _Head, path: Path, adapter: str) -> DecoderSizes:
    sizes = _take(head.facts) if adapter == LLAMA_CPP else _choose_sizes(head, adapter)
    _take(head.tokenizer)
    if isinstance(sizes, GgufFacts) and adapter != _CHOSEN_ELSEWHERE:
        with suppress(AdapterUnavailable):  # whoever looks for devices says so
            check_fault(path.name, head.fault)
    return sizes


def check_library(path: Path) -> None:
    """Check that llama.cpp's library that is here runs a GGUF file, as far as its faults are known. Raises ModelRefused
    where it does not, and AdapterUnavailable."""
    check_files(path, adapter=LLAMA_CPP)


def _choose_sizes(head: _Head, adapter: str) -> DecoderSizes:
    """Return the shape of a file for our graphs; what only llama.cpp computes is taken where a plan may choose that,
    and refused with the way out elsewhere."""
    if not isinstance(head.spec, NotConvertible):
        return _take(head.spec)
    facts = _take(head.facts)  # refuses what llama.cpp does not serve either
    if adapter == _CHOSEN_ELSEWHERE or (adapter == _CHOSEN_HERE and _has_llama_cpp()):
        return facts
    raise ModelRefused(f"{head.spec} llama.cpp's library runs it as it is: set adapter: {LLAMA_CPP}.")


def _has_llama_cpp() -> bool:
    try:
        return bool(registry.list_devices(LLAMA_CPP))
    except AdapterError:
        return False


def check_directory_heads(directory: Path, tensors: Mapping[str, Stored], adapter: str = "") -> DecoderSizes:
    """Check a directory by its small files and by what the heads of its weights list, as `check_files` does."""
    config, where = read_json(directory / CONFIG_FILE), title(directory)
    spec = _attempt(lambda: SafetensorsWeights(config, tensors, where, heads_only=True).spec)
    sizes: DecoderSizes
    if isinstance(spec, NotConvertible):
        sizes = read_directory_facts(config, tensors, where)
        _check_transformers(spec, sizes, where, adapter)
    else:
        sizes = _take(spec)
    if not read_declared_fingerprint(directory):  # such a draft has no tokenizer: it speaks its target's ids
        check_hf_tokenizer(directory, sizes.vocabulary_size)
    return sizes


def _check_transformers(refusal: NotConvertible, facts: DirectoryFacts, where: str, adapter: str) -> None:
    """Check that an adapter runs what only transformers' own class computes. Raises ModelRefused with the way out."""
    if adapter == _CHOSEN_ELSEWHERE:
        return
    if adapter not in (TRANSFORMERS, _CHOSEN_HERE):
        raise ModelRefused(f"{refusal} transformers' own class runs it on torch: set adapter: {TRANSFORMERS}.")
    refuse_without_transformers(str(refusal))
    refuse_form(facts.quantised, "", where)


def check_use(spec: DecoderSizes, name: str, adapter: str = "", *, static: bool = False, draft: bool = False) -> None:
    """Check what a model is to be: the `draft` of another, or a target, on an adapter ("" where none is chosen).
    Raises ModelRefused; `name` says of which model."""
    if spec.draft_outputs and not draft:
        raise ModelRefused(_describe_draft(name, spec.draft_outputs, spec.vocabulary_size))
    if draft and (why := explain_no_drafts(spec)):
        raise ModelRefused(f"{name}: {why}, its own either: it cannot draft. Choose another draft.")
    if isinstance(spec, IrFacts) and (why := explain_no_graph(spec, adapter, static=static)):
        raise ModelRefused(f"{name}: {why}")
    if not isinstance(spec, DecoderSpec):
        return
    try:
        refuse_decoder(adapter, spec, static=static)
    except ModelRefused as error:
        raise ModelRefused(f"{name}: {error}") from error


def list_only_runtimes(sizes: DecoderSizes) -> tuple[str, ...]:
    """Return which runtimes of ours alone run such a model; () where all do, as far as is known here."""
    if isinstance(sizes, DecoderSpec):
        return ()
    if isinstance(sizes, DirectoryFacts):
        return (TRANSFORMERS,)
    return (sizes.adapter,) if isinstance(sizes, IrFacts) else (LLAMA_CPP,)


def refuse_whole(sizes: DecoderSizes, name: str) -> None:
    """Refuse a model whose layers cannot be cut into ranges. Raises ModelRefused."""
    if sizes.whole:
        raise ModelRefused(f"{name}: {sizes.whole}")


def explain_no_drafts(spec: DecoderSizes | None) -> str:
    """Return why nothing can be drafted for a model, "" where it can or where that is not known here."""
    return NO_REWIND if isinstance(spec, GgufFacts) and not spec.cuts_anywhere else ""


def _describe_draft(name: str, outputs: int, vocabulary_size: int) -> str:
    return (
        f"{name}: it is a draft (draft_vocab_size), which can say {outputs} of {vocabulary_size} tokens only. "
        "Name it under `drafts`, and its target under `model`."
    )
