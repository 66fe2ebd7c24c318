"""What crosses the link between a target's worker and a worker that holds some of its layers, and the link itself.

The target's side calls, one call after the other. Those that ask for something are answered; each answer has its
call's number, so a late one is never taken for another's. Hidden states and logits follow their message as raw float32,
and are read to the place where they stay.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from adapters.contract import BestLogits, BlockRules, Capabilities, LayerRange, LoadOptions, NumericalClass, Segment
from adapters.framing import ProtocolError, add_header, receive_exactly, receive_frame, receive_into
from device_profiles.workload import ModelSpec
from orchestrator.protocol.links.endpoint import LinkLost, notice_silence

VERSION = 4
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a longer one is a broken stream, as on the drafts' link
MAX_ARRAY_BYTES = 1024 * 1024 * 1024
"""Longer ones can only be a broken stream: 4,096 rows of 65,536 numbers have as many."""
# ADR 0077: sockets' own buffers move 4 MiB at a quarter of ZeroMQ's rate. Not tuned.
BUFFER_BYTES = 4 * 1024 * 1024
# So much goes in one piece with its message: to copy 64 KiB takes less than a second call. Not tuned.
_JOINED_BYTES = 64 * 1024
_ROWS = struct.Struct(">II")
"""Behind each message: how many rows follow, and of how many numbers each is."""
# ADR 0083: with _UNHEARD_MS a host that is gone is noticed within 11 s.
_SILENT_S, _PROBE_EVERY_S, _PROBES = 5, 2, 3
# What was sent and is not confirmed for so long: the host is gone. ADR 0083.
_UNHEARD_MS = 10_000
_T = TypeVar("_T")
Rows = NDArray[np.float32]


class WireSegment(msgspec.Struct, frozen=True, array_like=True):
    """See adapters.contract.Segment."""

    slot: int
    start: int
    tokens: list[int]
    rows: tuple[int, int]
    apart: bool
    best: int
    temperature: float

    @classmethod
    def of(cls, segment: Segment) -> WireSegment:
        known = (segment.slot, segment.start, list(segment.tokens), segment.rows)
        return cls(*known, segment.apart, segment.best, segment.temperature)

    def unpack(self) -> Segment:
        """All of its rows come whole here: the best of them are found behind it."""
        return Segment(self.slot, self.start, self.tokens, self.rows, self.apart)


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """The first call of a connection: what runtime is there, and what model? Answered by a Description."""

    version: int


class ListClasses(msgspec.Struct, frozen=True, tag="classes"):
    """See adapters.contract.ModelLoader.classes. Answered by Classes."""

    options: LoadOptions


class Load(msgspec.Struct, frozen=True, tag="load"):
    """See adapters.contract.ShardingAdapter.load_layers. Answered by Loaded. Calls to what is loaded name this call's
    number. `forwards`: of so many forwards rows may be asked for behind them (ReadRow)."""

    options: LoadOptions
    layers: LayerRange
    forwards: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """See adapters.contract.LoadedShard.forward_layers; the hidden states follow. Answered by Computed."""

    batch: list[WireSegment]


class ReadRow(msgspec.Struct, frozen=True, tag="read"):
    """Send all logits of a row of which the best came alone. `forward`: the number of the call that computed it; `row`:
    its number among those that Best has. Answered by Computed."""

    forward: int
    row: int


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """See adapters.contract.KvSlots.attach. Answered by Attached."""

    slot: int
    tokens: list[int]


class Share(msgspec.Struct, frozen=True, tag="share"):
    """See adapters.contract.KvSlots.share. Not answered, as all calls that follow."""

    slot: int
    tokens: list[int]


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """See adapters.contract.ForkableKv.fork."""

    slot: int
    source: int
    positions: int
    shared: int


class Free(msgspec.Struct, frozen=True, tag="free"):
    """See adapters.contract.KvSlots.release and discard."""

    slot: int
    garbage: bool


class Close(msgspec.Struct, frozen=True, tag="close"):
    """See adapters.contract.KvCalls.close."""


Asking = Describe | ListClasses | Load | Forward | ReadRow | Attach
Telling = Share | Fork | Free | Close


class Call(msgspec.Struct, frozen=True, array_like=True):
    """`number` grows by one with each call of a connection. `shard`: the number of the call that loaded the layers that
    are called, 0 where it is none."""

    number: int
    shard: int
    call: Asking | Telling


class Description(msgspec.Struct, frozen=True, tag="description"):
    """What a worker can load layers of. `mark`: what decides bits there, of its device and runtime; `where`: its host
    and process, for people; `weights`: of the prepared files. `activations` and `kv_cache`: the formats that were
    chosen there, "" where they were not. `digest`: of the model's files, "" for the simulated one."""

    version: int
    adapter: str
    device: str
    device_name: str
    layers: int
    mark: str
    where: str
    pid: int
    weights: str = ""
    activations: str = ""
    kv_cache: str = ""
    digest: str = ""


class Classes(msgspec.Struct, frozen=True, tag="classes"):
    """See ListClasses."""

    tiers: list[list[NumericalClass]]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """See Load. `forks`: sequences can go on in several ways. `planned_bytes`: what its process was announced to hold
    at its peak (0: its costs are not known)."""

    spec: ModelSpec
    capabilities: Capabilities
    block_rules: BlockRules
    forks: bool
    planned_bytes: int


class Best(msgspec.Struct, frozen=True, array_like=True):
    """See adapters.contract.BestLogits: its three arrays as they lie in memory."""

    ids: bytes
    logits: bytes
    masses: bytes

    @classmethod
    def pack(cls, ids: NDArray[np.uint32], logits: Rows, masses: Rows) -> Best:
        return cls(ids.tobytes(), logits.tobytes(), masses.tobytes())

    def unpack(self, read_row: Callable[[int], Rows]) -> BestLogits:
        masses = np.frombuffer(self.masses, np.float32)
        ids, logits = np.frombuffer(self.ids, np.uint32), np.frombuffer(self.logits, np.float32)
        shape = (len(masses), -1)
        return BestLogits(logits.reshape(shape), ids.reshape(shape), masses, read_row)


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """See Forward; the rows follow, but for those of which the `best` logits are enough."""

    device_ms: float
    best: Best | None = None


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """See Attach."""

    positions: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The call, or one before it that is not answered, failed. `kind`: the name of the class of adapters.contract."""

    kind: str
    message: str
    can_go_on: bool = False


Result = Description | Classes | Loaded | Computed | Attached | Refusal


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of the call of this number."""

    number: int
    result: Result


_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


class ShardLink:
    """Messages with rows behind them, over a connected socket. Calls wait; each end has one thread for it."""

    def __init__(self, connected: socket.socket) -> None:
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_silence(
                connected, silent_s=_SILENT_S, every_s=_PROBE_EVERY_S, probes=_PROBES, unheard_ms=_UNHEARD_MS
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        connected.settimeout(None)
        self.crosses_hosts = connected.family != socket.AF_UNIX
        self._socket = connected

    def send(self, message: Call | Answer, rows: Rows | None = None) -> None:
        """Send a message and the rows (two axes) behind it. Raises LinkLost."""
        shape = (0, 0) if rows is None else rows.shape
        head = add_header(_encoder.encode(message)) + _ROWS.pack(*shape)
        body = memoryview(b"")
        if rows is not None and rows.size:
            body = np.ascontiguousarray(rows, np.float32).data.cast("B")
        try:
            if len(body) <= _JOINED_BYTES:  # the other side is woken once
                self._socket.sendall(head + body)
                return
            self._socket.sendall(head)
            self._socket.sendall(body)
        except OSError as error:
            raise LinkLost(_describe_error(error)) from error

    def call(self, within_s: float | None = None) -> tuple[Call, Rows | None]:
        """Wait for the next call. Raises LinkLost, ProtocolError."""
        return self._receive(_calls, within_s)

    def answer(self, within_s: float | None) -> tuple[Answer, Rows | None]:
        """Wait for the next answer. Raises LinkLost, where none has come in time too, and ProtocolError."""
        return self._receive(_answers, within_s)

    def close(self) -> None:
        """Hang up; whoever waits at the other thread hears of it. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed, or was never there
        finally:
            self._socket.close()

    def _receive(self, decoder: msgspec.msgpack.Decoder[_T], within_s: float | None) -> tuple[_T, Rows | None]:
        try:
            self._socket.settimeout(within_s)
            packed = receive_frame(self._socket, MAX_MESSAGE_BYTES)
            count, width = _ROWS.unpack(receive_exactly(self._socket, _ROWS.size))
            rows = self._read_rows(count, width) if count else None
        except OSError as error:
            raise LinkLost(_describe_error(error)) from error
        try:
            return decoder.decode(packed), rows
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{error}") from error

    def _read_rows(self, count: int, width: int) -> Rows:
        if count * width * 4 > MAX_ARRAY_BYTES:
            raise ProtocolError(f"{count} rows of {width} numbers were announced")
        rows = np.empty((count, width), np.float32)
        if width:
            receive_into(self._socket, rows.data.cast("B"))
        return rows


def _describe_error(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
