"""In how many flights the sequences of a target in stages run: as many rounds are under way at the same time.

A round goes through all stages, and a stage runs one forward at a time. So the time until every sequence has had a
round is what one flight's round takes, or what the busiest stage takes for the forwards of all flights, whichever is
longer (the pipeline bubble of GPipe, arXiv 1811.06965). More flights make each forward smaller. That gains where rows
cost time. Where forwards take as long with fewer rows, and one stage longer than the others, it loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from device_profiles.units import ceil_div
from policies.running_mean import update_mean
from policies.serving.replica_load import KEPT, LEAST_SPREAD

# Stages that work are worth that much: prompts of one flight hold up no other one. ADR 0082: where rows cost nothing
# all counts take 0.98 to 1.03 of each other.
_NO_WORSE = 1.02
# To change is to move sequences, whose drafters read them again. ADR 0082. Not tuned: above noise, below what a long
# stage costs (1.4 times).
_CHANGES_FOR = 1.05


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage's forward takes by its rows: a line, by least squares in which older rounds count ever less. It is
    weighted sums of 1, rows, rows squared, ms, and rows times ms."""

    weight: float = 0.0
    rows: float = 0.0
    rows_squared: float = 0.0
    total_ms: float = 0.0
    rows_ms: float = 0.0

    def observe(self, rows: int, took_ms: float) -> StageCost:
        return StageCost(
            KEPT * self.weight + 1.0,
            KEPT * self.rows + rows,
            KEPT * self.rows_squared + rows**2,
            KEPT * self.total_ms + took_ms,
            KEPT * self.rows_ms + rows * took_ms,
        )

    def predict_ms(self, rows: float) -> float:
        """Return what a forward of so many rows takes; as long as any other until a slope can be read."""
        if not self.weight:
            return 0.0
        mean_rows, mean_ms = self.rows / self.weight, self.total_ms / self.weight
        spread = self.rows_squared / self.weight - mean_rows**2
        slope = (self.rows_ms / self.weight - mean_rows * mean_ms) / spread if spread >= LEAST_SPREAD else 0.0
        return max(0.0, mean_ms + max(0.0, slope) * (rows - mean_rows))


@dataclass(frozen=True, slots=True)
class FlightCosts:
    """What is known of a target's rounds: its stages, the rows of a sequence, and what a round takes beside its stages
    where no other one is under way."""

    stages: tuple[StageCost, ...] = ()
    rows_per_sequence: float = 1.0
    beside_ms: float = 0.0


def observe_flight(
    costs: FlightCosts, *, rows: int, sequences: int, stage_ms: Sequence[float], alone_ms: float | None
) -> FlightCosts:
    """Take in a round of sequences that decode. `alone_ms`: the whole round, None where others were under way."""
    stages = costs.stages or (StageCost(),) * len(stage_ms)
    learnt = FlightCosts(
        tuple(stage.observe(rows, took_ms) for stage, took_ms in zip(stages, stage_ms, strict=True)),
        update_mean(costs.rows_per_sequence, rows / sequences, 1.0 - KEPT if costs.stages else 1.0),
        costs.beside_ms,
    )
    if alone_ms is None:
        return learnt
    beside_ms = max(0.0, alone_ms - sum(stage_ms))
    return replace(learnt, beside_ms=update_mean(costs.beside_ms or beside_ms, beside_ms, 0.1))


def predict_flights_ms(costs: FlightCosts, sequences: int, flights: int) -> float:
    """Return how long it takes until each of so many sequences has had a round."""
    sizes = [sequences // flights + (number < sequences % flights) for number in range(flights)]
    largest = ceil_div(sequences, flights) * costs.rows_per_sequence
    round_ms = costs.beside_ms + sum(stage.predict_ms(largest) for stage in costs.stages)
    busiest_ms = max(
        (sum(stage.predict_ms(size * costs.rows_per_sequence) for size in sizes) for stage in costs.stages), default=0.0
    )
    return max(round_ms, busiest_ms)


def choose_flights(costs: FlightCosts, *, sequences: int, most: int, now: int) -> int:
    """Return in how many flights to run so many sequences, `most` at most. Where nothing is known, or nothing is lost
    by it, in as many as there can be. `now`: in how many they run."""
    possible = range(1, max(1, min(most, sequences)) + 1)
    if not costs.stages:
        return possible[-1]
    took_ms = {count: predict_flights_ms(costs, sequences, count) for count in possible}
    best_ms = min(took_ms.values())
    best = max(count for count in possible if took_ms[count] <= _NO_WORSE * best_ms)
    return now if now > best and took_ms.get(now, float("inf")) <= _CHANGES_FOR * best_ms else best
