"""The same metrics once more under vLLM's own names, for the dashboards and load generators that look for them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

OURS = "outrider_"
THEIRS = "vllm:"
# What vLLM has no name for.
ONLY_OURS = frozenset(
    {
        "outrider_class_changes",
        "outrider_draft_store_bytes",
        "outrider_draft_store_errors",
        "outrider_draft_store_lookups",
        "outrider_draft_store_up",
        "outrider_draft_store_waiting",
        "outrider_draft_store_writes",
        "outrider_drafter_saved_seconds",
        "outrider_drafter_usual_acceptance_rate",
        "outrider_effective_state_differs",
        "outrider_journal_allocated_bytes",
        "outrider_journal_answers",
        "outrider_journal_problems",
        "outrider_journal_reserve_bytes",
        "outrider_plan_misprediction_factor",
        "outrider_quarantined_requests",
        "outrider_replicas_failed",
        "outrider_replicas_planned",
        "outrider_slo_error_budget",
        "outrider_slo_requests_judged",
        "outrider_speculation_plain_seconds",
        "outrider_speculation_seconds",
        "outrider_trace_spans",
        "outrider_acceptance_rate",
        "outrider_api_bodies_refused",
        "outrider_api_body_bytes",
        "outrider_api_connections",
        "outrider_api_connections_closed",
        "outrider_tokens_per_second",
        "outrider_draft_latency_ms",
        "outrider_verifier_latency_ms",
        "outrider_device_memory_bytes",
        "outrider_device_power_limit_watts",
        "outrider_device_power_watts",
        "outrider_device_queue_depth",
        "outrider_device_temperature_celsius",
        "outrider_device_temperature_limit_celsius",
        "outrider_device_time_share",
        "outrider_device_utilisation",
        "outrider_part_health",
        "outrider_plan_drift_ratio",
        "outrider_plan_measured_tokens_per_second",
        "outrider_plan_moves",
        "outrider_plan_predicted_cost_per_million_tokens",
        "outrider_plan_predicted_joules_per_token",
        "outrider_plan_predicted_tokens_per_second",
        "outrider_price_per_hour",
        "outrider_spent",
        "outrider_cost_per_million_tokens",
        "outrider_recent_tpot_seconds",
        "outrider_recent_ttft_seconds",
        "outrider_round_seconds",
        "outrider_kv_move_seconds",
        "outrider_kv_moved_bytes",
        "outrider_kv_moves",
        "outrider_standby_takeovers",
        "outrider_standbys",
        "outrider_worker_losses",
        "outrider_worker_restarts",
        "outrider_planned_memory_bytes",
        "outrider_peak_memory_bytes",
        "outrider_acceptance_draft_tokens",
        "outrider_acceptance_accepted_tokens",
        "outrider_tolerance_delta",
        "outrider_tolerance_recalibrations",
        "outrider_low_acceptance",
        "outrider_goodput_requests_per_second",
        "outrider_slo_latency_seconds",
        "outrider_slo_lever",
        "outrider_slo_max_running",
        "outrider_slo_objective_seconds",
        "outrider_slo_prefill_share",
        "outrider_slo_requests_met",
        "outrider_slo_requests_missed",
        "outrider_slo_row_price",
        "outrider_drafter_up",
        "outrider_drafter_draft_tokens",
        "outrider_drafter_accepted_tokens",
        "outrider_drafter_rounds",
        "outrider_drafter_seconds",
        "outrider_drafter_asks",
        "outrider_drafter_late_answers",
        "outrider_drafter_connections",
        "outrider_drafter_ahead_hits",
        "outrider_drafter_ahead_misses",
        "outrider_draft_worker_restarts",
        "outrider_arm_requests",
        "outrider_arm_draft_tokens",
        "outrider_arm_accepted_tokens",
        "outrider_arm_time_to_first_token_seconds",
        "outrider_arm_request_time_per_output_token_seconds",
        "outrider_arm_ttft_ms",
        "outrider_arm_tpot_ms",
        "outrider_arm_acceptance_rate",
        "outrider_canary_share",
        "outrider_canary_phase",
    }
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
