"""Measures what rounds of the real decode loop take beside their forwards, and what the target says to some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment
from device_profiles.cost import StepCost
from device_profiles.curve_fit import nonnegative_least_squares
from device_profiles.measured import RoundOverhead
from device_profiles.units import MS_PER_S
from device_profiles.workload import ModelSpec
from orchestrator.clock import Clock
from orchestrator.cluster.port import Submit
from orchestrator.decoding.loop import DecodeLoop
from orchestrator.errors import OutriderError

_LEAST_ROUNDS = 12  # of a kind, before what they take says anything


class WatchedModel:
    """A loaded model that notes of its last forward how many rows were wanted, whether the one before had as many, and
    what its sequences held on average."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.context_tokens = 0.0
        self.rows = 0
        self.changed = False

    @property
    def spec(self) -> ModelSpec:
        """See the contract."""
        return self._model.spec

    @property
    def capabilities(self) -> Capabilities:
        """See the contract."""
        return self._model.capabilities

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        result = self._model.forward(batch)
        self.changed, self.rows = self.rows != len(result.logits), len(result.logits)
        self.context_tokens = sum(segment.start for segment in batch) / max(1, len(batch))
        return result

    def held(self, slot: int) -> int:
        """See the contract."""
        return self._model.held(slot)

    def free_blocks(self) -> int:
        """See the contract."""
        return self._model.free_blocks()

    def blocks_needed(self, batch: Sequence[Segment]) -> int:
        """See the contract."""
        return self._model.blocks_needed(batch)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """See the contract."""
        return self._model.attach(slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """See the contract."""
        self._model.share(slot, tokens)

    def release(self, slot: int) -> None:
        """See the contract."""
        self._model.release(slot)

    def close(self) -> None:
        """See the contract."""
        self._model.close()


@dataclass(frozen=True, slots=True)
class RoundSample:
    """A round that only decoded: what it was of, what it took without its drafting, and whether the round before had
    another number of rows."""

    sequences: int
    rows: int
    context_tokens: float
    ms: float
    changed: bool


@dataclass(slots=True)
class Decoded:
    """What a loop did with some requests. `rounds`: those that only decoded."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    rounds: list[RoundSample] = field(default_factory=list)
    wall_s: float = 0.0


def decode(loop: DecodeLoop, model: WatchedModel, submits: Sequence[Submit], clock: Clock) -> Decoded:
    """Decode requests to their ends, all at once. Raises OutriderError for one that is refused, and DeviceLost."""
    done = Decoded()
    started = clock.monotonic_s()
    for submit in submits:
        refused = loop.submit(submit)
        if refused is not None:
            raise OutriderError(f"request {submit.request_id}: {refused.message}")
        done.outputs[submit.request_id] = []
    while not loop.idle:
        began = clock.monotonic_s()
        taken = loop.run_round()
        ms = (clock.monotonic_s() - began) * MS_PER_S
        # A round without a prefill has tokens for each of its sequences, and none of them is a first one.
        decoding = len(taken.deltas) == taken.sequences and all(done.outputs[d.request_id] for d in taken.deltas)
        for delta in taken.deltas:
            done.outputs[delta.request_id] += delta.tokens
        if decoding:
            ms -= taken.draft_ms
            done.rounds.append(RoundSample(taken.sequences, model.rows, model.context_tokens, ms, model.changed))
    done.wall_s = clock.monotonic_s() - started
    return done


def fit_overhead(rounds: Sequence[RoundSample], cost: StepCost) -> RoundOverhead:
    """Return what rounds take beside what their forwards are predicted to take.

    Not beside what they took: behind sampling and emitting, a forward may take longer than one that follows another at
    once, as threads have gone to sleep. Medians of rounds of equal work, by least squares relative to the whole round,
    without a part below zero. Of no rounds it is nothing.
    """
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in rounds:
        forward_ms = cost.ms(one.rows, one.sequences, one.context_tokens, changes=float(one.changed))
        beside_ms = one.ms - forward_ms
        groups.setdefault((one.sequences, one.rows), []).append((beside_ms, one.ms))
    if not groups:
        return RoundOverhead()
    times = np.array([max(0.0, float(np.median([beside for beside, _ in found]))) for found in groups.values()])
    whole = np.array([float(np.median([ms for _, ms in found])) for found in groups.values()])
    weights = np.sqrt([len(found) for found in groups.values()]) / whole
    features = np.array([(1.0, sequences, rows) for sequences, rows in groups])
    found = nonnegative_least_squares(features * weights[:, None], times * weights)
    return RoundOverhead(float(found[0]), float(found[1]), float(found[2]))


def varying_in(rounds: Sequence[RoundSample], cost: StepCost) -> float:
    """Return how many times as long a round of one sequence takes behind one of another number of rows: medians of
    time over cost, at least 1. Where too few rounds tell, what the cost says already."""
    steady = replace(cost, varying=1.0)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for one in rounds:
        if one.sequences == 1:
            ratios[one.changed].append(one.ms / steady.ms(one.rows, 1, one.context_tokens))
    if min(map(len, ratios.values())) < _LEAST_ROUNDS:
        return cost.varying
    return max(1.0, float(np.median(ratios[True]) / np.median(ratios[False])))


def disturbance(rounds: Sequence[RoundSample], cost: StepCost, overhead: RoundOverhead) -> float:
    """Return how many times as long rounds take on average as a cost and an overhead say that were fitted to what was
    disturbed least: in a long run the machine's other work takes its share. Without the slowest twentieth, which one
    hiccup can decide; at least 1, and 1 of no rounds."""
    pairs = [
        (
            one.ms,
            cost.ms(one.rows, one.sequences, one.context_tokens, changes=float(one.changed))
            + overhead.ms(one.sequences, one.rows),
        )
        for one in rounds
    ]
    kept = sorted(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-9))[: len(pairs) - len(pairs) // 20]
    expected_ms = sum(expected for _, expected in kept)
    return max(1.0, sum(ms for ms, _ in kept) / expected_ms) if expected_ms > 0.0 else 1.0
