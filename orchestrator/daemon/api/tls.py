"""The certificate of the endpoint, which a running daemon reads again."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from orchestrator.config.tls import load_context


class Certificate:
    """A certificate with its chain, and its key. `context` is a server's: new connections have what was read last."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises ConfigError."""
        self._certificate, self._key = certificate, key
        self.context = _RenewableContext(ssl.PROTOCOL_TLS_SERVER)
        self.reread()

    def reread(self) -> None:
        """Take the files as they are now. Raises ConfigError, and then all stays as it was."""
        self.context.current = load_context(self._certificate, self._key)


class _RenewableContext(ssl.SSLContext):
    """Hands each connection the current context: one in use would keep a certificate of another kind of key."""

    current: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """See ssl.SSLContext; asyncio opens connections by this."""
        return self.current.wrap_bio(*arguments, **named)
