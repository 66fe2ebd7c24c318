"""The tokens that mark the parts of a text whose middle a model is to write (fill in the middle, FIM: Bavarian et al.,
arXiv 2207.14255)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_BEGIN, _HOLE, _END = (f"<\uff5cfim\u2581{word}\uff5c>" for word in ("begin", "hole", "end"))  # DeepSeek's letters
_SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", _BEGIN, "<PRE>", "\u2581<PRE>", "<|code_prefix|>"),
    "suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", _HOLE, "<SUF>", "\u2581<SUF>", "<|code_suffix|>"),
    "mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", _END, "<MID>", "\u2581<MID>", "<|code_middle|>"),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
"""How model families write each mark, by the part of its name in GGUF (`tokenizer.ggml.fim_pre_token_id`). The list is
llama.cpp's (src/llama-vocab.cpp)."""
FILL_ROLES: Final = tuple(_SPELLINGS)
_KNOWN: Final = frozenset(text for spellings in _SPELLINGS.values() for text in spellings)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The marks before the prefix, before the suffix, and before the middle that is to be written. `ends`: all marks
    that a vocabulary has. Behind the middle another one begins another text."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]


def find_fill_tokens(texts: Sequence[str], named: Mapping[str, int]) -> FillTokens | None:
    """Return the marks of a vocabulary, of which `texts` are the tokens in id order; None where one of the three that
    are needed is missing. `named`: those that its file names, by role. Others are known by how they are written."""
    written = {text: index for index, text in enumerate(texts) if text in _KNOWN}
    ids = dict(named)
    for role, spellings in _SPELLINGS.items():
        by_text = next((written[text] for text in spellings if text in written), None)
        if by_text is not None:
            ids.setdefault(role, by_text)
    if not ids.keys() >= {"pre", "suf", "mid"}:
        return None
    return FillTokens(ids["pre"], ids["suf"], ids["mid"], frozenset(ids.values()))
