"""Admin routes of health: which devices, hosts, links and workers are not healthy, and keeping work away from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from orchestrator.control.port import AdminControl
from policies.serving.failover.health import Held, PartKind


class Hold(BaseModel):
    """The part, and what is to become of it: "draining", "cordoned", or "" to let it work again."""

    model_config = ConfigDict(extra="forbid")
    kind: PartKind
    name: str
    state: Held


def install_health_routes(app: FastAPI, control: AdminControl) -> None:
    """Add the routes."""

    @app.get("/admin/health")
    async def health() -> dict[str, Any]:
        return {"parts": [dataclasses.asdict(one) for one in control.view().health]}

    @app.post("/admin/hold")
    async def hold(asked: Hold) -> dict[str, Any]:
        control.hold(asked.kind, asked.name, asked.state)
        return {"parts": [dataclasses.asdict(one) for one in control.view().health]}
