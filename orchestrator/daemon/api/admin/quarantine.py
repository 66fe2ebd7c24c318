"""Admin routes of the quarantine: which requests are refused for having ended a process, and letting them run again."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field

from device_profiles.units import S_PER_MINUTE
from orchestrator.daemon.api.admin.requests import MOST_NAME
from orchestrator.daemon.api.admin.targets import AdminBody, AdminTargets
from orchestrator.daemon.api.audit import note_change
from orchestrator.daemon.api.body_work import DeadlyBodies
from orchestrator.daemon.control.port import QuarantinedView
from orchestrator.errors import RequestError

MOST_MINUTES = 7 * 24 * 60.0  # a week; a longer one is a mistake of units


class Release(AdminBody):
    """The digests to let run again; none: all."""

    digests: list[str] = Field(default=[])


class Add(AdminBody):
    """The id of a request of late, or the digest of what it asks for: requests like it are refused for so long."""

    request: str = Field(min_length=1, max_length=MOST_NAME)
    minutes: float = Field(default=60.0, gt=0.0, le=MOST_MINUTES)


def install_quarantine_routes(app: FastAPI, targets: AdminTargets, deadly: DeadlyBodies | None) -> None:
    """`deadly`: the bodies that ended the daemon, which are of no model."""

    def list_deadly(model: str | None) -> list[QuarantinedView]:
        return [] if deadly is None or model is not None else deadly.list_quarantined()

    @app.get("/admin/quarantine")
    async def status(model: str | None = None) -> dict[str, Any]:
        groups = [
            (targets.label(target), target.control.steering.list_quarantined()) for target in targets.choose(model)
        ]
        groups.append(({"model": ""} if targets.several else {}, list_deadly(model)))
        return {
            "quarantined": [{**dataclasses.asdict(held), **label} for label, convicts in groups for held in convicts]
        }

    @app.post("/admin/quarantine/add")
    async def add(body: Add, request: Request) -> dict[str, Any]:
        unknown: list[RequestError] = []
        for target in targets.choose(body.model):
            try:
                convict = target.control.steering.quarantine(body.request, body.minutes * S_PER_MINUTE)
            except RequestError as error:
                unknown.append(error)
            else:
                note_change(request.scope, f"quarantine {convict.digest} for {body.minutes:g} minutes")
                return {"quarantined": [{**dataclasses.asdict(convict), **targets.label(target)}]}
        raise unknown[0]

    @app.post("/admin/quarantine/release")
    async def release(body: Release, request: Request) -> dict[str, Any]:
        known = {
            target: [held.digest for held in target.control.steering.list_quarantined()]
            for target in targets.choose(body.model)
        }
        bodies = [held.digest for held in list_deadly(body.model)]
        every = [*bodies, *(digest for digests in known.values() for digest in digests)]
        unknown = [digest for digest in body.digests if digest not in every]
        if unknown:
            message = f"no request in quarantine has the digest {unknown[0]}; `outrider quarantine list` shows them"
            raise RequestError(message, status=404, code="not_quarantined")
        released: list[str] = []
        for target, digests in known.items():
            mine = [digest for digest in body.digests if digest in digests] if body.digests else digests
            released += target.control.steering.release_quarantined(mine)
        if deadly is not None:
            released += deadly.release([digest for digest in bodies if not body.digests or digest in body.digests])
        note_change(request.scope, f"released {', '.join(released) or 'nothing'}")
        return {"released": released}
