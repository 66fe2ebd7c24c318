"""What a forward costs: T(rows, sequences, context) of one model, at one precision, in one runtime, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

US_PER_MS = 1000.0
LEAST_DRAFT_READING = 64
"""Tokens of a text that a draft model reads at least. ADR 0151: with 32 it is right as often, but for some that repeat
the text."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a ragged forward, fitted or derived.

    `row_ms[i]` is what a forward of `row_knots[i]` rows of one sequence takes with nothing before them. Between the
    knots (ascending, at least one) it is linear, and beyond the last it goes on with the last slope. On top of it come:

    - `sequence_ms` for each further sequence.
    - `position_us` for each position that a sequence holds already (its KV cache is read once).
    - `row_position_us` for each pair of a row and such a position.

    `error`: the median relative error of the fit on samples that it did not see, 0 where it is not fitted.

    `serial`: the runtime runs the sequences of a forward one after another, so that its rows cost what they cost each
    sequence alone. `least_rows`: each sequence is run with so many rows at least, `least_forward_rows`: a whole forward
    (padding costs like rows that are used). `changing_ms`: what a forward takes longer that runs another number of rows
    than the one before, for which the runtime prepares its buffers anew. `prefill`: the cost of chunks of a prompt,
    where it is not that of decoding. Rows behind a prompt may take other kernels, and all of them are wanted as logits.
    None: the same.
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
    changing_ms: float = 0.0
    prefill: StepCost | None = None

    def __post_init__(self) -> None:
        if not self.row_knots or len(self.row_knots) != len(self.row_ms):
            raise ValueError("as many times as knots are needed, and at least one")
        if any(right <= left for left, right in zip(self.row_knots, self.row_knots[1:], strict=False)):
            raise ValueError(f"knots must ascend: {self.row_knots}")

    def ms(self, rows: float, sequences: float = 1, context_tokens: float = 0.0, *, changes: float = 0.0) -> float:
        """Return the time of a forward of `rows` rows in all, of `sequences` sequences that hold `context_tokens`
        positions each. With none of either it is that of the smallest forward. `changes`: the share of forwards that
        run another number of rows than the one before."""
        rows = self.count_run_rows(rows, sequences)
        calls = max(1.0, sequences) if self.serial else 1.0
        attention_us = (self.position_us * sequences + self.row_position_us * rows) * context_tokens
        sequences_ms = self.sequence_ms * max(0.0, sequences - 1)
        return (
            calls * self._rows_ms(rows / calls) + sequences_ms + attention_us / US_PER_MS + changes * self.changing_ms
        )

    def count_run_rows(self, rows: float, sequences: float) -> float:
        """Return the rows that are run, padding included."""
        each = self.least_rows * sequences if self.least_rows > 1 else 0.0
        return max(rows, each, self.least_forward_rows if self.least_forward_rows > 1 else 0.0)

    def prefill_ms(self, tokens: int, *, done: int = 0, chunk_rows: int = 512, beside: bool = False) -> float:
        """Return the time to prefill `tokens` behind `done` positions, in chunks of at most `chunk_rows`. `beside`:
        what they add to forwards in which other sequences decode."""
        total = 0.0
        while tokens > 0:
            rows = min(tokens, chunk_rows)
            total += self.chunk_ms(rows, done, beside=beside)
            tokens, done = tokens - rows, done + rows
        return total

    def chunk_ms(self, rows: float, done: float, *, beside: bool) -> float:
        """Return the time of a chunk of a prompt behind `done` positions. `beside`: what it adds to a forward in which
        other sequences decode: where they share it, what a forward of no rows would take is in it anyway."""
        cost = self.prefill or self
        ms = cost.ms(rows, 1, done)
        if not beside or self.serial or len(cost.row_knots) == 1:
            return ms
        slope = (cost.row_ms[1] - cost.row_ms[0]) / (cost.row_knots[1] - cost.row_knots[0])
        return ms - min(ms, max(0.0, cost.row_ms[0] - slope * cost.row_knots[0]))

    def scale_by(self, factor: float) -> StepCost:
        """Return the cost of a part of the work, as of a share of the layers (or of a slower device)."""
        return replace(
            self,
            row_ms=tuple(factor * ms for ms in self.row_ms),
            sequence_ms=factor * self.sequence_ms,
            position_us=factor * self.position_us,
            row_position_us=factor * self.row_position_us,
            changing_ms=factor * self.changing_ms,
            prefill=self.prefill.scale_by(factor) if self.prefill else None,
        )

    def split_over(self, ranks: int, kept_ms: float, sums_ms: float, row_sums_ms: float) -> StepCost:
        """Return the cost where each layer is split over so many ranks. `kept_ms`: what each of them takes of a
        forward as one alone does, to start its kernels. `sums_ms`: what adding their parts takes, and `row_sums_ms` for
        each row."""

        def split_ms(rows: float, ms: float) -> float:
            kept = min(kept_ms, ms)
            return kept + (ms - kept) / ranks + sums_ms + row_sums_ms * rows

        return replace(
            self.scale_by(1.0 / ranks),
            row_ms=tuple(map(split_ms, self.row_knots, self.row_ms)),
            changing_ms=self.changing_ms,
            prefill=self.prefill.split_over(ranks, kept_ms, sums_ms, row_sums_ms) if self.prefill else None,
        )

    def _rows_ms(self, rows: float) -> float:
        knots, times = self.row_knots, self.row_ms
        if rows <= knots[0] or len(knots) == 1:
            return times[0]
        last = next((index for index, knot in enumerate(knots) if rows <= knot), len(knots) - 1)
        slope = (times[last] - times[last - 1]) / (knots[last] - knots[last - 1])
        return times[last - 1] + slope * (rows - knots[last - 1])


def with_row_ms(cost: StepCost, row_ms: float) -> StepCost:
    """Return a cost with what each row takes beside its forward."""
    if row_ms <= 0:
        return cost
    times = tuple(ms + row_ms * rows for rows, ms in zip(cost.row_knots, cost.row_ms, strict=True))
    return replace(cost, row_ms=times)


def bound_draft_reading(left_tokens: float) -> int:
    """Return how many tokens of a text a draft model reads at most, where `left_tokens` more are expected behind it."""
    return max(LEAST_DRAFT_READING, round(left_tokens))


def estimate_round_tokens(acceptance: Sequence[float] | float, depth: int) -> float:
    """Return the expected tokens of a round, the target's own included, with `depth` drafts.

    `acceptance`: the chance that draft i is accepted if all before it are, one for all or one for each position (the
    last goes on). For one a it is (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    total = chance = 1.0
    for index in range(depth):
        chance *= acceptance if isinstance(acceptance, float) else acceptance[min(index, len(acceptance) - 1)]
        total += chance
    return total
