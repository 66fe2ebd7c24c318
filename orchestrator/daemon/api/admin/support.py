"""Admin routes that a support bundle is made from: the effective configuration without secrets, and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from orchestrator.redaction import redact_values


@dataclass(frozen=True, slots=True)
class SupportPages:
    """What the daemon tells of itself. `config`: the effective configuration, as plain data; `metrics`: as text."""

    config: Callable[[], dict[str, Any]] = dict
    metrics: Callable[[], bytes] = bytes


def install_support_routes(app: FastAPI, pages: SupportPages) -> None:
    """Secrets stay in the daemon."""

    @app.get("/admin/config")
    async def config() -> Any:
        return redact_values(pages.config())

    @app.get("/admin/metrics")
    async def metrics() -> Response:
        return Response(pages.metrics(), media_type=CONTENT_TYPE_LATEST)
