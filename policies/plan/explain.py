"""A plan in plain English: what was chosen, with which figures, and why everything else lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from device_profiles.units import human_bytes
from policies.plan.diff import PlanDiff
from policies.plan.result import Plan, RejectedCandidate, Replica, Shard

MOST_REJECTED = 20
"""How many rejected candidates are told of unless more are asked for."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an explanation. `topic`: what it belongs to ("target", "draft", "prediction", "memory", "score",
    "standby", "rejected"...); lines of one topic follow each other."""

    topic: str
    text: str


def explain(plan: Plan, most_rejected: int = MOST_REJECTED) -> list[Line]:
    """Return the explanation of a plan, line by line. Of what was rejected come first what was predicted, the fastest
    first, then everything else, those with one reason together."""
    lines = []
    several = len(plan.replicas) > 1
    for number, replica in enumerate(plan.replicas, 1):
        lead = f"replica {number} " if several else ""
        lines += [Line(f"{lead}{topic}", text) for topic, text in _replica(plan.target, replica)]
    if several:
        lines.append(
            Line("replicas", f"{plan.goodput_tokens_per_s:.1f} tokens/s predicted of all {len(plan.replicas)}")
        )
    for device, used in sorted(plan.memory_by_device().items()):
        lines.append(Line("memory", f"{device}: {human_bytes(used)} in all"))
    if plan.standby is not None:
        where = "; ".join(_shard(shard) for shard in plan.standby.shards)
        lines.append(Line("standby", f"{where}: {plan.standby.why}"))
    lines += [Line("reason", reason) for reason in plan.reasons]
    return lines + [Line("rejected", text) for text in _rejected(plan, most_rejected)]


def explain_diff(change: PlanDiff) -> list[Line]:
    """Return what would change, line by line."""
    lines = [Line(one.part, _changed(one.before, one.after, restart=one.restart)) for one in change.changes]
    gain = f"{change.gain:+.1%}" if change.before_tokens_per_s else "from nothing"
    figures = f"{change.before_tokens_per_s:.1f} -> {change.after_tokens_per_s:.1f} tokens/s predicted ({gain})"
    return [*(lines or [Line("plan", "the same")]), Line("prediction", figures)]


def _changed(before: str, after: str, *, restart: bool) -> str:
    how = "" if not restart else "; its worker starts anew"
    return f"{before or 'nothing'} -> {after or 'nothing'}{how}"


def _replica(model: str, replica: Replica) -> Iterator[tuple[str, str]]:
    for shard in replica.shards:
        yield "target", f"{model}: {_shard(shard)}"
    yield "draft", _draft(replica)
    one = replica.prediction
    yield (
        "prediction",
        f"{one.goodput_tokens_per_s:.1f} tokens/s ({one.stream_tokens_per_s:.1f} for each of {one.sequences} streams), "
        f"{one.tpot_ms:.1f} ms per output token, first token after {one.ttft_ms:.0f} ms",
    )
    pieces = f" in {one.micro_batches} micro-batches" if one.micro_batches > 1 else ""
    yield (
        "prediction",
        f"a round{pieces} takes {one.round_ms:.2f} ms (verification {one.verify_ms:.2f}, drafting {one.draft_ms:.2f}, "
        f"link {one.link_ms:.2f}, share of prefill {one.prefill_ms:.2f}) and yields {one.tokens_per_round:.2f} tokens "
        "a stream",
    )
    error = f"; the cost fits are {one.error:.0%} off in the median" if one.error else ""
    sources = sorted({shard.source for shard in replica.shards})
    yield "prediction", f"from {' and '.join(sources)} figures{error}; loading takes {replica.load_s:.1f} s"
    if one.joules_per_token:
        yield "prediction", f"{one.joules_per_token:.3g} J for a token, all devices under load"
    for shard in (*replica.shards, *([replica.draft.shard] if replica.draft and replica.draft.shard else [])):
        parts = shard.memory
        yield (
            "memory",
            f"{shard.device}: weights {human_bytes(parts.weights)}, KV cache {human_bytes(parts.kv_cache)}, workspace "
            f"{human_bytes(parts.workspace)}, process and runtime {human_bytes(parts.fixed)}",
        )
    yield "score", f"{replica.score.total:.3f} of 1"
    for term in replica.score.terms:
        yield "score", f"{term.name} {term.value:.2f} (weight {term.weight:g}): {term.why}"


def _draft(replica: Replica) -> str:
    one, draft = replica.prediction, replica.draft
    plain = one.plain_tokens_per_s
    if draft is None:
        return f"none, depth 0: not speculating is predicted fastest, {plain:.1f} tokens/s"
    where = f": {_shard(draft.shard)}" if draft.shard is not None else ", in the target's worker"
    beside = ", while the target verifies" if draft.overlap else ""
    gain = one.goodput_tokens_per_s / plain
    start = f"starts at depth {replica.depth}: {gain:.2f} times the {plain:.1f} tokens/s without"
    return f"{draft.drafter}{where}{beside}; {start}"


def _shard(shard: Shard) -> str:
    layers = f"layers {shard.first_layer} to {shard.end_layer - 1}"
    cores = f", cores {_cores(shard.cores)}" if shard.cores else ""
    how = f"{shard.runtime}, weights {shard.weights}{cores}"
    return f"{layers} on {shard.device}, {how}, {shard.stage_ms:.2f} ms a forward"


def _cores(cores: tuple[int, ...]) -> str:
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]} to {cores[-1]}"


def _rejected(plan: Plan, most: int) -> Iterator[str]:
    predicted = sorted(
        (one for one in plan.rejected if one.goodput_tokens_per_s),
        key=lambda one: (-one.goodput_tokens_per_s, one.what),
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for one in plan.rejected:
        if not one.goodput_tokens_per_s:
            groups.setdefault((one.role, one.why), []).append(one.what)
    lines = [_told(one) for one in predicted]
    lines += [f"{_names(names)}{f' as {role}' if role else ''}: {why}" for (role, why), names in sorted(groups.items())]
    yield from lines[:most]
    if len(lines) > most:
        yield f"and {len(lines) - most} more"


def _told(one: RejectedCandidate) -> str:
    role = f" as {one.role}" if one.role in ("target", "draft") else ""
    return f"{one.what}{role}: {one.why}"


def _names(names: list[str]) -> str:
    ordered = sorted(set(names))
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
