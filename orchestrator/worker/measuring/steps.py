"""Measures forwards of a loaded model through its contract, at few points that span what decoding does.

Slots are filled once, to several lengths. A decode forward appends rows behind a slot's prompt, and the next one rolls
them back, or goes on behind them where the model cannot do that. So every point can be measured again and again, in
turn with all the others. What disturbs the machine for a second disturbs one visit of each, and is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.contract import Capabilities, CapacityError, LoadedModel, Progress, Segment
from device_profiles.cost import StepCost
from device_profiles.curve_fit import StepFit, StepSample, fit_steps
from device_profiles.units import MS_PER_S, ceil_div
from orchestrator.clock import Clock

_LONG = (1024, 512, 256, 192, *(96,) * 12)
"""Positions that each of the first sequences holds, as far as there is room."""
_SHORT = (16,) * 16
"""And each of the others: the same forwards with nearly nothing to attend to. ADR 0024."""
# ADR 0024: rows of chunks of prompts that are timed. Errors on unseen samples are 3 to 12 % (docs/benchmarks.md).
_CHUNK_ROWS = (8, 32, 64, 128, 256)
# ADR 0024: kernels change at certain row counts. Errors on unseen samples are 2 to 6 % (docs/benchmarks.md).
_ROWS_ALONE = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32)
# ADR 0024: sequences, and rows of each. Not tuned.
_ROWS_TOGETHER = ((2, 1), (2, 3), (2, 5), (4, 1), (4, 2), (4, 5), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4))
# ADR 0024: the same behind long contexts, for the cost of a position.
_ROWS_BEHIND = (1, 2, 5, 9, 16)
_CHUNK_ROWS_BEHIND = (64, 256)  # as above, of chunks
_CHEAP_MS = 25.0
"""A forward that takes no longer is counted twice at each visit. One more before is not counted: it finds nothing of
its own in the processor's caches, and buffers of another shape. ADR 0024."""
_LONG_MS = 100.0
"""A forward that takes longer does not notice that, and counts at once. ADR 0024."""
# ADR 0024: lower quartiles of one pass would be its noise.
_LEAST_PASSES = 2
# ADR 0024. Bounds time on fast devices. Not tuned.
_MOST_PASSES = 12
_FAIR = 1.5
"""From the third pass on, a point that took so many times its share of the budget is left out. ADR 0024. Not tuned."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What forwards cost: decoding, and chunks of a prompt, with the samples that the fits are over."""

    decode: StepFit
    prefill: StepFit
    decode_samples: tuple[StepSample, ...]
    prefill_samples: tuple[StepSample, ...]

    @property
    def cost(self) -> StepCost:
        return replace(self.decode.cost, prefill=self.prefill.cost)

    @property
    def samples(self) -> tuple[StepSample, ...]:
        return (*self.decode_samples, *self.prefill_samples)


@dataclass(frozen=True, slots=True)
class _Point:
    """A forward that is measured again and again: which slots, the rows of each, and where they start. A chunk of a
    prompt is of the prompt's numerical class."""

    slots: tuple[int, ...]
    rows: int
    starts: tuple[int, ...]
    prompt: bool


def measure_steps(model: LoadedModel, clock: Clock, progress: Progress, *, budget_s: float) -> Steps:
    """Measure a model with nothing in its slots, for about `budget_s` seconds, and leave it so.

    Raises what `LoadedModel.forward` raises, and CapacityError where the KV cache is too small.
    """
    lengths = _lengths(model)
    prefill = _fill(model, lengths, clock, progress)
    points = _points(model, lengths)
    times = _passes(model, points, clock, progress, budget_s)
    for slot in range(min(len(lengths) + 1, model.capabilities.slots)):
        model.release(slot)
    decode: list[StepSample] = []
    for point in (visited for visited in points if times[visited]):
        lower_quartile_ms = sorted(times[point])[(len(times[point]) - 1) // 4]  # what disturbs only slows
        sample = StepSample((point.rows,) * len(point.slots), point.starts, lower_quartile_ms)
        (prefill if point.prompt else decode).append(sample)
    caps = model.capabilities
    if not decode or not prefill:
        raise CapacityError(f"a KV cache of {caps.total_blocks} blocks is too small to measure anything in: enlarge it")
    return fit_forwards(decode, prefill, caps)


def fit_forwards(decode: Sequence[StepSample], prefill: Sequence[StepSample], caps: Capabilities) -> Steps:
    """Return what these forwards of a model cost. Raises ValueError where there are none of a kind."""
    fit = fit_steps(decode, *read_min_rows(caps))
    return Steps(fit, fit_steps(prefill, caps.min_rows), tuple(decode), tuple(prefill))


def read_min_rows(caps: Capabilities) -> tuple[int, int]:
    """Return the least rows that each sequence of a decoding forward is run with, and the whole of it (see
    StepCost)."""
    apart = caps.apart_tokens > 0  # then only a forward of a single row is padded
    return (caps.apart_rows, caps.min_rows) if apart else (caps.min_rows, 1)


def _passes(
    model: LoadedModel, points: Sequence[_Point], clock: Clock, progress: Progress, budget_s: float
) -> dict[_Point, list[float]]:
    """Visit every point at least twice, and again while there is time; return what their forwards took."""
    times: dict[_Point, list[float]] = {point: [] for point in points}
    spent_s = dict.fromkeys(points, 0.0)
    began_s = now_s = clock.monotonic_s()
    for number in range(_MOST_PASSES):
        for point in points:
            if number >= _LEAST_PASSES and spent_s[point] > _FAIR * budget_s / len(points):
                continue
            times[point] += _visit(model, point, clock)
            before_s, now_s = now_s, clock.monotonic_s()
            spent_s[point] += now_s - before_s
            progress("measure forwards", min(1.0, (now_s - began_s) / budget_s))
            if number >= _LEAST_PASSES and now_s - began_s > budget_s:
                return times
    return times


def _lengths(model: LoadedModel) -> list[int]:
    """Return the positions that each slot is to hold: the wanted ones, as far as four fifths of all blocks do."""
    caps = model.capabilities
    room = caps.total_blocks * 4 // 5
    lengths: list[int] = []
    for wished in (*_LONG, *_SHORT)[: max(1, caps.slots - 1)]:  # one is left free, for chunks of prompts
        length = min(wished, max(1, caps.max_context_tokens - 2 * max(_ROWS_ALONE)))
        while length > 16 and _blocks(length, caps.block_tokens) > room // 2:
            length //= 2
        room -= _blocks(length, caps.block_tokens)
        if room < 0 and lengths:
            break
        lengths.append(length)
    return lengths


def _blocks(length: int, block_tokens: int) -> int:
    return ceil_div(length + max(_ROWS_ALONE), block_tokens)


def _fill(model: LoadedModel, lengths: Sequence[int], clock: Clock, progress: Progress) -> list[StepSample]:
    """Fill the slots as prompts are; return what the chunks of long ones took behind what was there already."""
    chunk = min(512, model.capabilities.max_batch_rows)
    samples = []
    for slot, length in enumerate(lengths):
        progress("fill the cache", slot / len(lengths))
        for start in range(0, length, chunk):
            rows = min(chunk, length - start)
            ms = forward_ms(model, [segment(model, slot, start, rows, prompt=True)], clock)
            if start or rows == chunk or not slot:
                samples.append(StepSample((rows,), (start,), ms))
    return samples


def _points(model: LoadedModel, lengths: Sequence[int]) -> list[_Point]:
    caps = model.capabilities
    short = [slot for slot in range(len(lengths)) if lengths[slot] <= _SHORT[0]] or [len(lengths) - 1]
    long = [slot for slot in range(len(lengths)) if slot not in short] or short
    alone = [(group[:1], rows) for group in (short,) for rows in _ROWS_ALONE]
    alone += [(long[index : index + 1], rows) for index in (0, 2) for rows in _ROWS_BEHIND if index < len(long)]
    together = [
        (group[:count], rows) for group in (short, long) for count, rows in _ROWS_TOGETHER if count <= len(group)
    ]
    points = [
        _Point(tuple(slots), rows, tuple(lengths[slot] for slot in slots), prompt=False)
        for slots, rows in [*alone, *together]
        if rows * len(slots) <= caps.max_batch_rows and (caps.rewinds or rows == 1)  # nobody drafts for the others
    ]
    points += [
        _Point((len(lengths),), rows, (0,), prompt=True)
        for rows in _CHUNK_ROWS
        if rows <= min(caps.max_batch_rows, caps.max_context_tokens) and len(lengths) < caps.slots
    ]
    points += [
        _Point((slot,), rows, (lengths[slot],), prompt=True)
        for slot in long[:1]
        for rows in _CHUNK_ROWS_BEHIND
        if rows <= min(caps.max_batch_rows, caps.max_context_tokens - lengths[slot])
    ]
    return list(dict.fromkeys(points))


def _visit(model: LoadedModel, point: _Point, clock: Clock) -> list[float]:
    """Return what forwards of a point took; nothing where the KV cache has no room for it."""
    slots = zip(point.slots, point.starts, strict=True)
    batch = [segment(model, slot, start, point.rows, prompt=point.prompt) for slot, start in slots]
    if model.count_needed_blocks(follow_on(model, batch)) > model.free_blocks():
        return []
    first = forward_ms(model, batch, clock)
    count = 2 if first <= _CHEAP_MS else 1
    times = [first] if first > _LONG_MS else [forward_ms(model, batch, clock) for _ in range(count)]
    if point.prompt and not point.starts[0]:
        model.release(point.slots[0])
    return times


def segment(model: LoadedModel, slot: int, start: int, rows: int, *, prompt: bool) -> Segment:
    """Return rows of a text that has no meaning. A chunk of a prompt wants its last row, decoding wants all."""
    size = model.spec.vocabulary_size
    tokens = [(7 * place * place + 11 * place + 31 * slot + 3) % size for place in range(start, start + rows)]
    apart = not prompt and 0 < start <= model.capabilities.apart_tokens
    return Segment(slot, start, tokens, (rows - 1, rows) if prompt else (0, rows), apart)


def follow_on(model: LoadedModel, batch: Sequence[Segment]) -> Sequence[Segment]:
    """Return a batch that is run again and again as a model takes it that cannot roll slots back: each segment behind
    what its slot holds by now, or at 0 where its context is full."""
    caps = model.capabilities
    if caps.rewinds:
        return batch
    following = []
    for segment in batch:
        held = model.count_cached_positions(segment.slot)
        full = held + len(segment.tokens) > min(caps.max_context_tokens, caps.total_blocks * caps.block_tokens)
        following.append(replace(segment, start=0 if full or not segment.start else held))
    return following


def forward_ms(model: LoadedModel, batch: Sequence[Segment], clock: Clock) -> float:
    """Return what a forward took, by the clock on the wall."""
    batch = follow_on(model, batch)
    started = clock.monotonic_s()
    model.forward(batch)
    return (clock.monotonic_s() - started) * MS_PER_S
