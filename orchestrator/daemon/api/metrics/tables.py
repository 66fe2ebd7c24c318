"""All metrics that are read of one thing: name, help, and how each is read. docs/metrics.md gives the formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final, Protocol

from device_profiles.device_load import DeviceLoad
from device_profiles.units import MS_PER_S
from orchestrator.daemon.api.batches.records import LIVE
from orchestrator.daemon.api.body_bounds import BodyBudget
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.metrics.request_timing import MOST_SAMPLES, WINDOW_S, Recent, RequestTotals, SequenceTiming
from orchestrator.daemon.api.metrics.series import Figures, Reading, counter, gauge, histogram
from orchestrator.daemon.control import port
from orchestrator.daemon.control.replicas.shortfall import count_out, list_wanted
from orchestrator.daemon.journal.standing import PROBLEM_KINDS, JournalView
from orchestrator.daemon.tracing.port import ExportCounts
from orchestrator.protocol.draft_messages import DrafterState, DraftLoad, RemoteState
from orchestrator.protocol.rounds import Gauges, RoundReport, SloState
from policies.serving.slo import SloAction

# Upper ends of histograms' buckets, part of the metrics' language.
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # as above
_TOKENS = tuple(float(2**power) for power in range(18))
_ROUND_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)  # as above
_FLIGHTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # as above


def count_generated(done: RoundReport) -> int:
    return sum(len(delta.tokens) for delta in done.deltas)


def _count_prompts(done: RoundReport) -> int:
    # A request's first delta is the one that makes all that was ever generated; a resumed one has more behind it.
    return sum(
        delta.stats.prompt_tokens
        for delta in done.deltas
        if delta.stats is not None and delta.tokens and delta.stats.generated == len(delta.tokens)
    )


def _number(values: Iterable[float]) -> Mapping[str, float]:
    return {str(number): value for number, value in enumerate(values)}


# A figure takes a line or two here, and five from the formatter.
# fmt: off
ROUND: Final[Figures[RoundReport]] = (
    counter("spec_decode_num_drafts", "Drafts verified, one a sequence and round.", lambda done: done.drafts),
    counter("spec_decode_num_draft_tokens", "Draft tokens verified.", lambda done: done.drafted),
    counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda done: done.accepted),
    counter("spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.",
            lambda done: _number(done.accepted_per_position), "position"),
    counter("acceptance_draft_tokens", "Draft tokens verified under a rule.",
            lambda done: {rule: drafted for rule, (drafted, _) in done.by_rule.items()}, "rule"),
    counter("acceptance_accepted_tokens", "Draft tokens a rule accepted.",
            lambda done: {rule: accepted for rule, (_, accepted) in done.by_rule.items()}, "rule"),
    counter("tolerated_tokens", "Tokens of output that only the tolerance accepted.", lambda done: done.tolerated),
    counter("prompt_tokens", "Prompt tokens of requests that got their first token.", _count_prompts),
    counter("generation_tokens", "Tokens generated.", count_generated),
    histogram("iteration_tokens_total", "Tokens of a round, prompts included.", _TOKENS,
            lambda done: count_generated(done) + _count_prompts(done)),
    histogram("round_seconds", "Time of a round.", _TOKEN_S, lambda done: done.round_ms / MS_PER_S),
    histogram("draft_latency_ms", "Drafting in a round that had a draft.", _ROUND_MS,
            lambda done: done.draft_ms if done.drafts else None),
    histogram("verifier_latency_ms", "The target's forward in a round.", _ROUND_MS, lambda done: done.device_ms),
    counter("target_stage_seconds", "Time that a stage of a sharded target worked.",
            lambda done: _number(worked_ms / MS_PER_S for worked_ms in done.stage_ms), "stage"),
    histogram("rounds_in_flight", "Rounds of a sharded target under way.", _FLIGHTS,
            lambda done: done.in_flight if done.stage_ms else None),
)
RECENT: Final[Figures[tuple[Recent, float]]] = (
    gauge("acceptance_rate", f"Accepted by drafted tokens, last {WINDOW_S:g} s.",
            lambda of: of[0].sum(of[1], 1) / drafted if (drafted := of[0].sum(of[1], 0)) else None),
    gauge("tokens_per_second", f"Tokens generated a second, last {WINDOW_S:g} s.", lambda of: of[0].rate(of[1], 2)),
)
"""Drafted, accepted and generated tokens of late, and the time. Where nothing was drafted there is no rate, and the
last one would be a lie."""
FIRST_TOKEN: Final[Figures[float]] = (
    histogram("time_to_first_token_seconds", "Time to the first token.", _LATENCY_S, float),
)
GAP: Final[Figures[float]] = (histogram("inter_token_latency_seconds", "Gap between two deltas.", _TOKEN_S, float),)


def _first_s(done: SequenceTiming, name: str) -> float | None:
    return getattr(done.first, name) / MS_PER_S if done.tokens and done.first is not None else None


SEQUENCE: Final[Figures[tuple[SequenceTiming, float]]] = (
    counter("request_success", "Requests by how they ended.", lambda of: {of[0].finish: 1}, "finished_reason"),
    histogram("request_time_per_output_token_seconds", "TPOT of a request.", _TOKEN_S,
            lambda of: of[0].tpot_s if of[0].tokens else None),
    histogram("e2e_request_latency_seconds", "Latency of a request.", _LATENCY_S,
            lambda of: of[0].last_s - of[1] if of[0].tokens else None),
    histogram("request_queue_time_seconds", "Time in the queue.", _LATENCY_S, lambda of: _first_s(of[0], "queue_ms")),
    histogram("request_prefill_time_seconds", "Time in prefill.", _LATENCY_S, lambda of: _first_s(of[0], "prefill_ms")),
    histogram("request_decode_time_seconds", "Time in decode.", _LATENCY_S,
            lambda of: of[0].last_s - of[0].first_s if of[0].tokens else None),
    histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS, lambda of: of[0].prompt_tokens),
    histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS, lambda of: of[0].tokens),
    histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS, lambda of: of[0].max_tokens),
)
"""Of a sequence that ended, and when its request came."""

WORKER: Final[Figures[Gauges]] = (
    gauge("num_requests_running", "Requests in the decode loop.", lambda now: now.running),
    gauge("num_requests_waiting", "Requests that wait for a place.", lambda now: now.waiting),
    gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
            lambda now: (now.total_blocks - now.free_blocks) / max(1, now.total_blocks)),
    gauge("low_acceptance", "Classes of requests whose drafts are accepted too rarely.",
            lambda now: Counter((warning.drafter, warning.cause.value) for warning in now.low_acceptance),
            "drafter", "cause"),
    gauge("tolerance_delta", "Nats that tolerance allows, once it is known.",
            lambda now: now.tolerance_deltas, "sampling"),
)
WORKER_COUNTS: Final[Figures[Gauges]] = (
    counter("num_preemptions", "Requests sent back to the queue.", lambda now: now.preemptions),
    counter("out_of_memory_forwards", "Forwards that ran out of memory.", lambda now: now.out_of_memory),
    counter("not_finite_requests", "Requests that ended for their logits.", lambda now: now.not_finite),
    counter("tolerance_recalibrations", "Tolerances learned anew as acceptance had drifted.",
            lambda now: now.tolerance_recalibrations),
    counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda now: now.prefix_queries),
    counter("prefix_cache_hits", "Tokens found in the prefix cache.", lambda now: now.prefix_hits),
    counter("prefix_cache_loaded", "Those of them that were read from disk.", lambda now: now.prefix_loaded),
)
LOSSES: Final[Figures[Mapping[str, int]]] = (
    counter("worker_losses", "Workers that were lost, by how.", lambda kinds: kinds, "kind"),
)
RESTARTS: Final[Figures[int]] = (counter("worker_restarts", "Restarts of the worker since the daemon started.", int),)
KV_MOVES: Final[Figures[port.KvMoveTotals]] = (
    counter("kv_moves", "Streams that were moved by plan, by what became of their KV.",
            lambda moves: {"pages": moves.pages, "recomputed": moves.recomputed}, "how"),
    counter("kv_moved_bytes", "Pages of KV caches that went along with streams.", lambda moves: moves.bytes),
    counter("kv_move_seconds", "Time that streams stood still while their KV went along.", lambda moves: moves.seconds),
)
CHANGED_GROUPS: Final[Figures[int]] = (
    counter("changed_groups", "Streams that a replica went on with, with other bits.", int),
)


def _has_statistics(drafter: DrafterState) -> bool:
    return drafter.method == "suffix" and bool(drafter.source)


DRAFTER: Final[Figures[DrafterState]] = (
    gauge("drafter_up", "1 while a drafter works, 0 when it has failed.", lambda drafter: drafter.state == "ok"),
    counter("drafter_draft_tokens", "Its tokens verified.", lambda drafter: drafter.drafted),
    counter("drafter_accepted_tokens", "Its tokens accepted.", lambda drafter: drafter.accepted),
    counter("drafter_statistics_draft_tokens", "Its tokens verified that statistics said.",
            lambda drafter: drafter.statistics_drafted if _has_statistics(drafter) else None),
    counter("drafter_statistics_accepted_tokens", "Its tokens accepted that statistics said.",
            lambda drafter: drafter.statistics_accepted if _has_statistics(drafter) else None),
    counter("drafter_rounds", "Rounds in which it drafted.", lambda drafter: drafter.rounds),
    counter("drafter_seconds", "Time that its drafting took.", lambda drafter: drafter.draft_ms / MS_PER_S),
)
REMOTE_DRAFTER: Final[Figures[RemoteState]] = (
    counter("drafter_asks", "Rounds that asked it for drafts.", lambda remote: remote.asks),
    counter("drafter_late_answers", "Answers after the round had gone on.", lambda remote: remote.late),
    counter("drafter_connections", "Times it was connected.", lambda remote: remote.connections),
    counter("drafter_ahead_hits", "Drafts there before they were asked for.", lambda remote: remote.ahead_hits),
    counter("drafter_ahead_misses", "Drafts that were not there yet.", lambda remote: remote.ahead_misses),
    counter("drafter_link_sent_bytes", "Bytes sent to it over its link.", lambda remote: remote.sent_bytes),
    counter("drafter_link_received_bytes", "Bytes that came from it over its link.",
            lambda remote: remote.received_bytes),
    gauge("drafter_link_rtt_seconds", "Its link's round trip, measured on it.",
            lambda remote: remote.rtt_ms / MS_PER_S),
)
DRAFT_WORKER: Final[Figures[DraftLoad]] = (
    gauge("draft_worker_busy", "Share of the time that its model ran.", lambda load: load.busy),
    gauge("draft_worker_targets", "Replicas that are connected to it.", lambda load: load.targets),
)
DRAFT_RESTARTS: Final[Figures[int]] = (counter("draft_worker_restarts", "Restarts of a draft worker.", int),)
MEMORY: Final[Figures[tuple[int, int]]] = (
    gauge("planned_memory_bytes", "What a worker was announced to hold at its peak.", lambda held: held[0] or None),
    gauge("peak_memory_bytes", "The most host memory that a worker's process held.", lambda held: held[1] or None),
)


def _measure_misprediction(plan: port.PlanView) -> float:
    known = [ratio for ratio in (plan.ratio, *plan.corrections) if ratio > 0.0]
    return max((max(ratio, 1.0 / ratio) for ratio in known), default=1.0)


PLAN: Final[Figures[port.PlanView]] = (
    gauge("plan_predicted_tokens_per_second", "Output tokens a second that it predicts.",
            lambda plan: plan.predicted_tokens_per_s),
    gauge("plan_measured_tokens_per_second", "Output tokens a second of rounds that decode.",
            lambda plan: plan.measured_tokens_per_s),
    gauge("plan_drift_ratio", "Measured by predicted time of rounds, a running mean.", lambda plan: plan.ratio),
    gauge("plan_misprediction_factor", "The drift ratio or a correction, or 1 by it, where above 1.",
            _measure_misprediction),
    counter("plan_moves", "Times that workers were replaced for another plan.", lambda plan: plan.moves),
    gauge("plan_predicted_cost_per_million_tokens", "Cost of a million output tokens that it predicts.",
            lambda plan: {plan.currency: cost} if (cost := plan.predicted_cost_per_million_tokens) else None,
            "currency"),
    gauge("plan_predicted_joules_per_token", "Energy of an output token that it predicts.",
            lambda plan: plan.predicted_joules_per_token or None),
)
SCALE: Final[Figures[port.ScaleView]] = (
    gauge("replicas_wanted", "Replicas that load asks for.", lambda scaling: scaling.wanted),
)
RESIDENCY: Final[Figures[port.ResidencyView]] = (
    gauge("model_state", "1 for the state that a model is in.", lambda now: {now.state: 1}, "state"),
    gauge("model_waiting_requests", "Requests that wait for their model to be loaded.", lambda now: now.waiting),
    gauge("model_load_seconds", "Time of the last load of a model that requests load.",
            lambda now: now.load_s if now.loads else None),
    counter("model_loads", "Loads of a model that requests load.", lambda now: now.loads),
    counter("model_failed_loads", "Loads of such a model that came to nothing.", lambda now: now.failed_loads),
    counter("model_unloads", "Times that such a model was unloaded.", lambda now: now.unloads, "why"),
)
HEALTH: Final[Figures[port.StateView]] = (
    gauge("part_health", "1 for the state that a part is in.",
            lambda view: {(part.kind, part.name, part.state): 1 for part in view.health}, "kind", "name", "state"),
    gauge("replicas_planned", "Replicas that are to serve.", lambda view: len(list_wanted(view))),
    gauge("replicas_ready", "Replicas that serve.",
            lambda view: sum(replica.phase == "ready" for replica in list_wanted(view))),
    gauge("replicas_failed", "Planned replicas that do not serve, and will not soon.", count_out, "reason"),
    gauge("standbys", "Standbys that are loaded and do not serve.",
            lambda view: sum(replica.phase == "ready" for replica in view.standbys)),
    counter("standby_takeovers", "Times a standby took the target's place.", lambda view: view.taken_over, "bits"),
)


def _read_memory(load: DeviceLoad) -> Reading:
    total = load.memory_total_bytes
    return {"used": total - load.memory_free_bytes, "ours": load.memory_ours_bytes, "total": total} if total else None


def _read_shares(load: DeviceLoad) -> Reading:
    if load.utilisation is None or load.others is None:
        return None
    return {"ours": load.ours or 0.0, "others": load.others, "idle": max(0.0, 1.0 - load.utilisation)}


def _has_faults(load: DeviceLoad) -> bool:
    return load.memory_errors is not None or bool(load.fault)


DEVICE: Final[Figures[DeviceLoad]] = (
    gauge("device_utilisation", "Share of a device's time that is used, a moving mean.", lambda load: load.utilisation),
    gauge("device_time_share", "Share of a device's time, by whose it is, a moving mean.", _read_shares, "of"),
    gauge("device_memory_bytes", "Memory of a device, by what it is.", _read_memory, "kind"),
    gauge("device_temperature_celsius", "Temperature of a device.", lambda load: load.temperature_c),
    gauge("device_temperature_limit_celsius", "Temperature at which a device makes itself slower.",
            lambda load: load.temperature_limit_c),
    gauge("device_power_watts", "Power that a device takes.", lambda load: load.power_w),
    gauge("device_power_limit_watts", "Power that a device may take.", lambda load: load.power_limit_w),
    gauge("device_queue_depth", "Requests that wait for workers on a device, a mean.", lambda load: load.queue_depth),
    gauge("device_memory_errors", "Errors of a device's memory that could not be corrected.",
            lambda load: load.memory_errors),
    gauge("device_fault", "1 while a device says that it does not work.",
            lambda load: {"lost": bool(load.fault), "memory": bool(load.memory_errors)} if _has_faults(load) else None,
            "what"),
    gauge("device_slowed", "1 while a device lowers its clocks.",
            lambda load: bool(load.slowed_by) if _has_faults(load) else None),
)
DRAFT_STORE: Final[Figures[port.DraftStoreView]] = (
    gauge("draft_store_up", "1 while the draft store works, 0 while it counts as away.",
            lambda store: store.state == "ok"),
    gauge("draft_store_waiting", "Answers that wait to be written.", lambda store: store.waiting),
    counter("draft_store_lookups", "Lookups by how they went.",
            lambda store: {"hit": store.hits, "miss": store.misses, "late": store.late, "skipped": store.skipped},
            "outcome"),
    counter("draft_store_writes", "Answers by what became of them.",
            lambda store: {"written": store.written, "dropped": store.dropped}, "outcome"),
    counter("draft_store_errors", "Failures of the store.",
            lambda store: {"failed": store.errors, "damaged": store.damaged}, "kind"),
    counter("draft_store_bytes", "Bytes of values.",
            lambda store: {"read": store.read_bytes, "written": store.written_bytes}, "direction"),
)
RECENT_OUTPUTS: Final[Figures[port.RecentOutputsView]] = (
    gauge("recent_outputs_tokens", "Tokens of users' last answers that are remembered.", lambda recent: recent.tokens),
    counter("recent_outputs_requests", "Requests that got some of them.", lambda recent: recent.given),
)
CONNECTIONS: Final[Figures[Connections]] = (
    gauge("api_connections", "Connections by whether they are idle.",
            lambda all_there: {"idle": all_there.idle, "busy": len(all_there) - all_there.idle}, "state"),
    counter("api_connections_closed", "Connections that were ended, by the reason.", lambda all_there: all_there.closed,
            "reason"),
)
BODIES: Final[Figures[BodyBudget]] = (
    gauge("api_body_bytes", "Bytes of bodies that are read or translated.", lambda bodies: bodies.held),
    counter("api_bodies_refused", "Bodies beyond the budget of bytes.", lambda bodies: bodies.refused),
)


class BatchCounts(Protocol):
    """What is told of batches: lines of this daemon by how they ended, and the records."""

    line_counts: dict[str, int]
    store: Any


def _count_batches(batches: BatchCounts) -> Mapping[str, int]:
    now = Counter(batch.status for batch in batches.store.batches.values())
    return {status: now[status] for status in sorted(LIVE)}


BATCHES: Final[Figures[BatchCounts]] = (
    gauge("batches", "Batches that have not ended, by their status.", _count_batches, "status"),
    counter("batch_lines", "Lines of batches, by how they ended.", lambda batches: batches.line_counts, "outcome"),
    gauge("batch_file_bytes", "Bytes of the files of batches on the disk.", lambda batches: batches.store.used_bytes),
)
JOURNAL: Final[Figures[JournalView]] = (
    gauge("journal_answers", "Answers that may be resumed.", lambda journal: journal.answers),
    gauge("journal_reserve_bytes", "Bytes of the disk that are to be allocated ahead.",
            lambda journal: journal.reserve_bytes),
    gauge("journal_allocated_bytes", "Bytes of the disk that are.", lambda journal: journal.allocated_bytes),
    gauge("journal_problems", "1 while it cannot keep something, or may not.",
            lambda journal: {kind: any(problem.kind == kind for problem in journal.problems) for kind in PROBLEM_KINDS},
            "kind"),
)
TRACES: Final[Figures[ExportCounts]] = (
    counter("trace_spans", "Spans by what became of them.", ExportCounts._asdict, "outcome"),
)

VARIANT: Final[Figures[RequestTotals]] = (
    counter("arm_requests", "Requests that ended, by variant.", lambda _: 1),
    counter("arm_draft_tokens", "Draft tokens verified, by variant.", lambda done: done.drafted),
    counter("arm_accepted_tokens", "Draft tokens accepted, by variant.", lambda done: done.accepted),
    counter("arm_generation_tokens", "Tokens generated, by variant.", lambda done: done.tokens),
    counter("arm_tolerated_tokens", "Tokens only the tolerance accepted, by variant.", lambda done: done.tolerated),
    histogram("arm_time_to_first_token_seconds", "TTFT, by variant.", _LATENCY_S, lambda done: done.ttft_s),
    histogram("arm_request_time_per_output_token_seconds", "TPOT, by variant.", _TOKEN_S, lambda done: done.tpot_s),
)


def _read_variants(view: port.TrialView, name: str) -> Reading:
    known = {variant: getattr(figures, name) for variant, figures in view.arms.items()}
    return {
        (variant, at): value
        for variant, moments in known.items()
        for at, value in zip(("mean", "low", "high"), (moments.mean, *moments.interval), strict=True)
        if moments.seen and isfinite(value)
    }


TRIALS: Final[Figures[port.TrialView]] = (
    gauge("arm_ttft_ms", "Mean TTFT of the trial, and its 95 % interval.", lambda view: _read_variants(view, "ttft_ms"),
            "arm", "at"),
    gauge("arm_tpot_ms", "Mean TPOT of the trial, and its 95 % interval.", lambda view: _read_variants(view, "tpot_ms"),
            "arm", "at"),
    gauge("arm_acceptance_rate", "Mean acceptance of requests, and its interval.",
            lambda view: _read_variants(view, "acceptance"), "arm", "at"),
    gauge("arm_agreement", "Mean share of tokens that are the target's own choice.",
            lambda view: _read_variants(view, "agreement"), "arm", "at"),
    gauge("canary_share", "Share of the requests that the canary gets now.", lambda view: view.effective_share),
    gauge("canary_phase", "1 for the phase that the canary is in.",
            lambda view: {name: view.phase == name for name in (port.TRIAL, port.PROMOTED, port.ROLLED_BACK)}, "phase"),
)


def _name_percentiles(percentiles: Mapping[str, Mapping[int, float]], name: str) -> Mapping[str, float]:
    return {str(percentile): seconds for percentile, seconds in percentiles.get(name, {}).items()}


PERCENTILES: Final[Figures[Mapping[str, Mapping[int, float]]]] = (
    gauge("recent_ttft_seconds", f"Percentiles of the TTFT of the last {MOST_SAMPLES} sequences.",
            lambda of: _name_percentiles(of, "ttft"), "percentile"),
    gauge("recent_tpot_seconds", f"Percentiles of the TPOT of the last {MOST_SAMPLES} sequences.",
            lambda of: _name_percentiles(of, "tpot"), "percentile"),
)
SLO: Final[Figures[SloState]] = (
    gauge("slo_lever", "1 while an action is taken for an objective.",
            lambda slo: {lever: lever in slo.levers for lever in SloAction if lever is not SloAction.NOTHING},
            "lever"),
    gauge("slo_row_price", "By how much a draft's row is priced higher.", lambda slo: slo.row_price),
    gauge("slo_prefill_share", "Share of the default bound of prefill.", lambda slo: slo.prefill_share),
    gauge("slo_max_running", "Requests that may run at a time.", lambda slo: slo.max_running),
)
VERDICTS: Final[Figures[Mapping[str, bool | None]]] = (
    counter("slo_requests_met", "Requests that met an objective.",
            lambda verdicts: {name: good is True for name, good in verdicts.items()}, "objective"),
    counter("slo_requests_missed", "Requests that missed an objective.",
            lambda verdicts: {name: good is False for name, good in verdicts.items()}, "objective"),
    counter("slo_requests_judged", "Requests that met or missed it.",
            lambda verdicts: {name: good is not None for name, good in verdicts.items()}, "objective"),
)
"""Of a request that ended: whether it met each objective; None: it is not counted, and there is a series."""
