"""Commands and events as MessagePack frames, the same bytes over a socket (`local`) and over Ray (`ray_runtime`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.protocol.commands import Command
from orchestrator.protocol.events import Event

ORPHAN_GRACE_S = 1.0
"""From the Stop that an orphan gives itself to its end. Not tuned."""

_commands = msgspec.msgpack.Decoder(list[Command])
_events = msgspec.msgpack.Decoder(list[Event])
_encoder = msgspec.msgpack.Encoder()


class Adoption(msgspec.Struct, frozen=True):
    """The first frame of a daemon that takes over a worker that another one has left behind."""

    digest: str
    """Of the worker that it wants."""
    wait_s: float
    """How long that one is to wait for the next daemon."""


def encode(messages: Sequence[Command] | Sequence[Event]) -> bytes:
    return _encoder.encode(list(messages))


def decode_commands(frame: bytes | bytearray) -> list[Command]:
    """Return a frame's commands. Raises msgspec.DecodeError."""
    return _commands.decode(frame)


def decode_events(frame: bytes) -> list[Event]:
    """Return a frame's events. Raises msgspec.DecodeError."""
    return _events.decode(frame)
