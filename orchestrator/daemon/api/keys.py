"""Bearer keys: who may use the API, and what each key is for. Probes stay open, everything else asks for a key."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.clock import Clock, SystemClock
from orchestrator.config.keys_file import KeyRecord, digest_of, id_of, read_keys
from orchestrator.daemon.api.audit import KEY_NAME, AuditLog
from orchestrator.daemon.api.errors import response_of
from orchestrator.errors import ConfigError, RequestError
from orchestrator.telemetry import get_logger

OWNER = "outrider.owner"
"""In the scope: whose request this is, by the digest of the key."""
STRANGER = "outrider.stranger"
"""In the scope: keys are asked for here, and this request of an open route has none."""
OPEN_ROUTES = frozenset({"/started", "/live", "/health", "/health/decode", "/ready"})
ADMIN_PATH: Final = "/admin"
_METRICS_SCOPE: Final = frozenset({"/metrics", "/dashboard/events"})
_METRICS_ROUTES: Final = frozenset({"/metrics", "/version"})
_ANY_KEY: Final = frozenset({"/version", "/docs", "/openapi.json"})
_SHARED: Final = "/v1/models"  # clients of every kind look there first
_BATCHES: Final = ("/v1/files", "/v1/batches")
_KEY_HEADER: Final = "x-api-key"
_WAY_OUT = "send 'Authorization: Bearer KEY'"
# ADR 0065: one stat a second, when a request comes.
_LOOK_S: Final = 1.0

_log = get_logger(__name__)
_Stamp = tuple[int, int, int]


class Keys:
    """The keys of a file. Only digests are kept, and a comparison takes the same time whatever was sent.

    A file that has changed is read again at the next request, once a second at the most.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._clock = clock or SystemClock()
        self._records: dict[str, KeyRecord] = {}
        self._stamp: _Stamp | None = None
        self._looked_s = self._clock.monotonic_s()
        self.reread()

    def __len__(self) -> int:
        return sum(not record.revoked for record in self._records.values())

    def reread(self) -> None:
        """Take the file as it is now. Raises ConfigError, and then the keys stay as they were."""
        self._stamp = self._read_stamp()  # before the file is read: a change meanwhile is seen the next time
        lines = read_keys(self._path)
        # A key that stands there twice, revoked and not, is revoked.
        ordered = sorted(lines, key=lambda line: bool(line.record.revoked))
        self._records = {line.record.key_id: line.record for line in ordered}
        plain = [line.number for line in lines if line.plain]
        if plain:
            text = "keys stand in their file as they are: `outrider keys hash` leaves only their digests there"
            _log.warning(text, file=str(self._path), lines=plain)

    def look(self) -> None:
        """Take the file as it is now where it has changed; one that cannot be used leaves the keys as they were."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        if self._read_stamp() == self._stamp:
            return
        try:
            self.reread()
            _log.info("keys read", keys=len(self))
        except ConfigError as error:
            _log.error("the keys stay as they were", reason=str(error))

    def find(self, key: str) -> KeyRecord | None:
        digest = digest_of(key)
        # The id says nothing of the rest of the digest, nor of the key: so finding by it tells a guesser nothing.
        record = self._records.get(id_of(digest))
        return record if record is not None and hmac.compare_digest(digest, record.digest) else None

    def find_owner(self, owner: str) -> KeyRecord | None:
        record = self._records.get(owner)
        return record if record is not None and not record.revoked else None

    def hold(self, key: str) -> bool:
        record = self.find(key)
        return record is not None and not record.revoked

    def _read_stamp(self) -> _Stamp | None:
        try:
            about = self._path.stat()
        except OSError:
            return None
        return about.st_mtime_ns, about.st_size, about.st_ino


def find_scope(path: str) -> str:
    """Return which scope a key needs for a path; "" where any key will do. A route that is not known here needs
    `inference`, so that a new one is not open to all by mistake."""
    if path in _METRICS_SCOPE or path.startswith("/dashboard/requests/"):
        return "metrics"
    if path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/"):
        return "admin"
    if path in _ANY_KEY or path == _SHARED or path.startswith(f"{_SHARED}/"):
        return ""
    if any(path == route or path.startswith(f"{route}/") for route in _BATCHES):
        return "batches"
    return "inference"


def is_page_file(path: str) -> bool:
    """Return whether this is one of the dashboard's files, for which browsers ask without a key."""
    return path == "/dashboard" or path.startswith("/dashboard/static/")


class KeyGate:
    """ASGI middleware that answers 401 where no known key was sent, and 403 where the key is not for this route. Covers
    every path but OPEN_ROUTES and the dashboard's files, unknown ones too: nobody without a key learns which there are.
    `metrics_open`: those of metrics are open too."""

    def __init__(self, app: ASGIApp, keys: Keys, audit: AuditLog, *, metrics_open: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._audit = audit
        self._open = OPEN_ROUTES | _METRICS_ROUTES if metrics_open else OPEN_ROUTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._keys.look()
        sent = _read_key(scope)
        record = self._keys.find(sent) if sent else None
        known = record is not None and not record.revoked
        if known and record is not None:
            scope[OWNER] = record.key_id
            scope[KEY_NAME] = record.name or record.key_id
        if scope["path"] in self._open or is_page_file(scope["path"]):
            scope[STRANGER] = not known
            await self._app(scope, receive, send)
            return
        refusal = self._check(scope, sent, record)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await response_of(refusal, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope, sent: str, record: KeyRecord | None) -> RequestError | None:
        needed = find_scope(scope["path"])
        if record is None or record.revoked:
            reason = "revoked" if record is not None else "unknown" if sent else "missing"
            self._audit.refuse(scope, reason, needed, record)
            return _build_refusal(sent=bool(sent))
        if needed and needed not in record.scopes:
            self._audit.refuse(scope, "scope", needed, record)
            return RequestError(
                f"this API key is not for {needed} (it is for {', '.join(record.scopes) or 'nothing'})",
                status=403,
                code="key_scope",
            )
        return None


def limits_of(keys: Keys | None) -> Callable[[str], tuple[int, int]]:
    """Return what gives an owner's own limits: requests at a time and tokens a minute; 0 where it has none."""

    def find(owner: str) -> tuple[int, int]:
        record = keys.find_owner(owner) if keys is not None else None
        return (0, 0) if record is None else (record.max_requests, record.max_tokens_per_minute)

    return find


def name_key(keys: Keys | None, owner: str) -> str:
    """Return the name of an owner's key, or its id where it has none; "" of nobody's."""
    record = keys.find_owner(owner) if keys is not None else None
    return record.name or owner if record is not None else owner


def check_owner(keys: Keys | None, owner: str) -> None:
    """Raise RequestError where an owner's key is not known any more, nor for batches."""
    record = keys.find_owner(owner) if keys is not None else None
    if keys is not None and (record is None or "batches" not in record.scopes):
        raise _build_refusal(sent=True)


def read_credential(headers: Headers) -> str:
    """Return what a request says of who asks: its Authorization header, or the key in `x-api-key`."""
    given = headers.get("Authorization")
    if given is not None:
        return given
    key = headers.get(_KEY_HEADER, "").strip()
    return f"Bearer {key}" if key else ""


def _read_key(scope: Scope) -> str:
    scheme, _, key = read_credential(Headers(scope=scope)).strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _build_refusal(*, sent: bool) -> RequestError:
    message = f"this API key is not known here; {_WAY_OUT}" if sent else f"an API key is needed: {_WAY_OUT}"
    return RequestError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
