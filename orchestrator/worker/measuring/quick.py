"""What decoding costs, roughly, from a few forwards before a model serves: rounds correct it later."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from statistics import median

from adapters.contract import LoadedModel, Segment
from device_profiles.cost import StepCost
from device_profiles.curve_fit import StepSample, fit_steps
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.worker.measuring.steps import forward_ms, read_min_rows, segment

_HELD = 16  # positions of each sequence. Not tuned.
_TOKENS = 32  # so many different ones: what they are does not change what they cost
_SHAPES = ((1, 1), (1, 9), (1, 3), (1, 5), (4, 1), (4, 3), (16, 1), (16, 3))
"""Sequences and the rows of each, those that tell most first. ADR 0160: kernels may take several rows in the time of
one. Without three and five rows each row up to nine seems to cost the same."""
_TELLING = _SHAPES[:6]
"""What it takes to tell the cost of a row from that of a sequence."""
_TURNS = ((1, 5), (1, 1)) * 3
"""Run in turn, to see what a forward takes longer whose rows are not those of the one before. ADR 0029: a change takes
5 ms, so three pairs are enough to see one."""
_FORWARDS = 40
"""As long as so many forwards of one row it may take where the budget is less. ADR 0160: the shapes of one sequence,
and a few of several. Not tuned."""


def quick_cost(model: LoadedModel, clock: Clock, *, budget_s: float) -> StepCost | None:
    """Measure a model with nothing in its slots for `budget_s` seconds or `_FORWARDS` forwards of one row, whichever is
    longer, two forwards more excepted, and leave it so. None where not even two shapes of one sequence fit in. Raises
    what `LoadedModel.forward` raises."""
    began_s = clock.monotonic_s()
    until_s = began_s + budget_s
    taken: dict[tuple[int, int], float] = {}
    held = 0
    for shape in (wanted for wanted in _SHAPES if _fits(model, wanted)):
        filling = [_segment(model, slot, 0, _HELD, prompt=True) for slot in range(held, shape[0])]
        if clock.monotonic_s() > until_s or model.count_needed_blocks(filling) > model.free_blocks() - shape[0]:
            break
        if filling:
            model.forward(filling)
            held = shape[0]
        taken[shape] = _run(model, shape, clock, times=2)[1]  # the first finds nothing in the processor's caches
        if shape == _SHAPES[0]:
            until_s = max(until_s, began_s + _FORWARDS * taken[shape] / MS_PER_S)
    longer = [
        _run(model, shape, clock, times=1)[0] - taken[shape]
        for shape in _TURNS
        if shape in taken and clock.monotonic_s() <= until_s
    ]
    for slot in range(held):
        model.release(slot)
    return _fit_cost(model, taken, longer)


def _fits(model: LoadedModel, shape: tuple[int, int]) -> bool:
    sequences, rows = shape
    caps = model.capabilities
    return sequences <= caps.slots and sequences * max(rows, caps.min_rows, _HELD) <= caps.max_batch_rows


def _segment(model: LoadedModel, slot: int, start: int, rows: int, *, prompt: bool) -> Segment:
    whole = segment(model, slot, start, rows, prompt=prompt)
    return replace(whole, tokens=[token % min(_TOKENS, model.spec.vocabulary_size) for token in whole.tokens])


def _run(model: LoadedModel, shape: tuple[int, int], clock: Clock, *, times: int) -> list[float]:
    batch = [_segment(model, slot, _HELD, shape[1], prompt=False) for slot in range(shape[0])]
    return [forward_ms(model, batch, clock) for _ in range(times)]


def _fit_cost(model: LoadedModel, taken: dict[tuple[int, int], float], longer: list[float]) -> StepCost | None:
    alone = sorted((rows, ms) for (sequences, rows), ms in taken.items() if sequences == 1)
    if len(alone) < 2:
        return None
    least_rows, least_forward_rows = read_min_rows(model.capabilities)
    if all(shape in taken for shape in _TELLING):
        samples = [StepSample((rows,) * sequences, (0,) * sequences, ms) for (sequences, rows), ms in taken.items()]
        cost = fit_steps(samples, least_rows, least_forward_rows).cost
    else:  # too few to tell rows from sequences
        times = tuple(accumulate((ms for _, ms in alone), max))
        knots = tuple(float(rows) for rows, _ in alone)
        cost = StepCost(knots, times, least_rows=least_rows, least_forward_rows=least_forward_rows)
    return replace(cost, changing_ms=max(0.0, median(longer))) if len(longer) > 2 else cost
