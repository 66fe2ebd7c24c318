"""Whether a draft model's tokens are the target's: compared id by id, because sizes alone say nothing.

Glossary:
    identical  every id means the same text in both
    padded     the same but for rows that stand for nothing: models round their vocabulary up, each to its own size
    differs    some id means something else; drafts of one are noise to the other
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# Rows that fill a vocabulary up have names: [PAD7] where a file has none, <unused7>, <|reserved_special_token_7|>.
# A picture's place (<image_soft_token>) is one that text never holds.
_PADDING = re.compile(r"[<\[|].*(?:pad|unused|reserved|dummy|extra_id|soft_token).*[>\]|]", re.IGNORECASE)
_LONGEST_SHOWN = 32  # characters of a token in a message. Not tuned.


class Match(Enum):
    """How two vocabularies go together."""

    IDENTICAL = "identical"
    PADDED = "padded"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """`first` is the lowest id that differs (-1 where none does), with its text in both (None: no such id)."""

    match: Match
    target_size: int
    draft_size: int
    first: int = -1
    target_text: str | None = None
    draft_text: str | None = None

    def words(self) -> str:
        """Return the difference in words; to be asked for where there is one."""
        return (
            f"the target's vocabulary has {self.target_size} tokens and the draft's {self.draft_size}, and the first "
            f"that differs is id {self.first}: {_format_token(self.target_text)} and {_format_token(self.draft_text)}"
        )


def refusal(source: str, comparison: VocabularyComparison) -> str:
    """Return why a draft model is refused, and the ways out."""
    way_out = "Choose a draft of the target's family, or set mismatched_vocabulary: translate"
    return f"{source}: {comparison.words()}. {way_out}"


def compare(target: Sequence[str], draft: Sequence[str]) -> VocabularyComparison:
    """Compare the texts of all token ids, in id order."""
    sizes = len(target), len(draft)
    first = next((index for index, (text, other) in enumerate(zip(target, draft, strict=False)) if text != other), -1)
    if first < 0 and sizes[0] == sizes[1]:
        return VocabularyComparison(Match.IDENTICAL, *sizes)
    shared = min(sizes)
    for index in range(shared if first < 0 else first, max(sizes)):
        text, other = (texts[index] if index < len(texts) else None for texts in (target, draft))
        if text != other and not (_stands_for_nothing(text) and _stands_for_nothing(other)):
            return VocabularyComparison(Match.DIFFERS, *sizes, index, text, other)
    return VocabularyComparison(Match.PADDED, *sizes)


def _stands_for_nothing(text: str | None) -> bool:
    return text is None or not text or _PADDING.fullmatch(text) is not None


def _format_token(text: str | None) -> str:
    if text is None:
        return "none"
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
