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
    of the fit on samples that it did not see, 0 where it is not fitted.

    `serial`: the runtime runs the sequences of a forward one after another, so that its rows cost what they cost each
    sequence alone. `least_rows`: each sequence is run with so many rows at least, `least_forward_rows`: a whole forward
    (padding costs like rows that are used). `varying`: how many times as long a forward takes whose number of rows is
    not that of the one before, for which the runtime prepares its buffers anew. `prefill`: what chunks of a prompt
    cost, where that is other than what decoding costs: rows behind a prompt may take other kernels, and all of them are
    wanted as logits. None: the same.
    """

    row_knots: tuple[float, ...]
    row_ms: tuple[float, ...]
    sequence_ms: float = 0.0
    position_us: float = 0.0
    row_position_us: float = 0.0
    error: float = 0.0
    serial: bool = False
    least_rows: int = 1
    least_forward_rows: int = 1
    varying: float = 1.0
    prefill: StepCost | None = None

    def __post_init__(self) -> None:
        if not self.row_knots or len(self.row_knots) != len(self.row_ms):
            raise ValueError("as many times as knots are needed, and at least one")
        if any(right <= left for left, right in zip(self.row_knots, self.row_knots[1:], strict=False)):
            raise ValueError(f"knots must ascend: {self.row_knots}")

    def ms(self, rows: float, sequences: float = 1, context_tokens: float = 0.0, *, changes: float = 0.0) -> float:
        """Return the time of a forward of `rows` rows in all, of `sequences` sequences that hold `context_tokens`
        positions each. With none of either it is that of the smallest forward. `changes`: the share of forwards whose
        rows are not as many as those of the one before."""
        rows = self.paid(rows, sequences)
        calls = max(1.0, sequences) if self.serial else 1.0
        attention_us = (self.position_us * sequences + self.row_position_us * rows) * context_tokens
        sequences_ms = self.sequence_ms * max(0.0, sequences - 1)
        ms = calls * self._rows_ms(rows / calls) + sequences_ms + attention_us / US_PER_MS
        return ms * (1.0 + changes * (self.varying - 1.0))

    def paid(self, rows: float, sequences: float) -> float:
        """Return the rows that are run, padding included."""
        each = self.least_rows * sequences if self.least_rows > 1 else 0.0
        return max(rows, each, self.least_forward_rows if self.least_forward_rows > 1 else 0.0)

    def prefill_ms(self, tokens: int, *, done: int = 0, chunk_rows: int = 512) -> float:
        """Return the time to prefill `tokens` behind `done` positions, in chunks of at most `chunk_rows`."""
        cost, total = self.prefill or self, 0.0
        while tokens > 0:
            rows = min(tokens, chunk_rows)
            total += cost.ms(rows, 1, done)
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
            prefill=self.prefill.scaled(factor) if self.prefill else None,
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
