"""Admin routes of failovers and drafters: which worker goes on with whose requests, and whose drafts it takes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api.admin.requests import MOST_NAME
from orchestrator.daemon.api.admin.targets import AdminBody, AdminTargets, spell_worker
from orchestrator.daemon.api.audit import note_change
from orchestrator.daemon.control.port import DraftersView

_MOST_DRAFTERS = 64  # more than a target has


class Failover(AdminBody):
    """The worker, and what is to go on with its requests; `to` null: it is to have them again."""

    worker: str = Field(min_length=1, max_length=MOST_NAME)
    to: str | None = Field(min_length=1, max_length=MOST_NAME)


class DrafterChoice(AdminBody):
    """The drafters that may propose: none, or null for all that are configured. `engine`: of this replica; left out: of
    all."""

    names: list[str] | None = Field(max_length=_MOST_DRAFTERS)
    engine: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _no_name_twice(self) -> DrafterChoice:
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise PydanticCustomError("invalid_combination", "'{field}' has a name twice", {"field": "names"})
        return self


def install_worker_routes(app: FastAPI, targets: AdminTargets) -> None:
    @app.post("/admin/failover")
    async def fail_over(body: Failover, request: Request) -> dict[str, Any]:
        target = targets.choose_one(body.model, f"worker {body.worker}")
        worker, to = (
            spell_worker([target], body.worker),
            None if body.to is None else spell_worker([target], body.to),
        )
        if to is None:
            target.control.steering.give_back(worker)
        else:
            target.control.steering.fail_over(worker, to)
        note_change(request.scope, f"failover {worker} {f'to {to}' if to else 'back'}")
        return {"worker": worker, "to": to, **targets.label(target)}

    @app.get("/admin/drafters")
    async def list_drafters(model: str | None = None) -> dict[str, Any]:
        return describe_drafters(targets, model)

    @app.post("/admin/drafters")
    async def choose_drafters(body: DrafterChoice, request: Request) -> dict[str, Any]:
        if body.engine is not None or body.names:
            targets.choose_one(body.model, "an engine, or a drafter,")
        for target in targets.choose(body.model):
            target.control.steering.choose_drafters(body.names, body.engine)
        drafters = "as configured" if body.names is None else ", ".join(body.names) or "off"
        whose = "all engines" if body.engine is None else f"engine {body.engine}"
        note_change(request.scope, f"drafters of {whose}: {drafters}")
        return describe_drafters(targets, body.model)


def describe_drafters(targets: AdminTargets, model: str | None) -> dict[str, Any]:
    replicas = [(target, view) for target in targets.choose(model) for view in target.control.steering.list_drafters()]
    return {"replicas": [{**_describe(view), **targets.label(target)} for target, view in replicas]}


def _describe(view: DraftersView) -> dict[str, Any]:
    chosen = None if view.chosen is None else list(view.chosen)
    return {
        "replica": view.replica,
        "engine": view.engine,
        "chosen": chosen,
        "drafters": [msgspec.to_builtins(drafter) for drafter in view.drafters],
    }
