"""What rank 0 and another rank say to each other: pickled values on a socket pair. Both are this very program.

A rank gets its RankJob first. It answers with how many bytes a block of its keys or values of one layer has, once its
weights and KV cache are there.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapters.contract import AdapterError, LayerRange, LoadOptions, NumericalClass
from adapters.framing import ANY_BYTES, add_header, receive_frame


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs. `threads` 0: the runtime's own number, or off the processor."""

    device: str
    threads: int

    def __str__(self) -> str:
        return f"{self.device}, {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else self.device


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank is to load, and on which device. `meeting`: the file at which all ranks meet."""

    prepared: Path
    options: LoadOptions
    numerical_class: NumericalClass
    layers: LayerRange
    blocks: int
    rank: int
    place: RankPlace
    meeting: Path
    patience_s: float


Operation = Literal["connect", "run", "copy", "erase", "read_blocks", "write_blocks"]
"""To meet the other ranks, once all have loaded; ForwardRunner's `run`, or what KvPool does with blocks."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is to do with its part, in the order of the calls. "connect" and "read_blocks" are answered."""

    operation: Operation
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFailed:
    """What an adapter raises; the rank ends."""

    error: AdapterError


class Link:
    """One end of the socket pair. Raises OSError where the other end is gone, or takes longer than `patience_s`."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own

    def set_patience(self, patience_s: float | None) -> None:
        """How long the other end may take; None: for ever."""
        self.socket.settimeout(patience_s)

    def send(self, value: Any) -> None:
        """Send one value. Raises OSError."""
        self.socket.sendall(add_header(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)))

    def receive(self) -> Any:
        """Wait for one value. Raises OSError; ConnectionError at the end of all."""
        return pickle.loads(receive_frame(self.socket, ANY_BYTES))  # noqa: S301  # nobody else has an end of this pair

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()
