"""What a copy of a model holds that is to draft and nothing else: 4 bits, and an output layer of fewer tokens.

After FR-Spec (Zhao et al., arXiv 2502.14856): a part of the vocabulary is nearly all that is said. What the target
says of the rest is not drafted, and it says it all the same.
"""

from __future__ import annotations

import math
from typing import Final

from adapters.gguf_header import GgufHeader, GgufTensor

FOUR_BITS: Final = 2
"""GGUF's number of Q4_0: 4 bits, and a scale for each 32 values."""
TABLE, HEAD = "token_embd.weight", "output.weight"
"""What GGUF calls the embedding, which is the output layer too where there is no other, and the output layer."""
# ADR 0125: of Qwen2.5's tokens so many of the lowest ids are 99.9 % of English text and of code.
MOST_OUTPUTS: Final = 98_304
# Of all tokens to those, from which on a smaller output layer is made: less saves little (ADR 0125). Not tuned.
_WORTH: Final = 1.25
_BLOCK: Final = 32  # values that share a scale in Q4_0
_NORMAL: Final = 1  # GGUF's kind of tokens that are plain text
_ROUTER: Final = "ffn_gate_inp"
"""Which experts a token goes to. So few weights decide it that llama.cpp's quantiser keeps them, too."""


def choose_outputs(header: GgufHeader) -> tuple[int, ...]:
    """Return the tokens of the output layer in ascending order; () for all.

    BPE gives ids in the order of its merges, so the lowest are of the commonest pairs of its texts. Beside them stand
    all tokens that are no plain text, by which texts end and turns begin.
    """
    tokens = header.length("tokenizer.ggml.tokens") or 0
    if tokens < _WORTH * MOST_OUTPUTS:
        return ()
    kinds = header.integers("tokenizer.ggml.token_type") or [_NORMAL] * tokens
    return tuple(token for token, kind in enumerate(kinds) if token < MOST_OUTPUTS or kind != _NORMAL)


def choose_kind(tensor: GgufTensor) -> int:
    """Return in which GGUF type such a copy has a tensor: matrices of more than 4 bits in Q4_0."""
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight") and _ROUTER not in tensor.name
    if not is_matrix or tensor.shape[0] % _BLOCK or tensor.size <= count_bytes(FOUR_BITS, math.prod(tensor.shape)):
        return tensor.kind
    return FOUR_BITS


def count_bytes(kind: int, elements: int) -> int:
    """Return what so many elements take in a GGUF type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return int(elements // block * size)


def count_draft_bytes(header: GgufHeader) -> int:
    """Return what such a copy of a file takes, about: of its embedding the file's own bytes."""
    outputs = choose_outputs(header)
    whole = 0
    for tensor in header.tensors:
        size = count_bytes(choose_kind(tensor), math.prod(tensor.shape))
        whole += size * len(outputs) // tensor.shape[-1] if outputs and tensor.name == HEAD else size
    return whole


def describe_copy(stored: str, outputs: int = 0, vocabulary: int = 0) -> str:
    """Return how people call such a copy of a file that is mostly `stored`, with so many outputs (0: all)."""
    label = "int4 (Q4_0)" if stored == "Q4_0" else f"int4 (Q4_0 from {stored})"
    return f"{label}, {outputs:,} of {vocabulary:,} tokens" if outputs else label
