"""The dashboard's routes. Its files are open; its state asks for a key's scope `metrics` where there are keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from orchestrator.clock import Clock
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.dashboard.payload import DashboardState
from orchestrator.daemon.api.dashboard.static_files import HEADERS, PAGE, read_static_files
from orchestrator.daemon.api.dashboard.viewers import EVERY_S, MOST_VIEWERS, Viewers, ViewerStream
from orchestrator.daemon.api.follow import RequestLives
from orchestrator.daemon.api.served import ServedModel
from orchestrator.errors import RequestError
from orchestrator.telemetry import LoopGuard


class Dashboard:
    def __init__(self, state: DashboardState, clock: Clock, *, most_viewers: int = MOST_VIEWERS) -> None:
        self.state = state
        self.viewers = Viewers(state.describe, clock, most=most_viewers)

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Look for failovers meanwhile, and let viewers go in the end."""
        looking = asyncio.create_task(self._look(), name="look for failovers")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self.viewers.close()

    async def _look(self) -> None:
        guard = LoopGuard("the look for failovers")
        while True:
            with guard.hold():
                self.state.observe()
            await asyncio.sleep(EVERY_S)


def install_dashboard(
    app: FastAPI,
    targets: Sequence[AdminTarget],
    models: Sequence[ServedModel],
    lives: RequestLives,
    clock: Clock,
    *,
    keys: bool = False,
    most_viewers: int = MOST_VIEWERS,
) -> Dashboard:
    """Add the routes to the public app. `targets` and `models` are in the same order. `keys`: they are asked for."""
    files = read_static_files(keys=keys)
    dashboard = Dashboard(DashboardState(targets, models, lives, clock), clock, most_viewers=most_viewers)

    @app.get("/dashboard", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files[PAGE].answer(request)

    @app.get("/dashboard/static/{path:path}", include_in_schema=False)
    async def static(request: Request, path: str) -> Response:
        if path not in files:
            raise RequestError("the dashboard has no such file", status=404, code="not_found")
        return files[path].answer(request)

    @app.get("/dashboard/events", include_in_schema=False)
    async def events() -> Response:
        return ViewerStream(dashboard.viewers, HEADERS)

    @app.get("/dashboard/requests/{request_id}", include_in_schema=False)
    async def describe_request(request_id: str) -> Response:
        body = msgspec.json.encode(dashboard.state.describe_request(request_id))
        return Response(body, media_type="application/json", headers={**HEADERS, "Cache-Control": "no-store"})

    return dashboard
