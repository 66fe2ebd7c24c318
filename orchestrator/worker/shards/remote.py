"""Layers of a target in another process, seen from the target's worker: as a runtime, and as a loaded shard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from adapters import contract
from adapters.best_logits import MOST_BEST
from adapters.contract import (
    AdapterError,
    AdapterUnavailable,
    DeviceLost,
    Hidden,
    LayerRange,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Progress,
    RuntimeFailed,
    Segment,
    ShardResult,
)
from adapters.framing import ProtocolError
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import LinkLost, knock
from orchestrator.worker.shards import protocol as wire

# ADR 0083: asking a runtime for its devices and classes takes seconds (torch two). Not tuned.
_DESCRIBED_S = 30.0
_LOADED_S = 1800.0
"""Preparing and compiling take minutes on some devices; a process that ends, or a host, is noticed before. ADR 0083: as
LOAD_STAGE_S."""
_COMPUTED_S = 600.0
"""A forward that hangs is noticed by the watchdog of rounds long before; this only bounds a thread's life. ADR 0083."""

ResultT = TypeVar("ResultT", bound=wire.Result)


class RemoteRuntime:
    """The runtime in a worker for layers; see adapters.contract.ShardingAdapter and ModelLoader. One thread uses it."""

    def __init__(self, endpoint: LinkEndpoint, stages: int = 1) -> None:
        """Connects. `stages`: so many forwards of a model may be under way. Raises DeviceLost where nobody answers,
        AdapterUnavailable where it is another version's."""
        self._stages = stages
        self._caller = _Caller(endpoint)
        self.description = self._caller.ask(wire.Describe(wire.VERSION), wire.Description, _DESCRIBED_S)
        if self.description.version != wire.VERSION:
            self._caller.close()
            raise AdapterUnavailable(
                f"the worker for layers ({self.description.where}) speaks version {self.description.version}, not "
                f"{wire.VERSION}: install the same outrider on all hosts"
            )
        self.name, self.device = self.description.adapter, self.description.device

    def close(self) -> None:
        """Hang up: the worker closes what it has loaded. Idempotent."""
        self._caller.close()

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return self._caller.ask(wire.ListClasses(options), wire.Classes, _DESCRIBED_S).tiers

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> RemoteShard:
        """`prepared` is not read: the worker has its own."""
        number, loaded = self._caller.load(wire.Load(options, layers, self._stages))
        return RemoteShard(self._caller, number, loaded, layers)


class RemoteShard:
    """Layers that another process has loaded; see adapters.contract.LoadedShard. One thread calls it.

    What it holds is counted by whoever calls (`adapters.stage`): calls about slots are told, and not answered.
    """

    def __init__(self, caller: _Caller, number: int, loaded: wire.Loaded, layers: LayerRange) -> None:
        self._caller = caller
        self._number = number
        self.layers = layers
        self.spec = loaded.spec
        gives_best = caller.crosses_hosts and layers.end == loaded.spec.layers
        self.capabilities = replace(loaded.capabilities, best_logits=MOST_BEST if gives_best else 0)
        self.block_rules = loaded.block_rules
        self.planned_bytes = loaded.planned_bytes
        self._forks = loaded.forks

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        call = wire.Forward([wire.WireSegment.of(segment) for segment in batch])
        number, computed, rows = self._caller.ask_with_rows(call, hidden, wire.Computed, _COMPUTED_S, self._number)
        if rows is None:
            rows = np.empty((0, self.spec.outputs), np.float32)
        best = None if computed.best is None else computed.best.unpack(partial(self._read_row, number))
        return ShardResult(rows, computed.device_ms, stays=True, best=best)

    def _read_row(self, forward: int, row: int) -> wire.Rows:
        call = wire.ReadRow(forward, row)
        rows = self._caller.ask_with_rows(call, None, wire.Computed, _COMPUTED_S, self._number)[2]
        if rows is None:
            raise DeviceLost(f"{self.layers}: row {row} of forward {forward} is not there any more")
        return rows.reshape(-1)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return self._caller.ask(wire.Attach(slot, list(tokens)), wire.Attached, _COMPUTED_S, self._number).positions

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        self._caller.tell(wire.Share(slot, list(tokens)), self._number)

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        if not self._forks:
            raise contract.Unsupported(f"{self.layers}: sequences cannot go on in several ways there")
        self._caller.tell(wire.Fork(slot, source, positions, shared), self._number)

    def release(self, slot: int) -> None:
        self._caller.tell(wire.Free(slot, garbage=False), self._number)

    def discard(self, slot: int) -> None:
        self._caller.tell(wire.Free(slot, garbage=True), self._number)

    def close(self) -> None:
        with suppress(DeviceLost):
            self._caller.tell(wire.Close(), self._number)


class _Caller:
    """Calls a worker for layers, one call after the other. Thread-safe: models may be loaded beside each other."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        try:
            self._link = wire.ShardLink(knock(endpoint))
        except LinkLost as error:
            raise DeviceLost(f"the worker for layers cannot be reached: {error}") from error
        self._lock = threading.Lock()
        self._where = ""
        self._number = 0

    @property
    def crosses_hosts(self) -> bool:
        return self._link.crosses_hosts

    def ask(self, call: wire.Asking, kind: type[ResultT], within_s: float, shard: int = 0) -> ResultT:
        """Return what a call gives. Raises what the other side raised, and DeviceLost where it is lost."""
        return self.ask_with_rows(call, None, kind, within_s, shard)[1]

    def load(self, call: wire.Load) -> tuple[int, wire.Loaded]:
        """Return the number that loaded layers are called by, and what they are. Raises as `ask` does."""
        with self._lock:
            return self._ask(call, None, wire.Loaded, _LOADED_S, 0)[:2]

    def ask_with_rows(
        self, call: wire.Asking, rows: wire.Rows | None, kind: type[ResultT], within_s: float, shard: int
    ) -> tuple[int, ResultT, wire.Rows | None]:
        """As `ask`, with rows that go along and come back, and the call's number."""
        with self._lock:
            return self._ask(call, rows, kind, within_s, shard)

    def tell(self, call: wire.Telling, shard: int) -> None:
        """Make a call that is not answered; where it fails, the next one that is says so. Raises DeviceLost."""
        with self._lock:
            try:
                self._send(call, None, shard)
            except LinkLost as error:
                raise self._lose(str(error)) from error

    def _ask(
        self, call: wire.Asking, rows: wire.Rows | None, kind: type[ResultT], within_s: float, shard: int
    ) -> tuple[int, ResultT, wire.Rows | None]:
        try:
            number = self._send(call, rows, shard)
            answer, given = self._link.answer(within_s)
        except (LinkLost, ProtocolError) as error:
            raise self._lose(str(error)) from error
        result = answer.result
        if answer.number != number:
            raise self._lose(f"it answered call {answer.number} where {number} was asked")
        if isinstance(result, wire.Refusal):
            raise _unpack_refusal(result)
        if not isinstance(result, kind):
            raise self._lose(f"it answered with {type(result).__name__} where {kind.__name__} was asked for")
        if isinstance(result, wire.Description):
            self._where = result.where
        return number, result, given

    def close(self) -> None:
        self._link.close()

    def _send(self, call: wire.Asking | wire.Telling, rows: wire.Rows | None, shard: int) -> int:
        self._number += 1
        self._link.send(wire.Call(self._number, shard, call), rows)
        return self._number

    def _lose(self, why: str) -> DeviceLost:
        with suppress(OSError):
            self._link.close()
        return DeviceLost(f"the worker for layers ({self._where or 'not greeted yet'}) is lost: {why}")


def pack_refusal(error: AdapterError) -> wire.Refusal:
    can_go_on = isinstance(error, OutOfMemory) and error.can_go_on
    return wire.Refusal(type(error).__name__, str(error), can_go_on)


def _unpack_refusal(refusal: wire.Refusal) -> AdapterError:
    if refusal.kind == OutOfMemory.__name__:
        return OutOfMemory(refusal.message, can_go_on=refusal.can_go_on)
    kind = getattr(contract, refusal.kind, None)
    if isinstance(kind, type) and issubclass(kind, AdapterError):
        return kind(refusal.message)
    return RuntimeFailed(f"{refusal.kind}: {refusal.message}")
