"""The same metrics once more under vLLM's own names, for the dashboards and load generators that look for them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

OURS = "outrider_"
THEIRS = "vllm:"
# What vLLM has no name for.
ONLY_OURS = frozenset(
    f"{OURS}{name}"
    for name in [
        "class_changes",
        "draft_store_bytes",
        "draft_store_errors",
        "draft_store_lookups",
        "draft_store_up",
        "draft_store_waiting",
        "draft_store_writes",
        "drafter_saved_seconds",
        "drafter_usual_acceptance_rate",
        "effective_state_differs",
        "journal_allocated_bytes",
        "journal_answers",
        "journal_problems",
        "journal_reserve_bytes",
        "plan_misprediction_factor",
        "quarantined_requests",
        "replicas_failed",
        "replicas_planned",
        "slo_error_budget",
        "slo_requests_judged",
        "speculation_plain_seconds",
        "speculation_seconds",
        "trace_spans",
        "acceptance_rate",
        "api_bodies_refused",
        "api_body_bytes",
        "api_connections",
        "api_connections_closed",
        "tokens_per_second",
        "draft_latency_ms",
        "verifier_latency_ms",
        "device_memory_bytes",
        "device_power_limit_watts",
        "device_power_watts",
        "device_queue_depth",
        "device_temperature_celsius",
        "device_temperature_limit_celsius",
        "device_time_share",
        "device_utilisation",
        "part_health",
        "plan_drift_ratio",
        "plan_measured_tokens_per_second",
        "plan_moves",
        "plan_predicted_cost_per_million_tokens",
        "plan_predicted_joules_per_token",
        "plan_predicted_tokens_per_second",
        "price_per_hour",
        "spent",
        "cost_per_million_tokens",
        "recent_tpot_seconds",
        "recent_ttft_seconds",
        "round_seconds",
        "kv_move_seconds",
        "kv_moved_bytes",
        "kv_moves",
        "standby_takeovers",
        "standbys",
        "worker_losses",
        "worker_restarts",
        "planned_memory_bytes",
        "peak_memory_bytes",
        "acceptance_draft_tokens",
        "acceptance_accepted_tokens",
        "tolerance_delta",
        "tolerance_recalibrations",
        "low_acceptance",
        "goodput_requests_per_second",
        "slo_latency_seconds",
        "slo_lever",
        "slo_max_running",
        "slo_objective_seconds",
        "slo_prefill_share",
        "slo_requests_met",
        "slo_requests_missed",
        "slo_row_price",
        "drafter_up",
        "drafter_draft_tokens",
        "drafter_accepted_tokens",
        "drafter_rounds",
        "drafter_seconds",
        "drafter_asks",
        "drafter_late_answers",
        "drafter_connections",
        "drafter_ahead_hits",
        "drafter_ahead_misses",
        "draft_worker_restarts",
        "arm_requests",
        "arm_draft_tokens",
        "arm_accepted_tokens",
        "arm_time_to_first_token_seconds",
        "arm_request_time_per_output_token_seconds",
        "arm_ttft_ms",
        "arm_tpot_ms",
        "arm_acceptance_rate",
        "canary_share",
        "canary_phase",
    ]
)


class VllmNames(Collector):
    """Collects what another registry holds, renamed."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the families that vLLM has too."""
        for family in self._source.collect():
            if family.name not in ONLY_OURS:
                yield _rename_family(family)


def _rename_family(family: Metric) -> Metric:
    renamed = Metric(_theirs(family.name), family.documentation, family.type)
    renamed.samples = [sample._replace(name=_theirs(sample.name)) for sample in family.samples]
    return renamed


def _theirs(name: str) -> str:
    return THEIRS + name.removeprefix(OURS)
