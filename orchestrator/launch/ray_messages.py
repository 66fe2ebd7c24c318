"""What the daemon and its Ray driver process tell each other: tagged structs in MessagePack, one a frame.

Frames of workers pass through as bytes: only the daemon and the workers themselves read them.
"""

from __future__ import annotations

import msgspec

from adapters.framing import add_header
from orchestrator.protocol.contract import WorkerSpec


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message: join a Ray, or start one."""

    address: str
    """"": start one."""
    directory: str
    """For the files of one that is started."""
    jobs: bool = False
    """With a job server."""


class StartActor(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. Answered by Appeared or NotStarted."""

    number: int
    """Nothing else has it in this process."""
    spec: WorkerSpec


class PassDown(msgspec.Struct, frozen=True, tag=True):
    """A frame of commands for a worker that has appeared."""

    number: int
    frame: bytes


class EndActor(msgspec.Struct, frozen=True, tag=True):
    """End a worker's process, whatever it does. Answered by Gone, which may take as long as its host is cut off."""

    number: int


class AskNodes(msgspec.Struct, frozen=True, tag=True):
    """Answered by Nodes."""


Order = Join | StartActor | PassDown | EndActor | AskNodes


class Joined(msgspec.Struct, frozen=True, tag=True):
    job_server: str = ""
    """Where a Ray of our own takes jobs; "" where it takes none."""
    node: str = ""
    """The address of this host in it."""


class NotJoined(msgspec.Struct, frozen=True, tag=True):
    """It cannot, and this process ends."""

    reason: str
    away: bool
    """It may be there later, as it is."""


class Answered(msgspec.Struct, frozen=True, tag=True):
    head: bool
    """Whether the cluster's head has answered."""
    stale: str = ""
    """Why this process can start no worker there any more; "" while it can. Another cluster answers at this address, or
    this host's node has left it."""
    alive: tuple[str, ...] = ()
    """The addresses of the hosts that it knows."""
    lost: tuple[str, ...] = ()
    """Of those that it knew, and that did not take their leave."""


class Appeared(msgspec.Struct, frozen=True, tag=True):
    """A worker's process runs."""

    number: int
    ip: str
    port: int
    """Where its host's Ray node listens."""
    pid: int
    began_s: float
    """See process_end."""
    here: bool
    """On this host."""
    unreserved: str = ""
    """Why its place is not kept from others; "" where it is, or none was asked for."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    number: int
    reason: str
    away: bool = False
    """The host that it was for is not there now, or cannot be reached."""


class PassUp(msgspec.Struct, frozen=True, tag=True):
    """A frame of events from a worker."""

    number: int
    frame: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """No more frames come from a worker."""

    number: int
    how: str
    """As in "exited with code 1"."""
    host: bool = False
    """It was not the worker that failed, but the Ray node that it ran on."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """There is no process of that worker any more."""

    number: int


class Nodes(msgspec.Struct, frozen=True, tag=True):
    """The addresses of the cluster's hosts; none where the head did not answer."""

    addresses: list[str]


class Printed(msgspec.Struct, frozen=True, tag=True):
    worker: str
    pid: int
    lines: list[str]


Notice = Joined | NotJoined | Answered | Appeared | NotStarted | PassUp | Ended | Gone | Nodes | Printed

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Order | Notice) -> bytes:
    return add_header(_encoder.encode(message))


def decode_order(frame: bytes | bytearray) -> Order:
    """Return the daemon's message. Raises msgspec.DecodeError."""
    return _orders.decode(frame)


def decode_notice(frame: bytes) -> Notice:
    """Return the driver process's message. Raises msgspec.DecodeError."""
    return _notices.decode(frame)
