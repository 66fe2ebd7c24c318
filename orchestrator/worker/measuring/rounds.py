"""What rounds of the real decode loop take beside their forwards, how long they take on average, and what the target
says to some prompts.

Loops that are compared take turns on one model, a part of their work at a time: what disturbs the machine for a second
disturbs a part of each. (On two cores of a shared machine a forward's time went up and down by a fifth, and half of
that was gone 0.3 s later.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from device_profiles.cost import StepCost
from device_profiles.curve_fit import nonnegative_least_squares
from device_profiles.measured import RoundOverhead
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.errors import OutriderError
from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.measuring.watched import WatchedModel

# Rounds with prompts, before what they take says anything. ADR 0033. Not tuned.
_LEAST_PROMPTS = 6
# Times the median: no more is believed, since one stall can decide a mean. ADR 0033. Not tuned.
_MOST = 3.0


@dataclass(frozen=True, slots=True)
class RoundSample:
    """A round. `rows` and `sequences` that decoded, behind `context_tokens` on average; `ms` without its drafting,
    which took `draft_ms`; `changed`: the forward before ran another number of rows. `prompt_rows` of prompts were in
    it, behind `prompt_behind` positions. It said `tokens` for `turns` sequences, of which `ended` came to their ends,
    and verified `drafted` drafts."""

    sequences: int
    rows: int
    context_tokens: float
    ms: float
    changed: bool
    draft_ms: float = 0.0
    prompt_rows: int = 0
    prompt_behind: float = 0.0
    tokens: int = 0
    turns: int = 0
    ended: int = 0
    drafted: int = 0

    @property
    def whole_ms(self) -> float:
        return self.ms + self.draft_ms


class Decoding:
    """Requests that a loop decodes, and all its rounds. `outputs`: by request, what it said so far."""

    def __init__(self, loop: DecodeLoop, model: WatchedModel, submits: Sequence[Submit], clock: Clock) -> None:
        """Submit all. Raises OutriderError for one that is refused."""
        self._loop, self._model, self._clock = loop, model, clock
        self._most = {submit.request_id: submit.max_tokens for submit in submits}
        self._wanted = sum(self._most.values())
        self._said = 0
        self.outputs: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
        self.rounds: list[RoundSample] = []
        for submit in submits:
            refused = loop.submit(submit)
            if refused is not None:
                raise OutriderError(f"request {submit.request_id}: {refused.message}")

    @property
    def done(self) -> bool:
        return self._loop.idle

    def advance(self, share: float = 1.0) -> None:
        """Decode until this share of all that may be said at most was said, or all is done. What a request that ended
        early would have said counts. Raises DeviceLost."""
        while not self.done and (share >= 1.0 or self._said < share * self._wanted):
            self._round()

    def _round(self) -> None:
        began = self._clock.monotonic_s()
        taken = self._loop.run_round_strictly()
        ms = (self._clock.monotonic_s() - began) * MS_PER_S
        of = self._model.forward_was
        for delta in taken.deltas:
            self.outputs[delta.request_id] += delta.tokens
            self._said += len(delta.tokens)
            if delta.finish:
                self._said += self._most[delta.request_id] - len(self.outputs[delta.request_id])
        self.rounds.append(
            RoundSample(
                of.sequences,
                of.rows,
                of.context_tokens,
                ms - taken.draft_ms,
                self._model.changed,
                taken.draft_ms,
                of.prompt_rows,
                of.prompt_behind,
                sum(len(delta.tokens) for delta in taken.deltas),
                len(taken.deltas),
                sum(bool(delta.finish) for delta in taken.deltas),
                taken.drafted,
            )
        )


def in_turns(decodings: Sequence[Decoding], parts: int) -> Iterator[int]:
    """Decode all to their ends, each the same share of its work at a time, in the opposite order every other time.
    Yield the number of each part when all have come so far. Raises DeviceLost."""
    for part in range(1, parts + 1):
        for decoding in decodings if part % 2 else reversed(decodings):
            decoding.advance(part / parts)
        yield part


def fit_rounds(rounds: Sequence[RoundSample], cost: StepCost) -> tuple[RoundOverhead, StepCost]:
    """Return the time of rounds beside the predicted time of their forwards, and the cost with `changing_ms`. That is
    the time a forward takes longer that runs another number of rows than the one before.

    Not beside what they took: behind sampling and emitting, a forward may take longer than one that follows another at
    once, as threads have gone to sleep. Medians of rounds of equal work, by least squares relative to the whole round,
    without a part below zero. Of no rounds it is nothing.
    """
    groups: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for sample in rounds:
        if not sample.prompt_rows:
            beside_ms = sample.ms - cost.ms(sample.rows, sample.sequences, sample.context_tokens)
            groups.setdefault((sample.sequences, sample.rows, sample.changed), []).append((beside_ms, sample.ms))
    if not groups:
        return RoundOverhead(), cost
    times = np.array([max(0.0, float(np.median([beside for beside, _ in times_ms]))) for times_ms in groups.values()])
    whole = np.array([float(np.median([ms for _, ms in times_ms])) for times_ms in groups.values()])
    weights = np.sqrt([len(times_ms) for times_ms in groups.values()]) / whole
    features = np.array([(1.0, sequences, rows, float(changed)) for sequences, rows, changed in groups])
    parts = nonnegative_least_squares(features * weights[:, None], times * weights)
    return RoundOverhead(float(parts[0]), float(parts[1]), float(parts[2])), replace(cost, changing_ms=float(parts[3]))


def at_pace(rounds: Sequence[RoundSample], cost: StepCost, overhead: RoundOverhead) -> StepCost:
    """Return a cost as real rounds take on average: a fit is to what is disturbed least, and in a long run the
    machine's other work takes its share. Decoding and prompts each by their own rounds; where too few had prompts,
    those as decoding."""
    decode = [
        (sample.ms - overhead.ms(sample.sequences, sample.rows), _decode_ms(sample, cost))
        for sample in rounds
        if sample.sequences and not sample.prompt_rows
    ]
    known = cost.scale_by(_ratio(decode))
    prompts = [
        (sample.ms - overhead.ms(sample.sequences, sample.rows) - _decode_ms(sample, known), _prompt_ms(sample, cost))
        for sample in rounds
        if sample.prompt_rows
    ]
    if len(prompts) < _LEAST_PROMPTS or cost.prefill is None:
        return known
    return replace(known, prefill=cost.prefill.scale_by(_ratio(prompts)))


def _decode_ms(sample: RoundSample, cost: StepCost) -> float:
    if not sample.sequences:
        return 0.0
    changes = float(sample.changed and not sample.prompt_rows)
    return cost.ms(sample.rows, sample.sequences, sample.context_tokens, changes=changes)


def _prompt_ms(sample: RoundSample, cost: StepCost) -> float:
    return cost.chunk_ms(sample.prompt_rows, sample.prompt_behind, beside=sample.sequences > 0)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how many times as long as expected it took on average, of (ms, expected ms); 1 of nothing."""
    known = [(ms, expected) for ms, expected in pairs if expected > 0.0]
    if not known:
        return 1.0
    most = _MOST * float(np.median([ms / expected for ms, expected in known]))
    taken_ms = sum(min(ms, most * expected) for ms, expected in known)
    return max(0.0, taken_ms) / sum(expected for _, expected in known)
