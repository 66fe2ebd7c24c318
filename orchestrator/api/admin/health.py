"""Admin routes of health: which devices, hosts, links and workers are not healthy, and keeping work away from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from orchestrator.api.admin.targets import AdminTargets
from orchestrator.errors import RequestError
from policies.serving.failover.health import Held, PartKind


class Hold(BaseModel):
    """The part, and what is to become of it: "draining", "cordoned", or "" to let it work again. `model`: whose it is;
    left out: that of every model that has it, which a worker is not."""

    model_config = ConfigDict(extra="forbid")
    kind: PartKind
    name: str
    state: Held
    model: str | None = None


def install_health_routes(app: FastAPI, targets: AdminTargets) -> None:
    """Add the routes."""

    def list_parts(model: str | None) -> dict[str, Any]:
        told = [(targets.label(one), one.control.view().health) for one in targets.choose(model)]
        return {"parts": [{**dataclasses.asdict(part), **label} for label, parts in told for part in parts]}

    @app.get("/admin/health")
    async def health(model: str | None = None) -> dict[str, Any]:
        return list_parts(model)

    @app.post("/admin/hold")
    async def hold(asked: Hold) -> dict[str, Any]:
        if asked.kind == "worker":
            targets.choose_one(asked.model, f"worker {asked.name}")
        missing: list[RequestError] = []
        chosen = targets.choose(asked.model)
        for one in chosen:
            try:
                one.control.hold(asked.kind, asked.name, asked.state)
            except RequestError as error:
                missing.append(error)
        if len(missing) == len(chosen):
            raise missing[0]
        return list_parts(asked.model)
