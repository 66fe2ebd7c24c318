"""The admin route that says where a request went, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from fastapi import FastAPI

from orchestrator.api.admin.targets import AdminTargets
from orchestrator.control.port import RouteView
from orchestrator.errors import RequestError


def install_explain_route(app: FastAPI, targets: AdminTargets) -> None:
    """Add the route. No two targets' requests have one id, so it need not say whose it is."""

    @app.get("/admin/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        unknown: RequestError | None = None
        for target in targets:
            try:
                routes = [describe_route(one) for one in target.control.explain(request_id)]
            except RequestError as error:
                unknown = error
            else:
                return {"request": request_id, **targets.label(target), "routes": routes}
        raise unknown or RequestError("there is no model", status=404)


def describe_route(route: RouteView) -> dict[str, Any]:
    """Return a route as plain data. What does not serve has no price."""
    told = dataclasses.asdict(route)
    for one in told["rated"]:
        one["price_ms"] = one["price_ms"] if math.isfinite(one["price_ms"]) else None
    return told
