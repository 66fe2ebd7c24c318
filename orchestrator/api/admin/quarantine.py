"""Admin routes of the quarantine: which requests are refused for having ended workers, and letting them run again."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from orchestrator.control.port import AdminControl
from orchestrator.errors import RequestError


class Release(BaseModel):
    """The digests to let run again; none: all."""

    model_config = ConfigDict(extra="forbid")
    digests: list[str] = []


def install_quarantine_routes(app: FastAPI, control: AdminControl) -> None:
    """Add the routes."""

    @app.get("/admin/quarantine")
    async def status() -> dict[str, Any]:
        return {"quarantined": [dataclasses.asdict(one) for one in control.list_quarantined()]}

    @app.post("/admin/quarantine/release")
    async def release(asked: Release) -> dict[str, Any]:
        known = [one.digest for one in control.list_quarantined()]
        unknown = [digest for digest in asked.digests if digest not in known]
        if unknown:
            message = f"no request in quarantine has the digest {unknown[0]}; `outrider quarantine list` shows them"
            raise RequestError(message, status=404, code="not_quarantined")
        return {"released": control.release_quarantined(asked.digests or known)}
