"""What a prepared tokenizer consists of on disk; `adapters.tokenizer` loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

TOKENIZER_FILE = "tokenizer.json"
META_FILE = "tokenizer.meta.json"
TEMPLATE_FILE = "chat_template.jinja"
FORMAT = 4
METASPACE = "\u2581"
# Added tokens that are control tokens although the file calls them plain: llama.cpp's converter decides so too
# (convert_hf_to_gguf.py, does_token_look_special), and the two must agree on what a vocabulary is.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)

END_OF_TURN = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "_<EOT>"),
        *("<turn|>", "<|tool_response>", "[EOT]", "[e~["),  # Gemma 4, Kimi K2, MiniMax
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek writes its bars and spaces so
    }
)
"""Control tokens that end an answer in the model families at hand, whatever the file calls its eos token."""


def looks_special(text: str) -> bool:
    """Return whether a token's text is that of a control token, whatever its file calls it."""
    return bool(_LOOKS_SPECIAL.fullmatch(text))


@dataclass(frozen=True, slots=True)
class TokenizerMeta:
    """What tokenizer.json does not say. Ids of control tokens and of tokens that stand for nothing; the
    fingerprint is `device_profiles.workload.vocabulary_fingerprint` over the token texts in id order.

    `alphabet`: how a token's text spells bytes: "bytes" in GPT-2's letters, "metaspace" as text in which U+2581 is
    a space and <0x0A> a byte. `pre` names how text is cut before the merges ("tokenizer.json": as that file says).
    `fill_ids`: the marks of `adapters.fill_tokens` that a GGUF file names, by role.
    """

    format: int
    pre: str
    bos_id: int | None
    eos_id: int | None
    eos_ids: list[int]
    add_bos: bool
    control_ids: list[int]
    user_defined_ids: list[int]
    unused_ids: list[int]
    vocabulary_size: int
    vocabulary_fingerprint: str
    alphabet: Literal["bytes", "metaspace"] = "bytes"
    fill_ids: dict[str, int] = field(default_factory=dict)


def texts_by_id(ids: Mapping[str, int], size: int, spaced: Collection[int]) -> list[str]:
    """Return token texts in id order, as GGUF files have them (llama.cpp's convert_hf_to_gguf.py).

    An id without a token is called [PAD7]. The ids `spaced` (added plain tokens of a metaspace vocabulary) have real
    spaces.
    """
    texts = [f"[PAD{index}]" for index in range(size)]
    for text, index in ids.items():
        texts[index] = text.replace(METASPACE, " ") if index in spaced else text
    return texts


def write_meta(meta: TokenizerMeta, template: str | None, target: Path) -> None:
    """Write what stands beside tokenizer.json. Raises OSError."""
    (target / META_FILE).write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")
    if template:
        # Bytes, because text mode would translate line ends on some systems.
        (target / TEMPLATE_FILE).write_bytes(template.encode())
