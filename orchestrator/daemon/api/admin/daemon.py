"""Admin routes of the daemon itself: its configuration without secrets, its metrics, its log, and its reload."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from orchestrator.clock import Clock, SystemClock
from orchestrator.daemon.api.admin.requests import MOST_NAME
from orchestrator.redaction import redact_values
from orchestrator.telemetry import LEVELS, LogFilter, LogRing


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


# More than the ring of 8 MiB holds (ADR 0068).
_MOST_LINES = 10_000
_USUAL_LINES = 1_000  # what a person reads. Not tuned.


@dataclass(frozen=True, slots=True)
class KeptLog:
    """The newest lines of the log. `unit`: of systemd's, whose journal has all lines; "" where there is none."""

    ring: LogRing = field(default_factory=LogRing)
    unit: str = ""
    clock: Clock = field(default_factory=SystemClock)


def install_log_route(app: FastAPI, log: KeptLog) -> None:
    """A line that is left out of a page is older than those in it."""

    @app.get("/admin/logs")
    async def logs(
        after: Annotated[int, Query(ge=0)] = 0,
        last_s: Annotated[float | None, Query(ge=0)] = None,
        level: Literal["debug", "info", "warning", "error"] = "debug",
        request: Annotated[str, Query(max_length=MOST_NAME)] = "",
        worker: Annotated[str, Query(max_length=MOST_NAME)] = "",
        most: Annotated[int, Query(ge=1, le=_MOST_LINES)] = _USUAL_LINES,
    ) -> Response:
        since_s = 0.0 if last_s is None else log.clock.wall_s() - last_s
        page = log.ring.search(LogFilter(after, since_s, LEVELS[level], request, worker), most)
        fields: dict[str, Any] = {
            "pid": os.getpid(),
            "unit": log.unit,
            "entries": [msgspec.Raw(line.text.encode("utf-8", "backslashreplace")) for line in page.lines],
            "left_out": page.left_out,
            "next_after": page.next_after,
            "forgotten": page.forgotten,
        }
        return Response(msgspec.json.encode(fields), media_type="application/json")


@dataclass(frozen=True, slots=True)
class ReloadPort:
    """What the route asks of the daemon. `reload` takes whether it only says what would change; it raises RequestError.
    `describe`: how what runs stands to the file. `list_values`: what runs, by key, and the keys that flags set."""

    reload: Callable[[bool], Awaitable[dict[str, Any]]]
    describe: Callable[[], dict[str, Any]]
    list_values: Callable[[], dict[str, Any]]


class ReloadRequest(BaseModel):
    """What a command asks for. `check`: say what would change, and change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    check: bool = False


def install_reload_route(app: FastAPI, port: ReloadPort) -> None:
    @app.post("/admin/reload")
    async def reload(body: ReloadRequest) -> dict[str, Any]:
        return await port.reload(body.check)

    @app.get("/admin/configuration")
    async def configuration() -> dict[str, Any]:
        return port.list_values()
