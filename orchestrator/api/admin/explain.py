"""The admin route that says where a request went, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from fastapi import FastAPI

from orchestrator.control.port import AdminControl, RouteView


def install_explain_route(app: FastAPI, control: AdminControl) -> None:
    """Add the route."""

    @app.get("/admin/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        return {"request": request_id, "routes": [describe_route(one) for one in control.explain(request_id)]}


def describe_route(route: RouteView) -> dict[str, Any]:
    """Return a route as plain data. What does not serve has no price."""
    told = dataclasses.asdict(route)
    for one in told["rated"]:
        one["price_ms"] = one["price_ms"] if math.isfinite(one["price_ms"]) else None
    return told
