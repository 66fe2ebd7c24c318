"""What a forward costs: T(rows, sequences, context) of one model, at one precision, in one runtime, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

US_PER_MS = 1000.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a ragged forward, fitted or derived.

    `row_ms[i]` is what a forward of `row_knots[i]` rows of one sequence takes with nothing before them; between the
    knots (ascending, at least one) it is linear, beyond the last it goes on with the last slope. On top of it come
    `sequence_ms` for each further sequence, `position_us` for each position that a sequence holds already (its KV cache
    is read once), and `row_position_us` for each pair of a row and such a position. `error`: the median relative error
    of the fit over its samples, 0 where it is not fitted.
    """

    row_knots: tuple[float, ...]
    row_ms: tuple[float, ...]
    sequence_ms: float = 0.0
    position_us: float = 0.0
    row_position_us: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        if not self.row_knots or len(self.row_knots) != len(self.row_ms):
            raise ValueError("as many times as knots are needed, and at least one")
        if any(right <= left for left, right in zip(self.row_knots, self.row_knots[1:], strict=False)):
            raise ValueError(f"knots must ascend: {self.row_knots}")

    def ms(self, rows: float, sequences: float = 1, context_tokens: float = 0.0) -> float:
        """Return the time of a forward of `rows` rows in all, of `sequences` sequences that hold `context_tokens`
        positions each."""
        attention_us = (self.position_us * sequences + self.row_position_us * rows) * context_tokens
        return self._rows_ms(rows) + self.sequence_ms * max(0.0, sequences - 1) + attention_us / US_PER_MS

    def prefill_ms(self, tokens: int, *, done: int = 0, chunk_rows: int = 512) -> float:
        """Return the time to prefill `tokens` behind `done` positions, in chunks of at most `chunk_rows`."""
        total = 0.0
        while tokens > 0:
            rows = min(tokens, chunk_rows)
            total += self.ms(rows, 1, done + rows / 2)
            tokens, done = tokens - rows, done + rows
        return total

    def scaled(self, factor: float) -> StepCost:
        """Return the cost of a part of the work, as of a share of the layers (or of a slower device)."""
        return replace(
            self,
            row_ms=tuple(factor * ms for ms in self.row_ms),
            sequence_ms=factor * self.sequence_ms,
            position_us=factor * self.position_us,
            row_position_us=factor * self.row_position_us,
        )

    def _rows_ms(self, rows: float) -> float:
        knots, times = self.row_knots, self.row_ms
        if rows <= knots[0] or len(knots) == 1:
            return times[0]
        last = next((index for index, knot in enumerate(knots) if rows <= knot), len(knots) - 1)
        slope = (times[last] - times[last - 1]) / (knots[last] - knots[last - 1])
        return times[last - 1] + slope * (rows - knots[last - 1])


def expected_tokens(acceptance: Sequence[float] | float, depth: int) -> float:
    """Return the expected tokens of a round, the target's own included, with `depth` drafts.

    `acceptance`: the chance that draft i is accepted if all before it are, one for all or one for each position (the
    last goes on). For one a it is (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    total = chance = 1.0
    for index in range(depth):
        chance *= acceptance if isinstance(acceptance, float) else acceptance[min(index, len(acceptance) - 1)]
        total += chance
    return total
