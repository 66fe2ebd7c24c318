"""Admin routes. They are served on a Unix socket that belongs to the daemon's user."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query
from starlette.responses import Response

from adapters.store_usage import StoreUsage
from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.api import errors
from orchestrator.daemon.api.admin import canary, daemon, health, quarantine, requests, speculation, workers
from orchestrator.daemon.api.admin.targets import AdminTarget, AdminTargets
from orchestrator.daemon.api.audit import AdminAudit, AuditLog
from orchestrator.daemon.api.body_work import DeadlyBodies
from orchestrator.daemon.api.gates import NO_TELEMETRY
from orchestrator.daemon.control.port import DeviceView, DraftView, ReplicaView, Totals
from orchestrator.daemon.control.replicas.shortfall import list_missing_of_plan, list_shortfall, list_wanted
from orchestrator.daemon.journal.standing import JournalView
from orchestrator.protocol.ready import Ready

_READY_PARTS = ("model", "device", "precision", "drafting", "kv", "shards")
_VIEW_FIELDS = (
    *("phase", "detail", "runtime", "worker", "uptime_s", "streams", "gauges", "taken_over", "changed_groups"),
    *("health", "scaling", "draft_store", "recent_outputs", "cluster_away", "residency", "plan"),
)
_SHOWN = tuple(field.name for field in dataclasses.fields(DeviceLoad) if field.name != "sampled_s")


def create_admin_app(
    targets: Sequence[AdminTarget],
    api_url: str,
    version: str,
    audit: AuditLog | None = None,
    name_owner: requests.NameOwner = lambda _: "",
    reloading: daemon.ReloadPort | None = None,
    log: daemon.KeptLog | None = None,
    pages: daemon.SupportPages | None = None,
    alerts: AlertWatch | None = None,
    journal: Callable[[], JournalView] = JournalView,
    deadly: DeadlyBodies | None = None,
    measure_store: Callable[[], StoreUsage] | None = None,
) -> FastAPI:
    """Return the app. `api_url` is where the public API listens. `audit` has each call that may change something.
    `name_owner` returns the name of a key by its id. `reloading`: None has no route for it. `log` is the daemon's own,
    `pages` are for its support, `alerts` is its own watch, and `journal` returns how that stands. `deadly`: the bodies
    that ended the daemon. `measure_store` returns what prepared models take; it reads the disk."""
    app = FastAPI(
        title="Outrider admin",
        version=version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry=NO_TELEMETRY,
    )
    errors.install_error_handlers(app)
    app.add_middleware(AdminAudit, audit=audit or AuditLog())
    served = AdminTargets(targets)
    speculation.install_speculation_route(app, served)

    @app.get("/admin/status")
    async def status(most_devices: Annotated[int | None, Query(ge=0)] = None) -> Response:
        first, *further = (describe_target(target, most_devices) for target in targets)
        reload = reloading.describe() if reloading is not None else None
        kept = dataclasses.asdict(journal())
        store = await asyncio.to_thread(measure_store) if measure_store is not None else None
        fields = {"version": version, **first, "api": api_url, "models": further, "reload": reload, "journal": kept}
        fields["store"] = store.to_status() if store is not None else None
        return Response(await asyncio.to_thread(write_status, fields), media_type="application/json")

    @app.get("/admin/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        target = served.choose(model)[0]
        view = target.control.view()
        running = {**(target.running_plan() or {"plan": None}), "unmet": list(map(dataclasses.asdict, view.unmet))}
        if view.plan is None:  # then cluster.yaml is the plan
            wanted = list_wanted(view)
            missing = list_missing_of_plan(wanted, {replica.engine: replica.engine for replica in wanted})
            return {**running, "missing": list(map(dataclasses.asdict, missing))}
        fields = dataclasses.asdict(view.plan)
        return {**running, **{key: fields[key] for key in ("missing", "drifted", "doubts", "to_measure")}}

    @app.get("/admin/alerts")
    async def show_alerts() -> dict[str, Any]:
        return {"alerts": [], "ended": []} if alerts is None else alerts.view()

    canary.install_canary_routes(app, next((target.trial for target in targets if target.trial is not None), None))
    quarantine.install_quarantine_routes(app, served, deadly)
    health.install_health_routes(app, served)
    requests.install_request_routes(app, served, name_owner)
    workers.install_worker_routes(app, served)
    daemon.install_log_route(app, log or daemon.KeptLog())
    daemon.install_support_routes(app, pages or daemon.SupportPages())
    if reloading is not None:
        daemon.install_reload_route(app, reloading)
    return app


def describe_target(target: AdminTarget, most_devices: int | None = None) -> dict[str, Any]:
    """Return a target's state, with its workers' views as they are. `most_devices`: of so many, the busiest."""
    control, view = target.control, target.control.view()
    devices: Sequence[DeviceView] = view.devices
    if most_devices is not None and len(devices) > most_devices:
        devices = heapq.nlargest(most_devices, devices, key=lambda device: device.load.utilisation or 0.0)
    bounds, trial = target.bounds(), target.trial
    return {
        "model": target.name(),
        **{name: msgspec.to_builtins(getattr(view, name)) for name in _VIEW_FIELDS},
        "acceptance": {"default": bounds.default, "tolerance_allowed": bounds.tolerance_allowed},
        "ready": ready_of(view.ready) if view.ready is not None else None,
        "totals": totals_of(view.totals),
        "losses": [{"engine": of, "kind": kind, "count": count} for (of, kind), count in view.losses.items()],
        "kv_moves": [{"engine": of, **dataclasses.asdict(moves)} for of, moves in view.kv_moves.items()],
        "quarantined": len(control.steering.list_quarantined()),
        "drafts": view.drafts,
        "replicas": view.replicas,
        "standbys": view.standbys,
        "devices": [describe_device(device) for device in devices],
        "devices_left_out": len(view.devices) - len(devices),
        "slo": target.slo(),
        "costs": target.costs(),
        "speed": target.speed(),
        "hosts": target.hosts(),
        "serving": {"planned": len(list_wanted(view)), "missing": list_shortfall(view)},
        "cluster": msgspec.to_builtins(view.cluster_members),
        "speculation": speculation.describe_overrides(view, trial),
        "canary": canary.trial_of(trial.view()) if trial is not None else None,
    }


def write_status(status: dict[str, Any]) -> bytes:
    """Return a status as JSON. Nobody changes a view, so that this may take its time in a thread of its own."""
    for target in (status, *status["models"]):
        for name, describe in (("drafts", draft_of), ("replicas", replica_of), ("standbys", replica_of)):
            target[name] = [describe(view) for view in target[name]]
    return msgspec.json.encode(status)


def describe_device(device: DeviceView) -> dict[str, Any]:
    load = device.load
    idle = None if load.utilisation is None else max(0.0, 1.0 - load.utilisation)
    shown = {name: getattr(load, name) for name in _SHOWN}
    return {"name": device.name, **shown, "ours": load.ours, "idle": idle, "hot": device.hot, "age_s": device.age_s}


def replica_of(replica: ReplicaView) -> dict[str, Any]:
    shown = msgspec.to_builtins(dataclasses.replace(replica, route=None, ready=None))
    del shown["route"]
    if replica.ready is not None:
        shown["ready"] = ready_of(replica.ready)
    return {**shown, "last_route": replica.last_route, "totals": totals_of(replica.totals)}


def ready_of(ready: Ready) -> dict[str, Any]:
    """Return what a target's worker says of itself, all of it in one object."""
    shown: dict[str, Any] = msgspec.to_builtins(ready)
    for part in _READY_PARTS:
        shown |= shown.pop(part)
    return shown


def draft_of(draft: DraftView) -> dict[str, Any]:
    """Return a draft worker's state; the key to its endpoint is left out. `target`: the first that it drafts for."""
    shown: dict[str, Any] = msgspec.to_builtins(dataclasses.replace(draft, ready=None))
    shown["target"] = next(iter(draft.targets), "")
    if draft.ready is not None:
        ready = msgspec.to_builtins(draft.ready)
        del ready["endpoint"]
        shown["ready"] = {**ready, "door": draft.ready.endpoint.addresses}
    return shown


def totals_of(totals: Totals) -> dict[str, Any]:
    """Return the totals with acceptance rate (accepted / drafted) and mean acceptance length
    (1 + accepted / drafts); both are None before the first draft."""
    by_drafter = {name: {"drafted": pair[0], "accepted": pair[1]} for name, pair in totals.by_drafter.items()}
    return {
        **msgspec.to_builtins(totals),
        "by_drafter": by_drafter,
        "acceptance_rate": totals.accepted / totals.drafted if totals.drafted else None,
        "mean_acceptance_length": 1.0 + totals.accepted / totals.drafts if totals.drafts else None,
    }
