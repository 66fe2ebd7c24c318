"""The same metrics once more under vLLM's own names, for the dashboards and load generators that look for them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

OURS = "outrider_"
THEIRS = "vllm:"
# Those that vLLM has too, and what else came to be told under its prefix.
TOLD_TWICE = frozenset(OURS + name for name in (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "tolerated_tokens", "prompt_tokens", "generation_tokens",
    "iteration_tokens_total", "target_stage_seconds", "rounds_in_flight", "request_success",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_params_max_tokens", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "num_preemptions", "out_of_memory_forwards", "not_finite_requests", "prefix_cache_queries", "prefix_cache_hits",
    "prefix_cache_loaded", "drafter_statistics_draft_tokens", "drafter_statistics_accepted_tokens",
    "drafter_link_sent_bytes", "drafter_link_received_bytes", "drafter_link_rtt_seconds", "draft_worker_busy",
    "draft_worker_targets", "replicas_wanted", "recent_outputs_tokens", "recent_outputs_requests", "replicas_ready",
    "arm_generation_tokens", "arm_tolerated_tokens", "arm_agreement", "batches", "batch_lines", "batch_file_bytes",
))  # fmt: skip


class VllmNames(Collector):
    """Collects what another registry holds, renamed."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        for family in self._source.collect():
            if family.name in TOLD_TWICE:
                yield _rename_family(family)


def _rename_family(family: Metric) -> Metric:
    renamed = Metric(_theirs(family.name), family.documentation, family.type)
    renamed.samples = [sample._replace(name=_theirs(sample.name)) for sample in family.samples]
    return renamed


def _theirs(name: str) -> str:
    return THEIRS + name.removeprefix(OURS)
