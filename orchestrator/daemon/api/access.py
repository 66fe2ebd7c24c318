"""Who may use the API: the gates that stand before every route, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.keys import KeyGate, Keys
from orchestrator.daemon.api.shares import KeyShares, ShareGate
from orchestrator.daemon.api.web_gate import WebGate, WebRules, normalise

_SHOWN_HEADERS = ("X-Request-Id", "Retry-After")


@dataclass(frozen=True, slots=True)
class Access:
    """What is asked beside keys. See `config.model.Api`."""

    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    metrics_open: bool = False
    audit: AuditLog = field(default_factory=AuditLog)


def install_gates(app: FastAPI, keys: Keys | None, access: Access, shares: KeyShares) -> None:
    """Put the gates before the app's routes: web pages are refused first, then keys, then those who have their share.
    What is added last is asked first. `keys`: None asks for none."""
    if keys is not None:
        app.add_middleware(ShareGate, shares=shares)
        app.add_middleware(KeyGate, keys=keys, audit=access.audit, metrics_open=access.metrics_open)
    origins = normalise(access.allowed_origins)
    hosts = normalise(access.allowed_hosts)
    rules = WebRules(hosts, origins, check_host=keys is None or bool(hosts))
    app.add_middleware(WebGate, rules=rules, audit=access.audit)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(_SHOWN_HEADERS),
        )
