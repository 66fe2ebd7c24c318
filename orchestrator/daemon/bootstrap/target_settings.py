"""What control and the API are told of one target's configuration: bounds, rules, objectives and prices."""

from __future__ import annotations

from orchestrator.config.drafts import IndexDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.api.metrics.goodput_series import HourlyPrice
from orchestrator.daemon.api.served import TargetTerms
from orchestrator.daemon.api.translate import AcceptanceBounds
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.fitting.worker_options import objectives_of
from policies.serving.failover.standby import FailoverRules
from policies.serving.routing import RoutingWeights


def build_control_limits(config: ClusterConfig) -> ControlLimits:
    limits, routing, failover = config.limits, config.routing, config.failover
    other_bits = failover.choose_other_bits(unlike=config.model.unlike)
    return ControlLimits(
        limits.max_running,
        limits.max_waiting,
        config.cluster.max_restarts,
        limits.request_timeout_s,
        config.speculation.min_speculative_tokens,
        ttft=objectives_of(config.slo).ttft,
        refuse_late=config.slo.late == "refuse",
        quarantine_s=limits.quarantine_s,
        failover=FailoverRules(failover.after_s, failover.back_after_s, other_bits, config.model.alike),
        weights=RoutingWeights(**routing.weights.model_dump()),
        hysteresis=routing.hysteresis,
        smoothing=config.placement.load_smoothing,
    )


def build_terms(config: ClusterConfig) -> TargetTerms:
    speculation = config.speculation
    stores = tuple(draft.store for _, draft in config.all_drafts if isinstance(draft, IndexDraft))
    elsewhere = config.cluster.across_hosts and not config.planned
    price_per_hour = 0.0 if elsewhere else config.devices.price_per_hour  # on any node that is not what it costs
    return TargetTerms(
        AcceptanceBounds(speculation.acceptance, speculation.allow_tolerance, stores),
        objectives_of(config.slo),
        config.limits.max_running,
        HourlyPrice(price_per_hour, config.placement.currency),
        tuple(lora.name for lora in config.model.adapters),
    )
