"""What a target and a draft, each on its devices, are predicted to do together at a depth.

A round verifies k drafts of each of C sequences and yields E(k) tokens of each, E from the acceptance of every position
(device_profiles.cost.estimate_round_tokens). With V the time of the verification, D that of drafting and L that of the
link:

    one after the other        round = V + D + L
    at the same time           round = h max(V, D, B) + (1 - h) (V + D + L)

Not all rounds may have as many drafts, where the rule that chooses them drops what is not worth a row. Then V is the
mean over the lengths that occur. Where lengths change, V is longer by what changing costs the runtime.

h is the chance that drafts made ahead turn out to follow the verification; for h = 1 it is the usual max(V, D). They
are sent unasked, and run ahead by what the link's round trip is worth. So only a draft that was not foreseen pays for
the way. B is
what both must read from a memory that they share, at its bandwidth. To each round belongs the prefill of the requests
that start in it: C E(k) / output tokens of them. Goodput is C E(k) / (round + prefill).

A target in layer shards works on m micro-batches (1 <= m <= C) that follow each other through the shards. A round of
each takes the sum over shards and links. Every m times the slowest shard one round of all can end, so V = max(sum, m
times the slowest). One stream (m = 1) waits for the sum; with enough of them in flight it is the max. Prefill goes
through them the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from device_profiles.link import SAME_HOST, LinkProfile
from device_profiles.units import MS_PER_S
from policies.planning.draft_yield import (
    all_hit_rate,
    changes_of,
    compute_draft_length_shares,
    depth_bound,
    tokens_per_round,
    usual_depth,
)
from policies.planning.plan import DrafterFacts, Prediction, Workload
from policies.planning.shard_cost import (
    ModelPart,
    TargetTimes,
    context_tokens,
    count_draft_reading,
    hops_ms,
    micro_batch_counts,
)

Values = TypeVar("Values", float, NDArray[np.float64])
# Of one sequence's message on the draft's link: ids, confidences, framing. ADR 0017: four tokens are 74 bytes.
_BYTES_PER_DRAFT = 64.0
_FIRST_ROWS = 2.0  # the token of the last verdict that a draft missed, and the newest


@dataclass(frozen=True, slots=True)
class TargetSide:
    """A target: its parts in layer order, and the links behind each of them (the last leads back to the first; none
    where there is one part). `sequences` run at once."""

    parts: tuple[ModelPart, ...]
    hops: tuple[LinkProfile, ...] = ()
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class DraftSide:
    """A draft: `part` is None where no model is run. `link`: between the draft's worker and the target's.
    `shared_bandwidth_bytes_per_s`: of a memory that both read at once, 0 where they share none."""

    drafter: DrafterFacts
    part: ModelPart | None = None
    overlap: bool = False
    link: LinkProfile = SAME_HOST
    shared_bandwidth_bytes_per_s: float = 0.0


def verify_ms(
    target: TargetSide, workload: Workload, depth: int, micro_batches: int = 1, *, changes: float = 0.0
) -> float:
    """Return the time of a verification of `depth` drafts of every sequence. `changes`: see StepCost.ms."""
    times = TargetTimes(target.parts, target.sequences, workload)
    return times.verify_ms(target.hops, depth, micro_batches, changes=changes)


def draft_ms(draft: DraftSide, workload: Workload, depth: int, sequences: float) -> float:
    """Return the time to draft `depth` tokens for every sequence: the first forward also reads what the draft missed
    of the last verdict."""
    if depth == 0 or sequences <= 0:
        return 0.0
    if draft.part is None:
        drafted = sum(count * share for count, share in compute_draft_length_shares(draft.drafter, depth))
        return draft.drafter.token_ms * (drafted if draft.drafter.offered else depth) * sequences
    part, context = draft.part, context_tokens(workload)
    first_ms = part.ms(_FIRST_ROWS * sequences, sequences, context)
    return first_ms + (depth - 1) * part.ms(sequences, sequences, context)


def _goodput(prediction: Prediction) -> float:
    return prediction.goodput_tokens_per_s


def predict(
    target: TargetSide,
    draft: DraftSide | None,
    workload: Workload,
    depth: int,
    merit: Callable[[Prediction], float] = _goodput,
) -> Prediction:
    """Return what is predicted at this depth, with the number of micro-batches that has most merit."""
    return _best_of(_Predictor(target, draft, workload), depth, merit)


def best_depth(
    target: TargetSide,
    draft: DraftSide | None,
    workload: Workload,
    times: TargetTimes | None = None,
    merit: Callable[[Prediction], float] = _goodput,
) -> Prediction:
    """Return the prediction at the depth with most merit, the lowest such depth; 0 does not speculate.
    `times`: those of the target's parts, where they are known from before."""
    bound = depth_bound(workload, draft.drafter) if draft is not None else 0
    predictor = _Predictor(target, draft, workload, times)
    least = bound if draft is not None and draft.drafter.by_policy else 1
    known = [_best_of(predictor, depth, merit) for depth in (0, *range(max(1, least), bound + 1))]
    best = max(known, key=lambda prediction: (merit(prediction), -prediction.depth))
    if draft is not None and draft.drafter.by_policy and best.depth:
        best = replace(best, depth=usual_depth(draft.drafter, best.depth))
    return replace(best, plain_tokens_per_s=known[0].goodput_tokens_per_s)


def _best_of(predictor: _Predictor, depth: int, merit: Callable[[Prediction], float]) -> Prediction:
    return max(
        (predictor.at(depth, count) for count in predictor.plain),
        key=lambda prediction: (merit(prediction), -prediction.micro_batches),
    )


class _Predictor:
    """Predicts one pairing at several depths; what does not depend on the depth is computed once. `plain`: the time of
    a verification without drafts, by number of micro-batches (those that make them smaller)."""

    def __init__(
        self, target: TargetSide, draft: DraftSide | None, workload: Workload, times: TargetTimes | None = None
    ) -> None:
        self._target, self._draft, self._load = target, draft, workload
        self._times = times or TargetTimes(target.parts, target.sequences, workload)
        counts = micro_batch_counts(target.sequences) if len(target.parts) > 1 else [1]
        self.plain = {count: self._times.verify_ms(target.hops, 0, count) for count in counts}
        through_ms = hops_ms(target.hops, workload.target.hidden_bytes * workload.prompt_tokens)
        self._first = self._times.prefill_ms + through_ms
        self._plain_prefill = self._prefill = self._times.prefill_beside_ms + through_ms
        if draft is not None and draft.part is not None and not draft.overlap:
            self._prefill += draft.part.prefill_ms(count_draft_reading(workload))
        self._error = max(part.option.cost.error for part in target.parts)

    def at(self, depth: int, micro_batches: int) -> Prediction:
        draft, load, sequences = self._draft, self._load, self._target.sequences
        plain = self.plain[micro_batches]
        verify, drafting, link = plain, 0.0, 0.0
        if draft is not None and depth > 0:
            changes = changes_of(draft.drafter, sequences)
            verify = sum(
                share * self._times.verify_ms(self._target.hops, count, micro_batches, changes=changes)
                for count, share in compute_draft_length_shares(draft.drafter, depth)
            )
            drafting = draft_ms(draft, load, depth, sequences)
            if draft.part is not None and draft.overlap:
                link = draft_link_ms(draft.link.rtt_ms, draft.link.bytes_per_s, sequences)
        together = _together_ms(self._target, draft, load, depth, verify, drafting, link)
        tokens = tokens_per_round(draft.drafter if draft else None, depth)
        prefill = self._prefill if depth else self._plain_prefill
        share = sequences * tokens / load.output_tokens * prefill / micro_batches
        goodput = sequences * tokens / (together + share) * MS_PER_S
        return Prediction(
            goodput_tokens_per_s=goodput,
            stream_tokens_per_s=goodput / sequences,
            tpot_ms=together / tokens,
            ttft_ms=self._first + (together if sequences > 1 else plain),
            tokens_per_round=tokens,
            round_ms=together + share,
            verify_ms=verify,
            draft_ms=drafting,
            link_ms=link,
            prefill_ms=share,
            depth=depth,
            sequences=sequences,
            micro_batches=micro_batches,
            plain_tokens_per_s=goodput,
            error=self._find_error(depth, verify, drafting),
        )

    def _find_error(self, depth: int, verify: float, drafting: float) -> float:
        """Return how far a prediction may be off: as the target's cost, and more where the draft's is less sure."""
        part = self._draft.part if self._draft is not None and depth else None
        if part is None:
            return self._error
        more = max(0.0, part.option.cost.error - self._error)
        return self._error + more * drafting / (verify + drafting)


def together_ms(verify: Values, drafting: Values, late: Values, floor: Values, all_hit: Values) -> Values:
    """Return the time of a round without prefill; of floats, or of arrays element by element.

    `late`: asking for what was not ahead, and drafting it again after the verification. `floor`: the least that both
    together take.
    `all_hit`: the chance that nothing is drafted again; 0, with `late` all of the drafting, is one after the other.
    """
    beside = np.maximum(np.maximum(verify, drafting), floor)
    total: Values = all_hit * beside + (1.0 - all_hit) * np.maximum(verify + late, floor)
    return total


def compute_shared_read_ms(target_bytes: Values, draft_bytes: Values, depth: Values, bytes_per_s: Values) -> Values:
    """Return what it takes to read the target's weights once and the draft's at every token from one memory of this
    bandwidth. The bandwidth is infinite where the two share no memory, or it is not known."""
    return (target_bytes + depth * draft_bytes) / bytes_per_s * MS_PER_S


def draft_link_ms(rtt_ms: Values, bytes_per_s: Values, sequences: int) -> Values:
    """Return what asking for drafts and getting them takes of a round."""
    return rtt_ms + sequences * _BYTES_PER_DRAFT / bytes_per_s * MS_PER_S


def _together_ms(
    target: TargetSide,
    draft: DraftSide | None,
    workload: Workload,
    depth: int,
    verify: float,
    drafting: float,
    link: float,
) -> float:
    if draft is None or draft.part is None or draft.drafter.model is None or not draft.overlap or depth == 0:
        return verify + drafting + link
    all_hit, missed = all_hit_rate(draft.drafter, depth, target.sequences)
    late = draft_ms(draft, workload, depth, missed) + link
    floor = compute_shared_read_ms(
        workload.target.layers * target.parts[0].layer_bytes,
        draft.drafter.model.layers * draft.part.layer_bytes,
        float(depth),
        draft.shared_bandwidth_bytes_per_s or float("inf"),
    )
    return float(together_ms(verify, drafting, late, floor, all_hit))
