"""The admin route of the daemon's own log, as far back as it is kept in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from starlette.responses import Response

from orchestrator.clock import Clock, SystemClock
from orchestrator.log_ring import LEVELS, LogFilter, LogRing

_MOST_LINES = 10_000
_USUAL_LINES = 1_000
_MAX_NAME = 256


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
        request: Annotated[str, Query(max_length=_MAX_NAME)] = "",
        worker: Annotated[str, Query(max_length=_MAX_NAME)] = "",
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
