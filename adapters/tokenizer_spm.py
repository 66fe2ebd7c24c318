"""A SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` "llama") as a tokenizer of `tokenizers`.

SentencePiece joins the neighbours whose join has the highest score, the leftmost where several have it; the file
holds scores and no merges. Each way to cut a token into two tokens is a merge, ranked by the token's score, as
transformers makes them from the same vocabularies (convert_slow_tokenizer.py, generate_merges).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from adapters.contract import ModelRefused
from adapters.gguf_header import GgufHeader
from adapters.tokenizer_files import METASPACE


def library_of(header: GgufHeader, tokens: Sequence[str], normal: Collection[int], unknown: int | None) -> Any:
    """Return the library's tokenizer, without added tokens. `normal`: the ids that text is made of by merging.

    Raises ModelRefused where scores are missing.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = read_scores(header, tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges_of(tokens, scores, normal),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    spaces = normalizers.Replace(" ", METASPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(METASPACE), spaces]) if adds_space(header) else spaces
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def adds_space(header: GgufHeader) -> bool:
    """Return whether a space is put before a text; it is unless the file says no. Raises ModelRefused where what it
    says is neither."""
    return header.flag("tokenizer.ggml.add_space_prefix") is not False


def read_scores(header: GgufHeader, tokens: Sequence[str]) -> list[float]:
    """Return the scores of all tokens in id order. Raises ModelRefused where they are missing."""
    scores = header.floats("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelRefused(f"{header.path.name}: it lacks its tokens' scores (damaged). Choose another model file.")
    return scores


def merges_of(tokens: Sequence[str], scores: Sequence[float], normal: Collection[int]) -> list[tuple[str, str]]:
    """Return all merges, the best first; among the cuts of one token the one with the longest left half."""
    parts = {tokens[index] for index in normal}
    merges: list[tuple[float, int, str, int]] = []
    for index in normal:
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in parts and token[cut:] in parts:
                merges.append((-scores[index], index, token, -cut))
    merges.sort()
    return [(token[:-cut], token[-cut:]) for _, _, token, cut in merges]
