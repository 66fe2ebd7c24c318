"""A plan for people: what runs where, what is predicted, why the alternatives were not chosen, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from device_profiles.units import human_bytes
from orchestrator.cli.pool_table import print_pool
from orchestrator.plain_table import print_table, wide_console
from orchestrator.planning.basis import basis, describe_pool, list_doubtful_profiles, list_estimates

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.planning.proposal import PlanProposal
    from policies.planning.plan import (
        Objective,
        Plan,
        PlanDiff,
        Prediction,
        RejectedCandidate,
        ReplicaPlacement,
        Shard,
    )

_MOST_REJECTED = 40  # what a person reads. Not tuned.
_SELDOM_ASKED = "; the draft runs ahead of its link, so only drafts that it did not foresee pay for the way"


def print_proposal(proposal: PlanProposal, running: Sequence[str] = (), *, explain: bool, model: str = "") -> None:
    """Print a plan; with everything behind it where `explain`. `model`: whose it is, where there are several.
    `running`: what the daemon's own plan rests on, in a line each."""
    console = wide_console()
    if model:
        console.print(f"model {model}", markup=False)
    plan = proposal.plan
    _print_placements(console, proposal)
    _print_predictions(plan)
    for reason in plan.reasons:
        console.print(reason, markup=False)
    if explain:
        print_pool(describe_pool(proposal))
        _print_scores(plan)
        _print_rejected(console, plan)
        _print_basis(console, proposal)
    for line in _next_steps(proposal, explain=explain):
        console.print(line, markup=False)
    if running:
        console.print(f"the plan that runs: {'; '.join(running)}", markup=False)


def print_diff(diff: PlanDiff, before: str, after: str, currency: str) -> None:
    console = wide_console()
    if not diff.changes:
        console.print("nothing would change", markup=False)
    else:
        rows = [
            (change.part, change.before or "-", change.after or "-", "starts anew" if change.restart else "stays")
            for change in diff.changes
        ]
        print_table(("what", "before", "after", "worker"), rows, title=f"{before} -> {after}")
    gain = f" ({diff.gain:+.0%})" if diff.before_tokens_per_s else ""
    console.print(
        f"predicted {diff.before_tokens_per_s:.1f} -> {diff.after_tokens_per_s:.1f} tokens/s{gain}", markup=False
    )
    for key, unit in (
        ("cost_per_million_tokens", f"{currency} a million tokens"),
        ("joules_per_token", "J a token"),
    ):
        values = [getattr(diff, f"{side}_{key}") for side in ("before", "after")]
        if any(values):
            figures = " -> ".join(f"{value:.3g}" if value else "not known" for value in values)
            console.print(f"predicted {figures} {unit}", markup=False)


def print_library() -> None:
    """Print the devices that a sketch may name; all figures are from datasheets."""
    from device_profiles.known_devices import load_known_devices

    rows = []
    for sheet in load_known_devices().values():
        rates = ", ".join(f"{precision} {figure.value:g}" for precision, figure in sheet.matmul_tflops.items())
        cells = (f"{figure.value:g}" if figure else "-" for figure in (sheet.memory_gb, sheet.bandwidth_gb_per_s))
        rows.append((sheet.name, sheet.full_name, *cells, rates, f"{sheet.power_w.value:g}" if sheet.power_w else "-"))
    columns = ("device", "what it is", "memory GB", "GB/s", "TFLOP/s", "W")
    print_table(columns, rows, title="known devices (from datasheets, not measured)")


def _print_placements(console: Console, proposal: PlanProposal) -> None:
    rows = []
    several = len(proposal.plan.replicas) > 1
    for number, replica in enumerate(proposal.plan.replicas):
        name = f" {number}" if several else ""
        rows += [(f"{role}{name}", *_shard_cells(shard)) for role, shard in _roles(replica)]
        if replica.draft is None or not replica.depth:
            better = f"plain decoding is predicted to be better for {proposal.plan.objective}"
            rows.append((f"drafts{name}", f"none: {proposal.request.no_drafts or better}", *[""] * 5))
        elif replica.draft.shard is None:
            rows.append((f"drafts{name}", f"{replica.draft.drafter}, in the target's worker", *[""] * 5))
    standby = proposal.plan.standby
    rows += [("standby", *_shard_cells(shard)) for shard in (standby.shards if standby else ())]
    columns = ("role", "device", "runtime, weights", "layers", "threads", "memory", "costs")
    print_table(columns, rows, title=f"plan for {proposal.plan.target}")
    if standby:
        console.print(f"standby: {standby.why}", markup=False)


def _roles(replica: ReplicaPlacement) -> Iterator[tuple[str, Shard]]:
    several = len(replica.shards) > 1
    for number, shard in enumerate(replica.shards):
        yield (f"target shard {number}" if several else "target"), shard
    if replica.draft is not None and replica.draft.shard is not None:
        beside = "beside the target" if replica.draft.overlap else "between its forwards"
        yield f"draft {replica.draft.drafter}, {beside}", replica.draft.shard


def _shard_cells(shard: Shard) -> tuple[str, ...]:
    cores = f" on cores {_cores(shard.cores)}" if shard.cores else ""
    return (
        shard.device,
        f"{shard.runtime}, {shard.weights}",
        f"{shard.first_layer}-{shard.end_layer - 1}",
        f"{shard.threads or '-'}{cores}",
        human_bytes(shard.memory.total),
        shard.source,
    )


def _cores(cores: tuple[int, ...]) -> str:
    return f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])


def _print_predictions(plan: Plan) -> None:
    rows, several = [], len(plan.replicas) > 1
    for number, replica in enumerate(plan.replicas):
        name = f"replica {number}: " if several else ""
        if several:
            rows.append((f"{name}share", _describe_share(replica.prediction, plan)))
        rows += [(f"{name}{key}", value) for key, value in _prediction_rows(replica.prediction, plan.currency)]
    if several:
        taken = _describe_taken(plan.cost_per_million_tokens, plan.joules_per_token, plan.currency)
        pool = plan.pool
        late = f"95 % of requests: TPOT {pool.tpot_p95_ms:.1f} ms or less, first token in {pool.ttft_p95_ms:.0f} ms"
        rows.append(("all replicas", ", ".join([f"{pool.goodput_tokens_per_s:.1f} tokens/s", late, *taken])))
    print_table((), rows, title=f"predicted; the best for {plan.objective}")


def _describe_share(prediction: Prediction, plan: Plan) -> str:
    requests = sum(replica.prediction.requests or 0 for replica in plan.replicas)
    if not prediction.requests:
        return f"none of {requests} requests: others end them sooner"
    tokens = prediction.goodput_tokens_per_s / plan.goodput_tokens_per_s
    waits = f", each of which waits {prediction.wait_ms:.0f} ms for a place" if prediction.wait_ms else ""
    return f"{prediction.requests} of {requests} requests at once{waits}, {tokens:.0%} of the tokens"


def _describe_taken(cost: float, joules: float, currency: str) -> list[str]:
    parts = [f"{cost:.3g} {currency} a million tokens"] if cost else []
    return [*parts, *([f"{joules:.3g} J a token"] if joules else [])]


def _prediction_rows(prediction: Prediction, currency: str) -> Iterator[tuple[str, str]]:
    error = f" ± {prediction.error:.0%}" if prediction.error else ""
    at_once = f"prefill included, {prediction.sequences} at once"
    yield "goodput", f"{prediction.goodput_tokens_per_s:.1f} tokens/s{error}, {at_once}"
    yield "each stream", f"{prediction.stream_tokens_per_s:.1f} tokens/s, TPOT {prediction.tpot_ms:.1f} ms"
    way = f", {prediction.client_ms:.1f} of it on the way from the API to the target and back"
    way = f"{way}; the tokens behind it come at the target's pace" if prediction.client_ms else ""
    yield "time to first token", f"{prediction.ttft_ms:.0f} ms{way}"
    gain = prediction.goodput_tokens_per_s / prediction.plain_tokens_per_s if prediction.plain_tokens_per_s else 1.0
    yield (
        "depth at the start",
        f"{prediction.depth}; {gain:.2f} x plain decoding ({prediction.plain_tokens_per_s:.1f} tokens/s)",
    )
    yield (
        "a round",
        (
            f"{prediction.round_ms:.2f} ms for {prediction.tokens_per_round:.2f} tokens a sequence: "
            f"verify {prediction.verify_ms:.2f}, draft {prediction.draft_ms:.2f}, link {prediction.link_ms:.2f}, "
            f"prefill {prediction.prefill_ms:.2f}{_SELDOM_ASKED if prediction.link_ms else ''}"
        ),
    )
    cost, joules = prediction.cost_per_million_tokens, prediction.joules_per_token
    yield "cost", "".join(_describe_taken(cost, 0.0, currency)) or "not known: no price"
    yield "energy", "".join(_describe_taken(0.0, joules, currency)) or "not known: no power"


def _print_scores(plan: Plan) -> None:
    for number, replica in enumerate(plan.replicas):
        rows = [(term.name, f"{term.value:.2f}", f"{term.weight:g}", term.why) for term in replica.score.terms]
        title = f"score of replica {number}: {replica.score.total:.2f} of 1"
        print_table(("term", "value", "weight", "why"), rows, title=title)


def _print_rejected(console: Console, plan: Plan) -> None:
    fields = {
        "tokens/s": "goodput_tokens_per_s",
        f"{plan.currency} a million": "cost_per_million_tokens",
        "J a token": "joules_per_token",
    }
    known = {name: key for name, key in fields.items() if any(getattr(candidate, key) for candidate in plan.rejected)}
    ordered = sorted(plan.rejected, key=lambda candidate: (-_weigh(candidate, plan.objective), candidate.what))
    rows = []
    for candidate in ordered[:_MOST_REJECTED]:
        cells = [f"{value:.3g}" if (value := getattr(candidate, key)) else "" for key in known.values()]
        rows.append((candidate.what, str(candidate.role), *cells, candidate.why))
    title = f"alternatives not chosen, the best for {plan.objective} first"
    print_table(("what", "role", *known, "why"), rows, title=title)
    if len(ordered) > _MOST_REJECTED:
        console.print(f"and {len(ordered) - _MOST_REJECTED} more: --json has all of them", markup=False)


def _weigh(candidate: RejectedCandidate, objective: Objective) -> float:
    """Return what orders the alternatives by the objective: more is better, 0 where nothing was predicted."""
    keys = {"latency": "tpot_ms", "cost": "cost_per_million_tokens", "energy": "joules_per_token"}
    if objective not in keys:
        return candidate.goodput_tokens_per_s
    burden: float = getattr(candidate, keys[objective])
    return 1.0 / burden if burden else 0.0


def _print_basis(console: Console, proposal: PlanProposal) -> None:
    for part in basis(proposal):
        console.print(f"{part.device}: {part.source}", markup=False)
        for line in part.figures:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    for line in proposal.assumed:
        console.print(f"assumed: {line}", markup=False)


def _next_steps(proposal: PlanProposal, *, explain: bool) -> Iterator[str]:
    estimated = sorted({shard.device for shard in proposal.plan.shards if shard.source == "datasheet"})
    if estimated:
        yield (
            f"{', '.join(estimated)}: estimated from datasheets, not measured. Run `outrider profile` on such a "
            "machine, and plan again with its profiles (--profiles DIR)."
        )
    later = (
        f"`outrider serve` measures it at its start, within `placement.profile_budget_s` "
        f"({proposal.request.placement.profile_budget_s:g} s), or later while nobody asks; "
        "`outrider profile` does it now"
    )
    yield from (f"{line}: {later}." for line in list_estimates(proposal))
    yield from (f"{line}: run `outrider profile` to measure it again." for line in list_doubtful_profiles(proposal))
    if proposal.request.canary:
        beside = [draft.describe_reserve(proposal.request.most_replicas) for draft in proposal.request.beside]
        yield "; ".join(["the canary is not planned: all figures are of the other requests", *beside])
    if not explain:
        yield f"{len(proposal.plan.rejected)} alternatives were not chosen: --explain says why."
