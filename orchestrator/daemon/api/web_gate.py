"""Keeps web pages from using the daemon: a browser on this machine reaches it, and runs whatever a page says.

A page of another site can send requests here in two ways. It sends them across sites, and then its browser says its
Origin. Or its own name is made to resolve to our address (DNS rebinding), and then the name is in the Host header.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.errors import response_of
from orchestrator.errors import RequestError

_ANY: Final = "*"
_CHANGES_NOTHING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def list_own_names() -> frozenset[str]:
    """Return the names of this machine, as the system has them; nobody is asked."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0]} - {""})


@dataclass(frozen=True, slots=True)
class WebRules:
    """Names and origins that are allowed beside our own. `check_host`: whether names are looked at."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    check_host: bool = True
    own_names: frozenset[str] = field(default_factory=list_own_names)

    def allows_host(self, name: str) -> bool:
        """Return whether requests may be sent to this name. Addresses are: no page's name is one."""
        if not self.check_host or name in self.own_names or _is_address(name) or name.endswith(".localhost"):
            return True
        return any(_matches(name, allowed) for allowed in self.hosts)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of this origin may ask. `host`: what it sent the request to, with its port; the pages
        that the daemon itself serves have that as origin."""
        if origin in self.origins or _ANY in self.origins:
            return True
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


class WebGate:
    """ASGI middleware that answers 403 to web pages which were not allowed."""

    def __init__(self, app: ASGIApp, rules: WebRules, audit: AuditLog) -> None:
        self._app = app
        self._rules = rules
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await response_of(refusal, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("Host", "").strip().lower()
        if host and not self._rules.allows_host(strip_port(host)):
            text = "this name is not one of the daemon's: use its address, or list the name in api.allowed_hosts"
            return self._refuse(scope, "host", text)
        origins = [origin.strip().lower() for origin in headers.getlist("Origin")]
        across = headers.get("Sec-Fetch-Site", "") == "cross-site" and scope["method"] not in _CHANGES_NOTHING
        strange = any(not self._rules.allows_origin(origin, host) for origin in origins)
        if strange or (across and not origins):
            text = "pages of this origin may not use the daemon; list it in api.allowed_origins where they should"
            return self._refuse(scope, "origin", text)
        return None

    def _refuse(self, scope: Scope, what: str, message: str) -> RequestError:
        self._audit.refuse(scope, what, "", None)
        return RequestError(message, status=403, kind="permission_error", code=f"{what}_not_allowed")


def strip_port(host: str) -> str:
    """Return the name or address of a Host header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def normalise(names: Iterable[str]) -> tuple[str, ...]:
    """Return names or origins as headers are compared with them."""
    return tuple(name.strip().lower().rstrip("/") for name in names)


def _matches(name: str, allowed: str) -> bool:
    if allowed == _ANY or name == allowed:
        return True
    return allowed.startswith("*.") and name.endswith(allowed[1:])


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
