"""The figures of a model as `/metrics` has them, read from the same registry."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.daemon.api.metrics.collector import Metrics

PREFIX: Final = "outrider_"
_OF_ENGINES: Final = frozenset(
    {
        "acceptance_rate",
        "generation_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
        "request_success_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "tokens_per_second",
        "worker_losses_total",
        "worker_restarts_total",
    }
)
_PERCENTILES: Final = {"recent_ttft_seconds": "ttft", "recent_tpot_seconds": "tpot"}


def read_figures(metrics: Metrics) -> dict[str, Any]:
    """Return the figures now: by the replica's number and the metric's name without `outrider_`, its labels added up;
    and percentiles in seconds by "ttft" and "tpot"."""
    metrics.refresh()
    wanted = [PREFIX + name for name in (*_OF_ENGINES, *_PERCENTILES)]
    engines: dict[str, dict[str, float]] = {}
    percentiles: dict[str, dict[str, float]] = {}
    for family in metrics.registry.restricted_registry(wanted).collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name in _PERCENTILES:
                percentiles.setdefault(_PERCENTILES[name], {})[sample.labels["percentile"]] = sample.value
            elif name in _OF_ENGINES:
                figures = engines.setdefault(sample.labels["engine"], {})
                figures[name] = figures.get(name, 0.0) + sample.value
    return {"engines": engines, "percentiles": percentiles}
