"""Admin routes of health: which devices, hosts, links and workers are not healthy, and keeping work away from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request

from orchestrator.daemon.api.admin.targets import AdminBody, AdminTarget, AdminTargets, spell_device, spell_worker
from orchestrator.daemon.api.audit import note_change
from orchestrator.daemon.control.replicas.shortfall import list_shortfall, list_wanted
from orchestrator.errors import RequestError
from policies.serving.failover.health import Held, PartKind


class Hold(AdminBody):
    """The part, and what is to become of it: "draining", "cordoned", or "" to let it work again. `kind` left out: the
    one thing of this name. `model` left out: that of every model that has it, which a worker is not."""

    kind: PartKind | None = None
    name: str
    state: Held


def install_health_routes(app: FastAPI, targets: AdminTargets) -> None:
    def list_parts(model: str | None) -> dict[str, Any]:
        chosen = [(targets.label(target), target, target.control.view()) for target in targets.choose(model)]
        return {
            "models": [
                {
                    "model": target.name(),
                    "phase": view.phase,
                    "detail": view.detail,
                    "planned": len(list_wanted(view)),
                    "missing": list_shortfall(view),
                }
                for _, target, view in chosen
            ],
            "parts": [{**dataclasses.asdict(part), **label} for label, _, view in chosen for part in view.health],
        }

    @app.get("/admin/health")
    async def health(model: str | None = None) -> dict[str, Any]:
        return list_parts(model)

    @app.get("/admin/parts")
    async def list_all_parts(model: str | None = None) -> dict[str, Any]:
        known = [(targets.label(target), target.control.steering.list_parts()) for target in targets.choose(model)]
        return {"parts": [{**dataclasses.asdict(part), **label} for label, parts in known for part in parts]}

    @app.post("/admin/hold")
    async def hold(body: Hold, request: Request) -> dict[str, Any]:
        chosen = targets.choose(body.model)
        name = spell_worker(chosen, body.name) if body.kind in (None, "worker") else body.name
        name = spell_device(chosen, name) if body.kind in (None, "device") else name
        kind = body.kind or find_kind(chosen, name)
        if kind == "worker":
            chosen = _list_having(chosen, name)
            if len(chosen) != 1:
                chosen = [targets.choose_one(body.model, f"worker {name}")]
        missing: list[RequestError] = []
        for target in chosen:
            try:
                target.control.steering.hold(kind, name, body.state)
            except RequestError as error:
                missing.append(error)
        if len(missing) == len(chosen):
            raise missing[0]
        note_change(request.scope, f"{kind} {name}: {body.state or 'may work again'}")
        return {"kind": kind, "name": name, "state": body.state, **list_parts(body.model)}


def find_kind(targets: Sequence[AdminTarget], name: str) -> PartKind:
    """Return what the one thing of this name is. Raises RequestError: 404 where none is, 409 where several are."""
    every = {(part.kind, part.name) for target in targets for part in target.control.steering.list_parts()}
    kinds = sorted(kind for kind, known in every if known == name)
    listed = ", ".join(f"{kind} {known}" for kind, known in sorted(every)) or "nothing yet"
    if not kinds:
        raise RequestError(f"nothing here is called {name!r}; there is: {listed}", status=404, code="part_not_found")
    if len(kinds) > 1:
        text = f"{' and '.join(kinds)} are called {name!r}: say which, as in `{kinds[0]} {name}`; there is: {listed}"
        raise RequestError(text, status=409, code="ambiguous_name")
    named: PartKind = next(kind for kind in get_args(PartKind) if kind == kinds[0])
    return named


def _list_having(targets: Sequence[AdminTarget], worker: str) -> list[AdminTarget]:
    parts = {target: target.control.steering.list_parts() for target in targets}
    return [
        target for target, known in parts.items() if any((part.kind, part.name) == ("worker", worker) for part in known)
    ]
