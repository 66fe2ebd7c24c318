"""Admin routes of the quarantine: which requests are refused for having ended workers, and letting them run again."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from orchestrator.api.admin.targets import AdminTargets
from orchestrator.errors import RequestError


class Release(BaseModel):
    """The digests to let run again; none: all. `model`: whose; left out: whosever they are."""

    model_config = ConfigDict(extra="forbid")
    digests: list[str] = []
    model: str | None = None


def install_quarantine_routes(app: FastAPI, targets: AdminTargets) -> None:
    """Add the routes."""

    @app.get("/admin/quarantine")
    async def status(model: str | None = None) -> dict[str, Any]:
        told = [(targets.label(one), one.control.list_quarantined()) for one in targets.choose(model)]
        return {"quarantined": [{**dataclasses.asdict(one), **label} for label, some in told for one in some]}

    @app.post("/admin/quarantine/release")
    async def release(asked: Release) -> dict[str, Any]:
        known = {one: [held.digest for held in one.control.list_quarantined()] for one in targets.choose(asked.model)}
        every = [digest for digests in known.values() for digest in digests]
        unknown = [digest for digest in asked.digests if digest not in every]
        if unknown:
            message = f"no request in quarantine has the digest {unknown[0]}; `outrider quarantine list` shows them"
            raise RequestError(message, status=404, code="not_quarantined")
        released: list[str] = []
        for one, digests in known.items():
            mine = [digest for digest in asked.digests if digest in digests] if asked.digests else digests
            released += one.control.release_quarantined(mine)
        return {"released": released}
