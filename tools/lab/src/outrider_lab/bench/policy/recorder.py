"""Makes the recording that replays are played from: what each kind of drafter proposes behind every token of real
outputs, and what rounds cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from adapters.contract import LoadedModel
from device_profiles.cost import StepCost
from device_profiles.measured import RoundOverhead
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.drafting.port import Ask, Drafter
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.rounds import RoundSample, fit_rounds
from orchestrator.worker.measuring.steps import measure_steps
from outrider_lab.bench.policy.drafters import KINDS, Drafters
from outrider_lab.bench.policy.runs import RoundFigures
from outrider_lab.replay.recorded import Costs, RecordedDraft, RecordedRequest

_DIGITS = 3
"""Confidences are kept with so many, so that a recording that is read again is what was played."""


def measure_replay_costs(
    model: LoadedModel, clock: Clock, told: Callable[[str, float], None], budget_s: float
) -> Costs:
    """Return what forwards cost, measured. Raises what forwards raise."""
    steps = measure_steps(model, clock, told, budget_s=budget_s)
    caps = model.capabilities
    paid = 1 if caps.apart_tokens else caps.min_rows  # the least rows of a forward are in the cost
    return Costs(steps.decode.cost, paid_rows=paid, widths=tuple(caps.static_widths), most_rows=caps.max_batch_rows)


def with_rounds(costs: Costs, plain: Sequence[RoundFigures], drafting: Sequence[RoundFigures]) -> Costs:
    """Return costs that hold what real rounds take beside their forwards, and what drafting takes of a sequence.
    `plain`: rounds that drafted nothing, `drafting`: rounds with a drafter that costs microseconds."""
    samples = [
        RoundSample(one.sequences, one.rows, one.context_tokens, one.ms - one.draft_ms, one.changed)
        for one in (*plain, *drafting)
    ]
    steady, _ = fit_rounds([one for one in samples if not one.changed], costs.forward)
    forward = with_overhead(costs.forward, steady)
    draft_ms, draft_sequence_ms = _drafting_ms(drafting)
    return replace(
        costs,
        forward=forward,
        change_ms=_change_ms(samples, forward),
        draft_ms=draft_ms,
        draft_sequence_ms=draft_sequence_ms,
    )


def _drafting_ms(rounds: Sequence[RoundFigures]) -> tuple[float, float]:
    """Return what drafting takes in a round, and of each sequence: a line through the medians by sequences. A round
    that asked for nothing takes next to nothing, and is not among them."""
    by_sequences: dict[int, list[float]] = {}
    for one in rounds:
        if one.drafted:
            by_sequences.setdefault(one.sequences, []).append(one.draft_ms)
    medians = {count: statistics.median(times) for count, times in by_sequences.items()}
    if len(medians) < 2:
        return 0.0, next((ms / count for count, ms in medians.items()), 0.0)
    slope, base = statistics.linear_regression(list(medians), list(medians.values()))
    return max(0.0, base), max(0.0, slope)


def _change_ms(samples: Sequence[RoundSample], cost: StepCost) -> float:
    """Return how much longer a round takes behind one of another number of rows; the same for all, as measured."""
    over_ms = [
        [one.ms - cost.ms(one.rows, one.sequences, one.context_tokens) for one in samples if one.changed == changed]
        for changed in (False, True)
    ]
    return max(0.0, statistics.median(over_ms[1]) - statistics.median(over_ms[0])) if all(over_ms) else 0.0


def with_overhead(cost: StepCost, overhead: RoundOverhead) -> StepCost:
    """Return what a whole round takes beside drafting: the forward, and what the loop takes around it."""
    times = [overhead.ms(1, rows) + ms for rows, ms in zip(cost.row_knots, cost.row_ms, strict=True)]
    return replace(cost, row_ms=tuple(times), sequence_ms=cost.sequence_ms + overhead.sequence_ms)


def record_drafts(
    submits: Iterable[Submit],
    outputs: Mapping[str, Sequence[int]],
    options: EngineOptions,
    target: LoadedSource,
    advanced: Callable[[], None],
) -> dict[str, list[RecordedRequest]]:
    """Return for each kind of drafter what it proposes along the outputs, one request after another, as a server with
    one request at a time would ask it. `advanced` hears of each request."""
    found: dict[str, list[RecordedRequest]] = {kind: [] for kind in KINDS}
    made = Drafters(options, target)
    drafters = {kind: made.of(kind) for kind in KINDS}
    for submit in submits:
        for kind, drafter in drafters.items():
            along = _along(drafter, submit, outputs.get(submit.request_id, ()), options.max_depth)
            found[kind] += [along] if along.drafts else []
        advanced()
    for drafter in drafters.values():
        drafter.close()
    return found


def _along(drafter: Drafter, submit: Submit, output: Sequence[int], most: int) -> RecordedRequest:
    """The first token comes with the prompt; what is recorded begins behind it."""
    key = submit.request_id
    drafter.begin(key, submit.prompt, submit.sampling)
    drafts = []
    for done, token in enumerate(output):
        drafter.extend(key, [token])
        left = output[done + 1 :]
        if left:
            draft = drafter.propose([Ask(key, most)])[0]
            right = next(
                (n for n, (one, other) in enumerate(zip(draft.tokens, left, strict=False)) if one != other), None
            )
            accepted = min(len(draft.tokens), len(left)) if right is None else right
            sure = tuple(round(confidence, _DIGITS) for confidence in draft.confidences)
            drafts.append(RecordedDraft(len(draft.tokens), sure, accepted))
    drafter.end(key, keep=True)
    return RecordedRequest(key, tuple(drafts), submit.route, len(submit.prompt) + 1)
