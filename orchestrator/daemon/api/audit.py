"""Who changed something, and whose key was refused: lines of the log, and of a file of their own where one is named.

No line holds a key, a prompt or a path that a client made up.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.clock import Clock, SystemClock
from orchestrator.config.keys_file import KeyRecord
from orchestrator.telemetry import get_logger

_REFUSALS_A_SECOND: Final = 20.0
"""More are counted and not written: whoever tries keys is not to fill the disk. ADR 0065."""

KEY_NAME: Final = "outrider.key_name"
"""In the scope: the name of the key that a request bears, or its id."""
_CHANGED: Final = "outrider.changed"

_log = get_logger(__name__)


class AuditLog:
    """Writes records. `path`: the file that gets them too, opened anew for each, so that it may be rotated."""

    def __init__(self, path: Path | None = None, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._room = _REFUSALS_A_SECOND
        self._refilled_s = self._clock.monotonic_s()
        self._left_out = 0
        self._failed = False

    def refuse(self, scope: Scope, reason: str, needed: str, record: KeyRecord | None) -> None:
        """Record a refused use of a key. `reason`: missing, unknown, revoked, scope, host or origin."""
        now_s = self._clock.monotonic_s()
        self._room = min(_REFUSALS_A_SECOND, self._room + (now_s - self._refilled_s) * _REFUSALS_A_SECOND)
        self._refilled_s = now_s
        if self._room < 1.0:
            self._left_out += 1
            return
        self._room -= 1.0
        left_out, self._left_out = self._left_out, 0
        self._write(
            "access refused",
            reason=reason,
            method=scope["method"],
            scope=needed or None,
            key=record.name or record.key_id if record is not None else None,
            client=_client(scope),
            left_out=left_out,
        )

    def admin(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", None)
        key = {"key": scope[KEY_NAME]} if KEY_NAME in scope else {}
        changed = {"changed": scope[_CHANGED]} if _CHANGED in scope else {}
        by = _client(scope)
        self._write("admin call", method=scope["method"], route=route, status=status, by=by, **key, **changed)

    def _write(self, event: str, **fields: Any) -> None:
        _log.info(event, **fields)
        if self._path is None:
            return
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o640)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.error("the audit file cannot be written", file=str(self._path), reason=error.strerror)
            self._failed = True


class AdminAudit:
    """ASGI middleware of the admin app: each call that may change something is recorded."""

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._audit.admin(scope, status)


def note_change(scope: Scope, changed: str) -> None:
    """Let the audit log say what a call has changed. To be told in names of ours, never in a client's words."""
    scope[_CHANGED] = changed


def _client(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] or None if client else None
