"""What operators and their tools ask: has it started, does it live, does it serve, does it decode, how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from orchestrator.daemon.api import errors
from orchestrator.daemon.api.answers import DecodeHealth, Health, Live, Readiness, Started, Version
from orchestrator.daemon.api.keys import STRANGER
from orchestrator.daemon.api.openapi import operation
from orchestrator.daemon.api.served import NOT_READY_RETRY_S, ServedModel, not_ready
from orchestrator.daemon.control.replicas.shortfall import list_shortfall, list_wanted
from orchestrator.daemon.control.state import DRAINING, FAILED, READY, RESTARTING, STARTING, UNLOADED
from orchestrator.daemon.control.streams.admission import describe_held
from orchestrator.daemon.journal.standing import JournalView
from orchestrator.errors import RequestError

if TYPE_CHECKING:  # it imports us
    from orchestrator.daemon.api.app import ApiRoutes

_BEST_FIRST = (READY, RESTARTING, STARTING, UNLOADED, DRAINING, FAILED)


def install_probe_routes(app: FastAPI, api: ApiRoutes, journal: Callable[[], JournalView]) -> None:
    """`?model=NAME` asks for one model alone. Probes ask for no key; where there are keys, those
    without one see no hosts and no paths. `journal` returns how that stands."""

    def choose(model: str | None) -> list[ServedModel]:
        return list(api.models) if model is None else [api.models.require(model)]

    @app.get("/started", **operation(None, Started, statuses=(404, 503)))
    async def tell_started(request: Request, model: str | None = None) -> Response:
        return _tell_started(choose(model), whole=_knows(request))

    @app.get("/live", **operation(None, Live, statuses=()))
    async def live() -> Response:
        return JSONResponse({"status": "live", "phase": sum_up_phase(list(api.models))})

    @app.get("/health", **operation(None, Health, statuses=(404, 503)))
    async def health(request: Request, model: str | None = None) -> Response:
        return _tell_health(choose(model), whole=_knows(request))

    @app.get("/health/decode", **operation(None, DecodeHealth, statuses=(404, 503)))
    async def decode_health(model: str | None = None) -> Response:
        decode = describe_decoding(choose(model))
        if decode["status"] == "stalled":
            return errors.response_of(_build_stalled_error(decode))
        return JSONResponse(decode)

    @app.get("/ready", **operation(None, Readiness, statuses=(404, 503)))
    async def ready(request: Request, model: str | None = None) -> Response:
        return _tell_ready(choose(model), journal(), whole=_knows(request))

    @app.get("/metrics", responses={200: {"description": "Prometheus text.", "content": {CONTENT_TYPE_LATEST: {}}}})
    async def metrics() -> Response:
        return Response(await api.page.answer(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", name="served_version", **operation(None, Version, statuses=(401,)))
    async def get_version() -> dict[str, str]:
        return {"version": version("outrider")}


def _knows(request: Request) -> bool:
    """Return whether the sender may know where things run: it has a key, or none is asked for."""
    return not request.scope.get(STRANGER, False)


def _tell_started(models: Sequence[ServedModel], *, whole: bool) -> Response:
    """Answer whether each of these models was ready once, but for those that never will be."""
    waited = [model for model in models if model.control.view().ready is None]
    missing = [model for model in waited if model.phase != FAILED and model.gate is None]
    failed = [model for model in waited if model.phase == FAILED]
    if missing or len(failed) == len(models):
        return _refuse((missing or failed)[0], models, whole=whole)
    return JSONResponse({"status": "started", "model": models[0].name, **_list_phases(models)})


def _tell_ready(models: Sequence[ServedModel], journal: JournalView, *, whole: bool) -> Response:
    """Answer whether one of these models takes requests, and none is still to serve for the first time. What the
    journal cannot keep is told, and is no reason to send requests elsewhere."""
    coming = [model for model in models if model.is_coming_up]
    if coming or not any(model.serves and not describe_held(model.control.view()) for model in models):
        return _refuse((coming or models)[0], models, whole=whole)
    warnings = [f"journal: {problem.text}" for problem in journal.problems]
    more = {"warnings": warnings} if warnings else {}
    replicas = _count_serving(models, whole=whole)
    status = "degraded" if replicas["missing"] else "ready"
    return JSONResponse(
        {"status": status, "model": models[0].name, "replicas": replicas, **_list_phases(models), **more}
    )


def _tell_health(models: Sequence[ServedModel], *, whole: bool) -> Response:
    phase = sum_up_phase(models)
    if phase == FAILED:
        return _refuse(models[0], models, whole=whole)
    replicas = _count_serving(models, whole=whole)
    fields = {
        "status": "degraded" if phase == READY and replicas["missing"] else "ok",
        "phase": phase,
        "detail": _sum_up_detail(models) if whole else "",
        "replicas": replicas,
        "decode": describe_decoding(models),
    }
    return JSONResponse({**fields, **_list_phases(models)})


def _refuse(model: ServedModel, models: Sequence[ServedModel], *, whole: bool) -> Response:
    return errors.response_of(not_ready(model.control, model.name if len(models) > 1 else "", whole=whole))


def sum_up_phase(models: Sequence[ServedModel]) -> str:
    """Return the phase of the one of these models that does best."""
    phases = [model.phase for model in models]
    return next((phase for phase in _BEST_FIRST if phase in phases), phases[0])


def describe_decoding(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return how decoding goes: "stalled" where that of any of these models is. The last token is anybody's."""
    parts = [model.liveness.describe_liveness() for model in models]
    if len(parts) == 1:
        return parts[0]
    ages_s = [part["last_token_age_s"] for part in parts if part["last_token_age_s"] is not None]
    statuses = [part["status"] for part in parts]
    return {
        "status": next(status for status in ("stalled", "ok", "idle") if status in statuses),
        "phase": sum_up_phase(models),
        "last_token_age_s": min(ages_s, default=None),
        "streams": sum(part["streams"] for part in parts),
        "models": {model.name: status for model, status in zip(models, statuses, strict=True)},
    }


def _sum_up_detail(models: Sequence[ServedModel]) -> str:
    views = [(model.name, model.control.view()) for model in models]
    if len(views) == 1:
        return views[0][1].detail
    away = [
        (name, view.phase, f": {view.detail}" if view.detail else "") for name, view in views if view.phase != READY
    ]
    return "; ".join(f"{name} is {phase}{detail}" for name, phase, detail in away)


def _count_serving(models: Sequence[ServedModel], *, whole: bool) -> dict[str, Any]:
    """Return how many replicas are to serve and do, and what became of the others; not `whole`: without reasons."""
    views = [(f"{model.name}: " if len(models) > 1 else "", model.control.view()) for model in models]
    missing: list[str] = []
    for whose, view in views:
        missing += [f"{whose}{line}" for line in list_shortfall(view, whole=whole)]
        if not view.replicas and view.phase != READY:  # it has none, and may never have any
            why = f": {view.detail}" if view.detail and whole else ""
            missing.append(f"{whose.removesuffix(': ') or 'the model'} is {view.phase}{why}")
    wanted = [replica for _, view in views for replica in list_wanted(view)]
    serving = sum(replica.phase == READY for replica in wanted)
    return {"planned": len(wanted), "serving": serving, "missing": missing}


def _list_phases(models: Sequence[ServedModel]) -> dict[str, Any]:
    return {"models": {model.name: model.phase for model in models}} if len(models) > 1 else {}


def _build_stalled_error(decode: dict[str, Any]) -> RequestError:
    age = decode["last_token_age_s"]
    last = "no token yet" if age is None else f"the last token is {age:g} s old"
    return RequestError(
        f"decoding is stalled: {decode['streams']} requests are live and {last}",
        status=503,
        code="decode_stalled",
        retry_after_s=NOT_READY_RETRY_S,
    )
