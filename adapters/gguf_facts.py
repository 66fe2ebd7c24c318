"""What a GGUF file's head says of any decoder that llama.cpp's library runs, whatever its architecture computes.

Sizes, and what the model remembers of a text: a KV cache, which can be cut at any position, or a state, which cannot.
Keys have llama.cpp's meaning (llama-model.cpp, `load_hparams`). What tensors show is read of them and needs no table of
architectures; the tables here hold what no file says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from adapters.contract import ModelRefused
from adapters.decoder.facts import DecoderFacts, Memory
from adapters.decoder.from_gguf import find_largest_kind
from adapters.decoder.gguf_blocks import type_name
from adapters.decoder.gguf_keys import read_count, read_number, refuse_key, refuse_other_files
from adapters.decoder.gguf_spec import read_vocabulary_size
from adapters.decoder.spec import MOST_COUNT, MOST_LAYERS
from adapters.gguf_header import GgufArray, GgufHeader, GgufTensor

_ENCODER = "it makes embeddings of texts and says no tokens"
_DIFFUSION = "it writes a text in passes over the whole, not token after token"
_HEAD = "it is a draft head, which reads the hidden states of its target. Name the target's file"
_SPEECH = "it makes sound, not text"
_NO_DECODERS: Final[dict[str, str]] = {
    **dict.fromkeys(("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"), _ENCODER),
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v3", "gemma-embedding", "llama-embed", "t5encoder"), _ENCODER),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("eagle3", "dflash", "dflash-draft", "gemma4-assistant", "gemma4_mtp"), _HEAD),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), _SPEECH),
    "t5": "it reads a text with an encoder before it writes, and only decoders are served",
    "clip": "it is the part of a model that sees pictures. Choose the file with the text model",
}
"""Architectures of llama.cpp (llama-arch.cpp, as of 0.3.36 of llama-cpp-python and of ik_llama.cpp's 2026-08) that are
no decoders of text."""
_STATES: Final = ("ssm_", "shortconv.", "time_mix_")
"""How the tensors of a layer are called that has a state: state-space models, short convolutions, RWKV."""
_HYBRIDS: Final = frozenset({"minimax-01", "deepseek4"})
"""What llama.cpp counts as hybrid though no tensor of such a name shows it."""
_PERIODS: Final[dict[str, tuple[int, bool]]] = {
    **dict.fromkeys(("gemma2", "gpt-oss"), (2, False)),
    **dict.fromkeys(("cohere2", "exaone4", "exaone-moe", "llama4", "olmo2", "afmoe", "mellum"), (4, False)),
    **dict.fromkeys(("cohere2moe", "laguna", "smallthinker"), (4, True)),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "plamo3": (8, False),
    "muse-glimmer": (4, False),
}
"""Of how many layers one looks at all tokens where the file does not say; True: the first of them, else the last
(llama.cpp's models/*.cpp, `load_swa_pattern`)."""
_WINDOWS: Final = {"gemma2": 4096, "llama4": 8192, "exaone4": 4096, "exaone-moe": 128}
"""Their windows in tokens where the file does not say."""
_SHARED_FROM: Final = {"gemma3n": 20}
"""From which layer on keys are those of earlier layers, where no key says how many layers share."""
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFacts(DecoderFacts):
    """A decoder that llama.cpp's library runs. `stored`: what that calls the type of most weights."""


def read_facts(header: GgufHeader) -> GgufFacts:
    """Return the facts of a file.

    Raises ModelRefused, by the key: for a file that is no whole model or no decoder, for what it does not say of a
    decoder, and for numbers that are damaged.
    """
    refuse_other_files(header)
    family = header.text("general.architecture") or ""
    _refuse_other_models(header, family)
    reader = _Reader(header, family)
    names = {tensor.name: tensor for tensor in header.tensors}
    blocks, hidden = reader.count("block_count", most=MOST_LAYERS), reader.count("embedding_length")
    layers = blocks - reader.count("nextn_predict_layers", 0, least=0, most=blocks)
    if not layers:
        raise refuse_key(header, f"{family}.nextn_predict_layers", f"{_HEAD}: all of its layers draft")
    parts = _list_parts(header.tensors, layers)
    heads = reader.each("attention.head_count", blocks, 0)
    kv = _read_kv(reader, parts, blocks, heads, hidden)
    states = tuple(_count_state(reader, part, hidden, heads[layer]) for layer, part in enumerate(parts))
    elements, reads = _count_weights(parts, reader)
    head = math.prod(names["output.weight"].shape) if "output.weight" in names else 0
    return GgufFacts(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=max(heads),
        mlp=max(reader.each("feed_forward_length", blocks, 0)),
        vocabulary_size=read_vocabulary_size(header, names),
        context_length=_read_context(reader),
        memory=_find_memory(family, parts, kv.heads),
        kv_heads=kv.heads,
        key_lengths=kv.keys,
        value_lengths=kv.values,
        state_elements=states,
        layer_elements=elements,
        layer_reads=reads,
        embedding_elements=_count_outside(header.tensors) - head,
        head_elements=head,
        weights_bytes=sum(tensor.size for tensor in header.tensors),
        stored=type_name(find_largest_kind(header)),
    )


def _refuse_other_models(header: GgufHeader, family: str) -> None:
    """Refuse what is no decoder of text, or reads what the text does not say. Raises ModelRefused, by the key."""
    why = _NO_DECODERS.get(family, "")
    if not why and header.flag(f"{family}.attention.causal") is False:
        raise ModelRefused(f"{header.path.name}: {family}.attention.causal: {_ENCODER}. Choose another model.")
    if not why and any(tensor.name.startswith("enc.") for tensor in header.tensors):
        why = _NO_DECODERS["t5"]
    if why:
        raise ModelRefused(f"{header.path.name}: general.architecture: {family!r}: {why}. Choose another model.")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads keys of the architecture; each method raises ModelRefused, by the key."""

    header: GgufHeader
    family: str

    def count(self, rest: str, default: int | None = None, least: int = 1, most: int = MOST_COUNT) -> int:
        return read_count(self.header, f"{self.family}.{rest}", default, least, most)

    def each(self, rest: str, layers: int, default: int) -> tuple[int, ...]:
        """Return a number for each layer, of one for all or of a list."""
        key = f"{self.family}.{rest}"
        if not isinstance(self.header.metadata.get(key), GgufArray):
            return (self.count(rest, default, least=0),) * layers
        counts = self.header.integers(key) or []
        if len(counts) < layers or not all(0 <= count <= MOST_COUNT for count in counts):
            raise refuse_key(self.header, key, f"it does not name a number for each of {layers} layers")
        return tuple(counts[:layers])


def _read_context(reader: _Reader) -> int:
    """Return how many tokens the model reads; YaRN extends the original ones by its factor, as in `rope.py`."""
    trained = reader.count("context_length")
    if reader.header.text(f"{reader.family}.rope.scaling.type") != "yarn":
        return trained
    factor = read_number(reader.header, f"{reader.family}.rope.scaling.factor", 1.0)
    extended = reader.count("rope.scaling.original_context_length", trained) * factor
    if extended > MOST_COUNT:
        key = f"{reader.family}.rope.scaling.factor"
        raise refuse_key(reader.header, key, f"it extends the context to {extended:.0f} tokens")
    return max(trained, int(extended))


@dataclass(frozen=True, slots=True)
class _Kv:
    """What layers keep of a position; see DecoderFacts."""

    heads: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]


def _list_parts(tensors: Sequence[GgufTensor], layers: int) -> list[dict[str, GgufTensor]]:
    parts: list[dict[str, GgufTensor]] = [{} for _ in range(layers)]
    for tensor in tensors:
        match = _IN_LAYER.fullmatch(tensor.name)
        if match and int(match[1]) < layers:
            parts[int(match[1])][match[2]] = tensor
    return parts


def _read_kv(
    reader: _Reader, parts: Sequence[dict[str, GgufTensor]], blocks: int, heads: Sequence[int], hidden: int
) -> _Kv:
    kv_heads = list(reader.each("attention.head_count_kv", blocks, max(heads)))
    usual = hidden // max(heads) if max(heads) else 0
    latent = reader.count("attention.key_length_mla", 0, least=0) > 0
    windows = _read_windows(reader, len(parts))
    key, value = (reader.count(f"attention.{side}_length", usual, least=0) for side in ("key", "value"))
    slides = [
        reader.count(f"attention.{side}_length_swa", size, least=0) for side, size in (("key", key), ("value", value))
    ]
    shared_from = _SHARED_FROM.get(reader.family, blocks - reader.count("attention.shared_kv_layers", 0, least=0))
    index = reader.count("attention.indexer.key_length", 0, least=0)
    rows: list[tuple[int, int, int]] = []
    for layer, part in enumerate(parts):
        if not kv_heads[layer] or layer >= shared_from or not _keeps_keys(part):
            rows.append((0, 0, 0))
            continue
        own = (slides[0], slides[1]) if windows[layer] else (key, value)
        beside = index if "indexer.attn_k.weight" in part else 0
        rows.append((kv_heads[layer], own[0] + beside, 0 if latent else own[1]))
    return _Kv(*(tuple(row[at] for row in rows) for at in range(3)))


def _keeps_keys(part: dict[str, GgufTensor]) -> bool:
    """Return whether a layer has attention of its own: one with a state has it only where it projects keys, too."""
    return not _has_state(part) or any(name.startswith(("attn_k.", "attn_kv_", "attn_k_b.")) for name in part)


def _has_state(part: dict[str, GgufTensor]) -> bool:
    return any(name.startswith(_STATES) for name in part)


def _read_windows(reader: _Reader, layers: int) -> list[int]:
    """Return the window of each layer. A window alone says nothing: many files name one that llama.cpp leaves out."""
    header, key = reader.header, f"{reader.family}.attention.sliding_window_pattern"
    window = reader.count("attention.sliding_window", _WINDOWS.get(reader.family, 0), least=0)
    if isinstance(header.metadata.get(key), GgufArray):
        slides = _read_pattern(header, key, layers)
        return [window if slide else 0 for slide in slides]
    if reader.family not in _PERIODS and key not in header.metadata:
        return [0] * layers
    usual, dense_first = _PERIODS.get(reader.family, (0, False))
    period = reader.count("attention.sliding_window_pattern", usual, least=0)
    dense = 0 if dense_first else period - 1
    return [0 if period and layer % period == dense else window for layer in range(layers)]


def _read_pattern(header: GgufHeader, key: str, layers: int) -> list[bool]:
    try:
        flags = header.flags(key) or []
    except ModelRefused:  # converters write numbers, too
        flags = [number > 0 for number in header.integers(key) or []]
    if len(flags) < layers:
        raise refuse_key(header, key, f"it names {len(flags)} layers, and there are {layers}")
    return flags


def _count_state(reader: _Reader, part: dict[str, GgufTensor], hidden: int, heads: int) -> int:
    """Return the elements of a layer's state: what a convolution looks back at, and what it sums up of the text."""
    if not _has_state(part):
        return 0

    def count(rest: str) -> int:
        return reader.count(rest, 0, least=0)

    if wkv := count("wkv.head_size"):
        return hidden * (reader.count("token_shift_count", 2) + wkv)
    if steps := count("shortconv.l_cache"):
        return hidden * (steps - 1)
    back = max(0, count("ssm.conv_kernel") - 1)
    if size := count("kda.head_dim"):
        return heads * size * (3 * (back or 3) + size)
    inner, state = count("ssm.inner_size"), count("ssm.state_size")
    return back * (inner + 2 * count("ssm.group_count") * state) + state * inner


def _find_memory(family: str, parts: Sequence[dict[str, GgufTensor]], kv_heads: Sequence[int]) -> Memory:
    if not any(map(_has_state, parts)) and family not in _HYBRIDS:
        return Memory.KV_CACHE
    return Memory.HYBRID if any(kv_heads) else Memory.RECURRENT


def _count_weights(parts: Sequence[dict[str, GgufTensor]], reader: _Reader) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the weights of each layer's matrices, and how many of them one row meets."""
    experts = reader.count("expert_count", 0, least=0)
    used = min(reader.each("expert_used_count", len(parts), 0)) if experts else 0
    share = used / experts if experts and used else 1.0
    elements, reads = [], []
    for part in parts:
        sizes = dict(_list_matrices(part))
        routed = sum(size for name, size in sizes.items() if name.endswith("_exps.weight"))
        elements.append(sum(sizes.values()))
        reads.append(elements[-1] - routed + round(share * routed))
    return tuple(elements), tuple(reads)


def _list_matrices(part: dict[str, GgufTensor]) -> Iterator[tuple[str, int]]:
    for name, tensor in part.items():
        if len(tensor.shape) > 1:
            yield name, math.prod(tensor.shape)


def _count_outside(tensors: Sequence[GgufTensor]) -> int:
    return sum(
        math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1 and not _IN_LAYER.match(tensor.name)
    )
