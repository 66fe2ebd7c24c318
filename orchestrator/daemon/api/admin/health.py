"""Admin routes of health: which devices, hosts, links and workers are not healthy, and keeping work away from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from orchestrator.daemon.api.admin.targets import AdminTarget, AdminTargets, spell_worker
from orchestrator.daemon.api.audit import note_change
from orchestrator.errors import RequestError
from policies.serving.failover.health import Held, PartKind


class Hold(BaseModel):
    """The part, and what is to become of it: "draining", "cordoned", or "" to let it work again. `kind` left out: the
    one thing of this name. `model`: whose it is; left out: that of every model that has it, which a worker is not."""

    model_config = ConfigDict(extra="forbid")
    kind: PartKind | None = None
    name: str
    state: Held
    model: str | None = None


def install_health_routes(app: FastAPI, targets: AdminTargets) -> None:
    """Add the routes."""

    def list_parts(model: str | None) -> dict[str, Any]:
        told = [(targets.label(one), one, one.control.view()) for one in targets.choose(model)]
        return {
            "models": [{"model": one.name(), "phase": view.phase, "detail": view.detail} for _, one, view in told],
            "parts": [{**dataclasses.asdict(part), **label} for label, _, view in told for part in view.health],
        }

    @app.get("/admin/health")
    async def health(model: str | None = None) -> dict[str, Any]:
        return list_parts(model)

    @app.get("/admin/parts")
    async def list_all_parts(model: str | None = None) -> dict[str, Any]:
        told = [(targets.label(one), one.control.steering.list_parts()) for one in targets.choose(model)]
        return {"parts": [{**dataclasses.asdict(part), **label} for label, parts in told for part in parts]}

    @app.post("/admin/hold")
    async def hold(asked: Hold, request: Request) -> dict[str, Any]:
        chosen = targets.choose(asked.model)
        name = spell_worker(chosen, asked.name) if asked.kind in (None, "worker") else asked.name
        kind = asked.kind or find_kind(chosen, name)
        if kind == "worker":
            chosen = _list_having(chosen, name)
            if len(chosen) != 1:
                chosen = [targets.choose_one(asked.model, f"worker {name}")]
        missing: list[RequestError] = []
        for one in chosen:
            try:
                one.control.hold(kind, name, asked.state)
            except RequestError as error:
                missing.append(error)
        if len(missing) == len(chosen):
            raise missing[0]
        note_change(request.scope, f"{kind} {name}: {asked.state or 'may work again'}")
        return {"kind": kind, "name": name, "state": asked.state, **list_parts(asked.model)}


def find_kind(targets: Sequence[AdminTarget], name: str) -> PartKind:
    """Return what the one thing of this name is. Raises RequestError: 404 where there is none, 409 where there are
    several; both list what there is."""
    every = {(part.kind, part.name) for one in targets for part in one.control.steering.list_parts()}
    kinds = sorted(kind for kind, known in every if known == name)
    there = ", ".join(f"{kind} {known}" for kind, known in sorted(every)) or "nothing yet"
    if not kinds:
        raise RequestError(f"nothing here is called {name!r}; there is: {there}", status=404, code="part_not_found")
    if len(kinds) > 1:
        text = f"{' and '.join(kinds)} are called {name!r}: say which, as in `{kinds[0]} {name}`; there is: {there}"
        raise RequestError(text, status=409, code="ambiguous_name")
    found: PartKind = next(kind for kind in get_args(PartKind) if kind == kinds[0])
    return found


def _list_having(targets: Sequence[AdminTarget], worker: str) -> list[AdminTarget]:
    """Return the targets that have a worker of this name."""
    parts = {one: one.control.steering.list_parts() for one in targets}
    return [one for one, known in parts.items() if any((part.kind, part.name) == ("worker", worker) for part in known)]
