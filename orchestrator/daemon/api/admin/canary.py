"""Admin routes of the canary: how it does, and the operator's word on it."""

from __future__ import annotations

import dataclasses
from math import isfinite
from typing import Any

from fastapi import FastAPI

from orchestrator.daemon.control.port import TrialView
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.errors import RequestError
from policies.serving.canary import Figures, Interval, Moments


def install_canary_routes(app: FastAPI, trial: CanaryTrial | None) -> None:
    """Without a canary the routes say so."""

    def here() -> CanaryTrial:
        if trial is None:
            message = "there is no canary: set canary.share and what is other in it in cluster.yaml, and start again"
            raise RequestError(message, status=404, code="no_canary")
        return trial

    @app.get("/admin/canary")
    async def status() -> dict[str, Any]:
        return trial_of(here().view())

    @app.post("/admin/canary/promote")
    async def promote() -> dict[str, Any]:
        here().promote()
        return trial_of(here().view())

    @app.post("/admin/canary/abort")
    async def abort() -> dict[str, Any]:
        here().abort()
        return trial_of(here().view())

    @app.post("/admin/canary/restart")
    async def restart() -> dict[str, Any]:
        here().restart()
        return trial_of(here().view())


def trial_of(view: TrialView) -> dict[str, Any]:
    """Return a canary's state as plain data; a bound that is not known yet is None."""
    return {
        "phase": view.phase,
        "share": view.share,
        "effective_share": view.effective_share,
        "differs": list(view.differs),
        "decide": "rule" if view.by_rule else "operator",
        "rule": view.rule._asdict(),
        "decision": dataclasses.asdict(view.decision) if view.decision is not None else None,
        "arms": {variant: _figures(figures) for variant, figures in view.arms.items()},
        "differences": {name: _interval(interval) for name, interval in view.differences.items()},
        "outlook": view.outlook,
        "to_keep": list(view.to_keep),
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {name: _moments(moments) for name, moments in figures._asdict().items()}


def _moments(moments: Moments) -> dict[str, Any]:
    return {"requests": moments.seen, "mean": moments.mean if moments.seen else None, **_interval(moments.interval)}


def _interval(interval: Interval) -> dict[str, float | None]:
    return {name: bound if isfinite(bound) else None for name, bound in interval._asdict().items()}
