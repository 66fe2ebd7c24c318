"""What the daemon and its Ray driver process tell each other: tagged structs in MessagePack, one a frame.

Frames of workers pass through as bytes: only the daemon and the workers themselves read them.
"""

from __future__ import annotations

import msgspec

from adapters.framing import add_header
from orchestrator.protocol.contract import WorkerSpec


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message: join the Ray at `address`. Where that is "", start one, with its files in `directory`.
    `jobs`: with a job server."""

    address: str
    directory: str
    jobs: bool = False


class StartActor(msgspec.Struct, frozen=True, tag=True):
    """Start a worker, by a number that nothing else has in this process. Answered by Appeared or NotStarted."""

    number: int
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
    """The cluster can be used. `job_server`: where a Ray of our own takes jobs; "" where it takes none. `node`: the
    address of this host in it."""

    job_server: str = ""
    node: str = ""


class NotJoined(msgspec.Struct, frozen=True, tag=True):
    """It cannot, and this process ends. `away`: it may be there later, as it is."""

    reason: str
    away: bool


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Sent every second: whether the cluster's head has answered. `stale`: why this process can start no worker there
    any more, as another cluster answers at this address, or this host's node has left it; "" while it can."""

    head: bool
    stale: str = ""


class Appeared(msgspec.Struct, frozen=True, tag=True):
    """A worker's process runs. `port` is where its host's Ray node listens. `here`: on this host; `began_s`: see
    process_end. `unreserved`: why its place is not kept from others; "" where it is, or none was asked for."""

    number: int
    ip: str
    port: int
    pid: int
    began_s: float
    here: bool
    unreserved: str = ""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """`away`: the host asked for is not there now, or cannot be reached."""

    number: int
    reason: str
    away: bool = False


class PassUp(msgspec.Struct, frozen=True, tag=True):
    """A frame of events from a worker."""

    number: int
    frame: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """No more frames come from a worker. `how` it ended, as in "exited with code 1". `host`: it was not the worker that
    failed, but the Ray node that it ran on."""

    number: int
    how: str
    host: bool = False


class Gone(msgspec.Struct, frozen=True, tag=True):
    """There is no process of that worker any more."""

    number: int


class Nodes(msgspec.Struct, frozen=True, tag=True):
    """The addresses of the cluster's hosts; none where the head did not answer."""

    addresses: list[str]


class Printed(msgspec.Struct, frozen=True, tag=True):
    """Lines that a worker printed."""

    worker: str
    pid: int
    lines: list[str]


Notice = Joined | NotJoined | Answered | Appeared | NotStarted | PassUp | Ended | Gone | Nodes | Printed

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Order | Notice) -> bytes:
    """Return a message as it travels."""
    return add_header(_encoder.encode(message))


def decode_order(frame: bytes | bytearray) -> Order:
    """Return the daemon's message. Raises msgspec.DecodeError."""
    return _orders.decode(frame)


def decode_notice(frame: bytes) -> Notice:
    """Return the driver process's message. Raises msgspec.DecodeError."""
    return _notices.decode(frame)
