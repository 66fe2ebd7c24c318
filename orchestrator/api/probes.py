"""What operators and their tools ask: has it started, does it live, does it serve, does it decode, how much."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from orchestrator.api import errors
from orchestrator.api.answers import DecodeHealth, Health, Live, Readiness, Started, Version
from orchestrator.api.keys import STRANGER
from orchestrator.api.liveness import Liveness
from orchestrator.api.metrics.collector import Metrics
from orchestrator.api.openapi import operation
from orchestrator.api.port import TokenizerPort
from orchestrator.control.port import Control
from orchestrator.errors import RequestError

_NOT_READY_RETRY_S = 5


class Probed(Protocol):
    """What these routes need of the API."""

    control: Control
    metrics: Metrics
    liveness: Liveness
    tokenizer: Callable[[], TokenizerPort | None]
    model_name: Callable[[], str]


def install_probe_routes(app: FastAPI, api: Probed) -> None:
    """Add the routes. Probes ask for no key; where there are keys, those without one see no hosts and no paths."""

    @app.get("/started", **operation(None, Started, statuses=(503,)))
    async def tell_started(request: Request) -> Response:
        if api.control.view().ready is None:
            return errors.response_of(not_ready(api.control, whole=_knows(request)))
        return JSONResponse({"status": "started", "model": api.model_name()})

    @app.get("/live", **operation(None, Live, statuses=()))
    async def live() -> Response:
        return JSONResponse({"status": "live", "phase": api.control.view().phase})

    @app.get("/health", **operation(None, Health, statuses=(503,)))
    async def health(request: Request) -> Response:
        view = api.control.view()
        if view.phase == "failed":
            return errors.response_of(not_ready(api.control, whole=_knows(request)))
        decode = api.liveness.describe_liveness()
        detail = view.detail if _knows(request) else ""
        return JSONResponse({"status": "ok", "phase": view.phase, "detail": detail, "decode": decode})

    @app.get("/health/decode", **operation(None, DecodeHealth, statuses=(503,)))
    async def decode_health() -> Response:
        decode = api.liveness.describe_liveness()
        if decode["status"] == "stalled":
            return errors.response_of(_build_stalled_error(decode))
        return JSONResponse(decode)

    @app.get("/ready", **operation(None, Readiness, statuses=(503,)))
    async def ready(request: Request) -> Response:
        view = api.control.view()
        if view.phase != "ready" or api.tokenizer() is None:
            return errors.response_of(not_ready(api.control, whole=_knows(request)))
        return JSONResponse({"status": "ready", "model": api.model_name()})

    @app.get("/metrics", responses={200: {"description": "Prometheus text.", "content": {CONTENT_TYPE_LATEST: {}}}})
    async def metrics() -> Response:
        return Response(api.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", name="served_version", **operation(None, Version, statuses=(401,)))
    async def get_version() -> dict[str, str]:
        return {"version": version("outrider")}


def _knows(request: Request) -> bool:
    """Return whether the sender may know where things run: it has a key, or none is asked for."""
    return not request.scope.get(STRANGER, False)


def not_ready(control: Control, *, whole: bool = True) -> RequestError:
    """Return the 503 that says what the daemon is doing; not `whole`: the phase alone."""
    view = control.view()
    detail = f": {view.detail}" if view.detail and whole else ""
    return RequestError(
        f"the model is {view.phase}{detail}",
        status=503,
        kind="server_error",
        code="model_not_ready",
        retry_after_s=_NOT_READY_RETRY_S,
    )


def _build_stalled_error(decode: dict[str, Any]) -> RequestError:
    age = decode["last_token_age_s"]
    last = "no token yet" if age is None else f"the last token is {age:g} s old"
    return RequestError(
        f"decoding is stalled: {decode['streams']} requests are live and {last}",
        status=503,
        kind="server_error",
        code="decode_stalled",
        retry_after_s=_NOT_READY_RETRY_S,
    )
