"""Where a worker is to be found by another one."""

from __future__ import annotations

import msgspec


class LinkEndpoint(msgspec.Struct, frozen=True):
    """Where a worker is to be found by another one: `addresses` in the order to try ("unix:@NAME" on its own machine,
    "tcp:HOST:PORT"), and the key that both sides prove to have. The key is never shown. `certificate` (PEM): the only
    one to be taken from other machines."""

    addresses: list[str]
    key: bytes
    certificate: str = ""

    def __repr__(self) -> str:
        return f"LinkEndpoint({self.addresses})"
