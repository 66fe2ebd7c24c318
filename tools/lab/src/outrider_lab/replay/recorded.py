"""What a replay is played from.

The target's output does not depend on drafts, so one recording serves every policy. For each place in a request's
output it has the drafter's proposal there, and how many of its leading tokens the output goes on with. It can be
recorded from outputs alone, by asking the drafter behind every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from device_profiles.cost import StepCost
from policies.speculation.widths import pad_to_width


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """A draft: how many `tokens`, how sure the drafter was of each, how many of the leading
    ones the target chose too."""

    tokens: int = 0
    confidences: tuple[float, ...] = ()
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """`drafts[i]` is proposed where i output tokens are committed; there are as many as the output has tokens."""

    key: str
    drafts: tuple[RecordedDraft, ...]
    category: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What rounds take. Drafting takes `draft_ms` in a round that drafts, `draft_sequence_ms` for each sequence that is
    asked for, and `draft_token_ms` for each token of the longest draft asked for. A forward takes `change_ms`
    longer behind one of another number of rows. `paid_rows` and `widths`: see
    adapters.contract.Capabilities. `most_rows` of one forward.
    """

    forward: StepCost
    draft_ms: float = 0.0
    draft_token_ms: float = 0.0
    draft_sequence_ms: float = 0.0
    change_ms: float = 0.0
    paid_rows: int = 1
    widths: tuple[int, ...] = ()
    most_rows: int = 256

    @property
    def dear(self) -> bool:
        """Whether each token of a draft takes time, as a model's does; switches leave such drafters alone."""
        return self.draft_token_ms > 0.0

    def rows(self, depth: int) -> int:
        rows = max(1 + depth, self.paid_rows)
        return pad_to_width(rows, self.widths) if self.widths else rows

    def forward_ms(self, depths: Sequence[int], context_tokens: float, rows_before: int = 0) -> float:
        """Return the time of a forward of sequences with these depths, behind one of `rows_before` (0: as many)."""
        rows = sum(map(self.rows, depths))
        change_ms = self.change_ms if rows_before not in (0, rows) else 0.0
        return self.forward.ms(rows, len(depths), context_tokens) + change_ms

    def drafting_ms(self, asked: Sequence[int]) -> float:
        """Return the time that drafting takes where so many tokens are asked for."""
        longest = max(asked, default=0)
        each_ms = self.draft_sequence_ms * sum(limit > 0 for limit in asked)
        return self.draft_ms + each_ms + self.draft_token_ms * longest if longest else 0.0
