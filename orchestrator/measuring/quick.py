"""What decoding costs, roughly, from a few forwards before a model serves: rounds correct it later."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from adapters.contract import LoadedModel
from device_profiles.cost import StepCost
from device_profiles.curve_fit import StepSample, fit_steps
from orchestrator.clock import Clock
from orchestrator.measuring.steps import forward_ms, segment

_HELD = 16  # positions of each sequence
_SHAPES = ((1, 1), (1, 9), (4, 1), (4, 3), (1, 3), (1, 5), (1, 2), (16, 1), (1, 17), (16, 3))
"""Sequences and the rows of each, those that tell most first."""
_PASSES = 3
"""The first one finds nothing in the processor's caches, and counts only where there is time for no other."""


def quick_cost(model: LoadedModel, clock: Clock, *, budget_s: float) -> StepCost | None:
    """Measure a model with nothing in its slots for `budget_s` seconds at most, one forward more excepted, and leave it
    so. None where not even two forwards of one sequence fit in. Raises what `LoadedModel.forward` raises."""
    caps = model.capabilities
    until_s = clock.monotonic_s() + budget_s
    taken: dict[tuple[int, int], list[float]] = {}
    changed: list[float] = []
    held = 0
    for number in range(_PASSES):
        for shape in _SHAPES:
            sequences, rows = shape
            if clock.monotonic_s() > until_s:
                break
            if sequences > caps.slots or sequences * max(rows, caps.paid_rows, _HELD) > caps.max_batch_rows:
                continue
            filling = [segment(model, slot, 0, _HELD, prompt=True) for slot in range(held, sequences)]
            batch = [segment(model, slot, _HELD, rows, prompt=False) for slot in range(sequences)]
            if model.blocks_needed([*filling, *batch[:held]]) > model.free_blocks():
                continue
            if filling:
                model.forward(filling)
                held = sequences
            first_ms, ms = forward_ms(model, batch, clock), forward_ms(model, batch, clock)
            taken.setdefault(shape, []).append(ms)
            if number and sequences == 1:
                changed.append(first_ms / ms)
    for slot in range(held):
        model.release(slot)
    cost = _fitted(model, taken)
    return None if cost is None else replace(cost, varying=max(1.0, median(changed or [1.0])))


def _fitted(model: LoadedModel, taken: dict[tuple[int, int], list[float]]) -> StepCost | None:
    if sum(sequences == 1 for sequences, _ in taken) < 2:
        return None
    samples = [
        StepSample((rows,) * sequences, (_HELD,) * sequences, min(times[1:] or times))
        for (sequences, rows), times in taken.items()
    ]
    caps = model.capabilities
    apart = caps.apart_tokens > 0  # then only a forward of a single row is padded
    return fit_steps(samples, 1 if apart else caps.paid_rows, caps.paid_rows if apart else 1).cost
