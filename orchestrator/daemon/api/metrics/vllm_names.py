"""The same metrics once more under vLLM's own names, for the dashboards and load generators that look for them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

OURS = "outrider_"
THEIRS = "vllm:"
# What vLLM has no name for.
ONLY_OURS = frozenset(OURS + name for name in (
    "acceptance_accepted_tokens", "acceptance_draft_tokens", "acceptance_rate", "api_bodies_refused", "api_body_bytes",
    "api_connections", "api_connections_closed", "arm_acceptance_rate", "arm_accepted_tokens", "arm_draft_tokens",
    "arm_request_time_per_output_token_seconds", "arm_requests", "arm_time_to_first_token_seconds", "arm_tpot_ms",
    "arm_ttft_ms", "canary_phase", "canary_share", "class_changes", "cost_per_million_tokens", "device_fault",
    "device_memory_bytes", "device_memory_errors", "device_power_limit_watts", "device_power_watts",
    "device_queue_depth", "device_slowed", "device_temperature_celsius", "device_temperature_limit_celsius",
    "device_time_share", "device_utilisation", "draft_latency_ms",
    "draft_store_bytes", "draft_store_errors", "draft_store_lookups", "draft_store_up", "draft_store_waiting",
    "draft_store_writes", "draft_worker_restarts", "drafter_accepted_tokens", "drafter_ahead_hits",
    "drafter_ahead_misses", "drafter_asks", "drafter_connections", "drafter_draft_tokens", "drafter_late_answers",
    "drafter_rounds", "drafter_saved_seconds", "drafter_seconds", "drafter_up", "drafter_usual_acceptance_rate",
    "effective_state_differs", "goodput_requests_per_second", "journal_allocated_bytes", "journal_answers",
    "journal_problems", "journal_reserve_bytes", "kv_move_seconds", "kv_moved_bytes", "kv_moves", "low_acceptance",
    "model_failed_loads", "model_load_seconds", "model_loads", "model_state", "model_unloads",
    "model_waiting_requests",
    "changed_groups", "part_health", "peak_memory_bytes", "plan_drift_ratio", "plan_measured_tokens_per_second",
    "plan_misprediction_factor", "plan_moves", "plan_predicted_cost_per_million_tokens",
    "plan_predicted_joules_per_token", "plan_predicted_tokens_per_second", "planned_memory_bytes", "price_per_hour",
    "quarantined_requests", "recent_tpot_seconds", "recent_ttft_seconds", "replicas_failed", "replicas_planned",
    "round_seconds", "slo_error_budget", "slo_latency_seconds", "slo_lever", "slo_max_running", "slo_objective_seconds",
    "slo_prefill_share", "slo_requests_judged", "slo_requests_met", "slo_requests_missed", "slo_row_price",
    "speculation_plain_seconds", "speculation_seconds", "spent", "standby_takeovers", "standbys", "tokens_per_second",
    "tolerance_delta", "tolerance_recalibrations", "trace_spans", "verifier_latency_ms", "worker_losses",
    "worker_restarts",
))  # fmt: skip


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
