"""A worker that holds some layers of a target: serves whoever has its key, the newest connection alone."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from adapters.best_logits import find_best_logits
from adapters.contract import (
    AdapterError,
    DeviceLost,
    ForkableKv,
    LayerRange,
    LoadedShard,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    RuntimeFailed,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.framing import ProtocolError
from orchestrator.machine.process_memory import peak_rss_bytes
from orchestrator.protocol.commands import Command, Stop
from orchestrator.protocol.contract import Step
from orchestrator.protocol.events import Event, ShardReady
from orchestrator.protocol.failures import describe_loading_failure
from orchestrator.protocol.links.endpoint import EndpointServer, LinkLost
from orchestrator.protocol.links.reception import Reception
from orchestrator.worker.loading.memory import MemoryMeter
from orchestrator.worker.shards import protocol as wire
from orchestrator.worker.shards.remote import pack_refusal

Emit = Callable[[Event], None]
_Guests = queue.SimpleQueue["wire.ShardLink | None"]


class ServedLayers:
    """Loaded layers, and of their last `forwards` the rows that may be read behind them."""

    def __init__(self, loaded: LoadedLayers, forwards: int) -> None:
        self.loaded = loaded
        self._rows: deque[tuple[int, dict[int, wire.Rows]]] = deque(maxlen=forwards)

    def run_forward(
        self, number: int, batch: Sequence[wire.WireSegment], hidden: wire.Rows | None
    ) -> tuple[wire.Computed, wire.Rows | None]:
        """Compute what the call of this number asks for."""
        computed = self.loaded.run_forward([segment.unpack() for segment in batch], hidden)
        rows = computed.output
        count = max((segment.best for segment in batch if segment.rows[0] < segment.rows[1]), default=0)
        if not count:
            return wire.Computed(computed.device_ms), rows
        wanted = [segment.rows[1] - segment.rows[0] for segment in batch]
        bests = np.repeat([segment.best for segment in batch], wanted)
        alone = bests > 0
        few = rows if alone.all() else rows[alone]
        temperatures = np.repeat([segment.temperature for segment in batch], wanted)[alone]
        logits, ids, masses = find_best_logits(few, min(count, few.shape[1]), temperatures.tolist())
        if count > 1:  # one says who is chosen
            self._rows.append((number, {int(row): few[row].copy() for row in np.flatnonzero(bests[alone] > 1)}))
        return wire.Computed(computed.device_ms, wire.Best.pack(ids, logits, masses)), rows[~alone]

    def read_row(self, question: wire.ReadRow) -> wire.Rows:
        """Return all logits of a row, shape (1, vocabulary). Raises DeviceLost."""
        for number, rows in self._rows:
            if number == question.forward and question.row in rows:
                return rows[question.row][None]
        raise DeviceLost(f"row {question.row} of forward {question.forward} is not there any more")


class LoadedLayers(NamedTuple):
    """`planned_bytes`: what this process was announced to hold at its peak, 0 where that is not known. `memory`: None
    where nothing is compared with it."""

    shard: LoadedShard
    planned_bytes: int = 0
    memory: MemoryMeter | None = None

    def run_forward(self, batch: Sequence[Segment], hidden: wire.Rows | None) -> ShardResult:
        """See adapters.contract.CountedShard.forward_layers."""
        computed = self.shard.forward_layers(batch, hidden)
        if self.memory is not None:
            wanted = sum(end - start for start, end in (segment.rows for segment in batch))
            self.memory.observe_forward(sum(len(segment.tokens) for segment in batch), wanted, len(batch))
        return computed

    def note_held(self, *, idle: bool = False) -> None:
        """Keep what this process held at most; it may write a file, `idle` or now and then. What hinders that is no
        matter of the layers."""
        if self.memory is not None:
            with suppress(AdapterError, OSError):
                self.memory.observe_held(peak_rss_bytes(), idle=idle, now_s=time.monotonic())

    def close(self) -> None:
        """Give back what the layers hold. Idempotent."""
        self.note_held(idle=True)
        self.shard.close()


class LayerSource(Protocol):
    """A prepared model on this host, and the runtime that loads its layers."""

    @property
    def description(self) -> wire.Description: ...

    def classes(self, options: LoadOptions) -> list[list[NumericalClass]]:
        """See adapters.contract.ModelLoader.classes."""
        ...

    def load(self, options: LoadOptions, layers: LayerRange) -> LoadedLayers:
        """See adapters.contract.ShardingAdapter.load_layers."""
        ...


class ShardEngine:
    """Implements protocol.contract.Engine. `prepare` makes the model ready to be loaded from. `host`: the address that
    other machines reach this one at, "" where none does."""

    def __init__(self, prepare: Callable[[Emit], LayerSource], host: str) -> None:
        self._prepare, self._host = prepare, host
        self._guests: _Guests = queue.SimpleQueue()
        self._step: Step | None = Step("load", -1.0)
        self._lock = threading.Lock()
        self._served: wire.ShardLink | None = None
        self._stopped = False

    def submit(self, command: Command) -> None:
        """It takes Stop alone; all else comes over the link."""
        if isinstance(command, Stop):
            self._stopped = True
            self._guests.put(None)
            self._hang_up()

    def describe_step(self) -> Step | None:
        """What it is at once it is ready, its target's worker says."""
        return self._step

    def run(self, emit: Emit) -> None:
        try:
            source = self._prepare(emit)
        except AdapterError as error:
            emit(describe_loading_failure(error))
            return
        self._step = None
        server = EndpointServer(self._host)
        reception = Reception(server, wire.ShardLink, self._arrive)
        reception.open()
        try:
            emit(ShardReady(server.endpoint, source.description.pid))
            while not self._stopped and (link := self._guests.get()) is not None:
                self._serve(link, source)
        finally:
            self._stopped = True
            reception.close()
            server.close()

    def _arrive(self, link: wire.ShardLink) -> None:
        """A target has connected: whoever did before it is gone. Thread-safe."""
        self._hang_up()
        self._guests.put(link)

    def _hang_up(self) -> None:
        with self._lock:
            if self._served is not None:
                self._served.close()

    def _serve(self, link: wire.ShardLink, source: LayerSource) -> None:
        with self._lock:
            self._served = link
        served = _ServedTarget(link, source)
        try:
            while not self._stopped:
                served.obey_next()
        except (LinkLost, ProtocolError):
            pass  # the target's worker ended, or another one has come
        finally:
            with self._lock:
                self._served = None
            link.close()
            served.close()


class _ServedTarget:
    """One connection, and the layers that it has loaded, by the numbers of the calls that did so."""

    def __init__(self, link: wire.ShardLink, source: LayerSource) -> None:
        self._link = link
        self._source = source
        self._loads: dict[int, ServedLayers] = {}
        self._failed: dict[int, AdapterError] = {}  # in calls that are not answered

    def obey_next(self) -> None:
        call, rows = self._link.call()
        if isinstance(call.call, wire.Telling):
            self._take(call.shard, call.call)
            return
        given: wire.Rows | None = None
        result: wire.Result
        try:
            result, given = self._answer(call, call.call, rows)
        except AdapterError as error:
            result = pack_refusal(error)
        except Exception as error:  # a runtime raises what it likes
            result = wire.Refusal(RuntimeFailed.__name__, f"{type(error).__name__}: {error}")
        self._link.send(wire.Answer(call.number, result), given)

    def close(self) -> None:
        while self._loads:
            self._loads.popitem()[1].loaded.close()

    def _answer(
        self, call: wire.Call, question: wire.Asking, rows: wire.Rows | None
    ) -> tuple[wire.Result, wire.Rows | None]:
        match question:
            case wire.Describe():
                return self._source.description, None
            case wire.ListClasses():
                return wire.Classes(self._source.classes(question.options)), None
            case wire.Load():
                loaded = self._source.load(question.options, question.layers)
                self._loads[call.number] = ServedLayers(loaded, question.forwards)
                shard, forks = loaded.shard, isinstance(loaded.shard, ForkableKv)
                known = (shard.spec, shard.capabilities, shard.block_rules, forks, loaded.planned_bytes)
                return wire.Loaded(*known), None
            case wire.Forward():
                return self._find(call.shard).run_forward(call.number, question.batch, rows)
            case wire.ReadRow():
                return wire.Computed(0.0), self._find(call.shard).read_row(question)
            case wire.Attach():
                return wire.Attached(self._find(call.shard).loaded.shard.attach(question.slot, question.tokens)), None

    def _take(self, number: int, call: wire.Telling) -> None:
        """Carry out a call that is not answered; what goes wrong is said with the next one that is."""
        if isinstance(call, wire.Close):
            self._failed.pop(number, None)
            if (closed := self._loads.pop(number, None)) is not None:
                closed.loaded.close()
            return
        if number in self._failed:
            return
        try:
            loaded = self._find(number).loaded
            shard = loaded.shard
            match call:
                case wire.Share():
                    shard.share(call.slot, call.tokens)
                case wire.Fork() if isinstance(shard, ForkableKv):
                    shard.fork(call.slot, call.source, call.positions, call.shared)
                case wire.Fork():
                    raise Unsupported(f"{shard.layers}: sequences cannot go on in several ways there")
                case wire.Free():
                    (shard.discard if call.garbage else shard.release)(call.slot)
                    loaded.note_held()
        except AdapterError as error:
            died = isinstance(error, DeviceLost) and not isinstance(error, OutOfMemory)
            self._failed[number] = error if died else RuntimeFailed(f"out of step with its target: {error}")

    def _find(self, number: int) -> ServedLayers:
        if number in self._failed:
            raise self._failed[number]
        if number not in self._loads:
            raise DeviceLost("no such layers are loaded")
        return self._loads[number]
