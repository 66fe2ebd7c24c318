"""The daemon's targets as operators, metrics, liveness and traces see them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.served import ServedModel
from orchestrator.daemon.api.translate import AcceptanceBounds
from orchestrator.daemon.bootstrap.target_life import TargetLife
from orchestrator.daemon.bootstrap.tracing import connect_tracing, count_spans
from orchestrator.daemon.tracing.port import TracedDaemon
from orchestrator.protocol.rounds import RoundReport


def describe_targets(
    targets: Sequence[TargetLife], models: Sequence[ServedModel], tracing: TracedDaemon | None
) -> list[AdminTarget]:
    """Return the targets as operators see them, and let their rounds be counted. `models`: the same, of requests."""
    count_spans(tracing, models[0].metrics)
    admin_targets = []
    for target, model in zip(targets, models, strict=True):
        target.control.observers.follow(RoundReport, model.metrics.observe_round)
        target.control.observers.follow(RoundReport, model.liveness.observe_round)
        connect_tracing(tracing, model.name, target.control)
        admin_targets.append(
            AdminTarget(
                target.control,
                target.tell_name,
                partial(_get_acceptance, model),
                target.describe_plan,
                model.metrics.slo.view,
                model.metrics.view_costs,
                target.describe_hosts,
                target.trial,
                model.metrics.speed.view,
            )
        )
    return admin_targets


def _get_acceptance(model: ServedModel) -> AcceptanceBounds:
    return model.terms.acceptance
