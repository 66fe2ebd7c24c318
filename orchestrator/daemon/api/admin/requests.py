"""Admin routes of requests: which are live, what became of one, and ending one. They never say what a request holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.daemon.api.admin.targets import AdminTarget, AdminTargets
from orchestrator.daemon.api.audit import note_change
from orchestrator.daemon.control.port import RouteView, TrialView
from orchestrator.daemon.control.streams.request_history import RequestView
from orchestrator.errors import RequestError
from orchestrator.protocol.ready import ENDPOINT

MOST_NAME = 256  # characters of a name in a request. Not tuned.
_T = TypeVar("_T")
NameOwner = Callable[[str], str]
"""Returns the name of a key by its id."""


class Cancel(BaseModel):
    """The id of the request to end, as its client sees it."""

    model_config = ConfigDict(extra="forbid")
    request: str = Field(min_length=1, max_length=MOST_NAME)


def install_request_routes(app: FastAPI, targets: AdminTargets, name_owner: NameOwner) -> None:
    """No two targets' requests have one id, so they need not say whose it is."""

    @app.get("/admin/requests")
    async def list_requests(model: str | None = None) -> dict[str, Any]:
        chosen = targets.choose(model)
        running = [(target, view) for target in chosen for view in target.control.steering.list_requests()]
        return {"requests": [{**_describe(view, name_owner), **targets.label(target)} for target, view in running]}

    @app.post("/admin/requests/cancel")
    async def cancel(body: Cancel, request: Request) -> dict[str, Any]:
        cancelled = _ask_each(targets, lambda target: target.control.steering.cancel(body.request))
        note_change(request.scope, f"cancel {cancelled[1][0]}")
        return {"cancelled": cancelled[1], **targets.label(cancelled[0])}

    @app.get("/admin/explain")
    async def explain_pools(model: str | None = None) -> dict[str, Any]:
        return {"models": [describe_pool(target) for target in targets.choose(model)]}

    @app.get("/admin/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        target, (routes, requests) = _ask_each(targets, lambda target: _explain(target, request_id))
        return {
            "request": request_id,
            **targets.label(target),
            "canary": None if target.trial is None else describe_trial(target.trial.view()),
            "routes": [describe_route(route) for route in routes],
            "endpoints": _describe_endpoints(target),
            "branches": _describe_branches(target),
            "requests": [
                {
                    **_describe(view, name_owner),
                    **dataclasses.asdict(view),
                    "owner": name_owner(view.owner),
                    "drafters": [msgspec.structs.asdict(share) for share in view.drafters],
                }
                for view in requests
            ],
        }


def describe_pool(target: AdminTarget) -> dict[str, Any]:
    plan = target.control.view().plan
    pool = target.control.steering.describe_pool({} if plan is None else plan.replica_tokens_per_s)
    return {"model": target.name(), **dataclasses.asdict(pool)}


def describe_trial(view: TrialView) -> dict[str, Any]:
    """Return how a canary stands: its phase, why it was decided on (None: it was not), and what comes next."""
    reason = None if view.decision is None else f"by the {view.decision.by}: {view.decision.reason}"
    return {"phase": view.phase, "reason": reason, "outlook": view.outlook}


def _describe_endpoints(target: AdminTarget) -> dict[str, str]:
    """Return of the replicas that are other engines' servers which these are, and how prompts go there, by name."""
    served = [(replica.name, replica.ready) for replica in target.control.view().replicas if replica.ready is not None]
    return {
        name: f"{ready.device.name}, {ready.device.full_name}; {ready.precision.reason}"
        for name, ready in served
        if ready.device.adapter == ENDPOINT
    }


def _describe_branches(target: AdminTarget) -> dict[str, str]:
    """Return of each replica that drafts whether other ways of drafts are verified beside them, and why, by name."""
    served = [(replica.name, replica.ready) for replica in target.control.view().replicas if replica.ready is not None]
    return {name: ready.drafting.branches for name, ready in served if ready.drafting.max_depth}


def _explain(target: AdminTarget, request_id: str) -> tuple[list[RouteView], list[RequestView]]:
    requests = target.control.steering.describe_requests(request_id)
    try:
        return target.control.steering.explain(request_id), requests
    except RequestError:
        if not requests:
            raise
        return [], requests


def _ask_each(targets: AdminTargets, ask: Callable[[AdminTarget], _T]) -> tuple[AdminTarget, _T]:
    """Return the first target that knows what is asked for, and what it says. Raises what the last one raised."""
    unknown = RequestError("there is no model", status=404)
    for target in targets:
        try:
            return target, ask(target)
        except RequestError as error:
            unknown = error
    raise unknown


def _describe(view: RequestView, name_owner: NameOwner) -> dict[str, Any]:
    shown = ("request_id", "state", "age_s", "replica", "prompt_tokens", "tokens", "depth", "queue_ms")
    return {**{name: getattr(view, name) for name in shown}, "key": name_owner(view.owner)}


def describe_route(route: RouteView) -> dict[str, Any]:
    """Return a route as plain data. What does not serve has no price."""
    shown = dataclasses.asdict(route)
    for replica in shown["rated"]:
        replica["price_ms"] = replica["price_ms"] if math.isfinite(replica["price_ms"]) else None
    return shown
