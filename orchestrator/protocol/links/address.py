"""Where a worker is to be found by another one."""

from __future__ import annotations

import msgspec


class LinkEndpoint(msgspec.Struct, frozen=True):
    """Where a worker is to be found by another one."""

    addresses: list[str]
    """In the order to try: "unix:@NAME" on its own machine, "tcp:HOST:PORT"."""
    key: bytes
    """Both sides prove to have it. It is never shown."""
    certificate: str = ""
    """The only one (PEM) to be taken from other machines."""

    def __repr__(self) -> str:
        return f"LinkEndpoint({self.addresses})"
