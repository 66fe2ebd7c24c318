"""Bearer keys: who may use the API. Probes and metrics stay open, everything else asks for a key."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.api.errors import response_of
from orchestrator.config.keys_file import read_keys
from orchestrator.errors import RequestError

OWNER = "outrider.owner"
"""In the scope: whose request this is, by the digest of the key."""
_OWNER_LETTERS = 12
OPEN_ROUTES = frozenset({"/started", "/live", "/health", "/health/decode", "/ready", "/metrics", "/version"})
_WAY_OUT = "send 'Authorization: Bearer KEY'"


class Keys:
    """The keys of a file. Only digests are kept, and a comparison takes the same time whatever was sent."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._digests: tuple[bytes, ...] = ()
        self.reread()

    def __len__(self) -> int:
        return len(self._digests)

    def reread(self) -> None:
        """Take the file as it is now. Raises ConfigError, and then the keys stay as they were."""
        self._digests = tuple(map(_digest, read_keys(self._path)))

    def hold(self, key: str) -> bool:
        """Return whether this is one of the keys."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    # Digests have one length, so comparing them tells nothing about a key's.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyGate:
    """ASGI middleware that answers 401 where no known key was sent. Covers every path but OPEN_ROUTES, unknown ones
    too: nobody without a key learns which there are."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("Authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer" and self._keys.hold(key.strip()):
            scope[OWNER] = _digest(key.strip()).hex()[:_OWNER_LETTERS]
            await self._app(scope, receive, send)
            return
        await response_of(_refusal(sent=bool(key)))(scope, receive, send)


def _refusal(*, sent: bool) -> RequestError:
    message = f"this API key is not known here; {_WAY_OUT}" if sent else f"an API key is needed: {_WAY_OUT}"
    return RequestError(
        message, status=401, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )
