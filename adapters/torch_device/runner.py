"""Runs a plan: its arrays to the device, the model over them, the wanted rows back. A processor attends sequence by
sequence, what has a kernel all of them in one call (flex.py).

CUDA graphs: decoding, verification and parts of prompts launch one graph instead of hundreds of kernels.

A graph has fixed shapes, so a forward is filled up to the next size (plan.Size). Those that decode are captured when a
model is loaded, others when first needed; all share one memory pool. Larger forwards run as they come. Both compute the
same: a row's bits do not depend on filling (docs/adr/0015-torch.md, 0141).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.contract import BestLogits, Hidden, ShardResult
from adapters.torch_device.attention import DeviceGroup, KvPool, PagedBatch, attending
from adapters.torch_device.best_logits import find_best, read_best
from adapters.torch_device.flex import FAR, FlexBatch, Kernel, PageTables, pin, send_array
from adapters.torch_device.plan import (
    LADDER,
    MOST_WANTED,
    TILE_STEPS,
    ForwardPlan,
    Indices,
    Size,
    make_blank_inputs,
    pad_inputs,
    size_of,
    size_of_graph,
)

MOST_GRAPHS = 64  # a graph takes some MiB for its nodes; the one that was not used for longest goes. Not tuned.
_WARM_UPS = 2  # the first allocates the libraries' workspaces. Not tuned.

# Where no kernel is compiled: of torch's that take a mask, this one reads keys in an order of its own.
_MASKED_BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

Compute = Callable[[Any, Any, Any, PagedBatch | FlexBatch, Any], Any]
Step = Callable[[], None]


class LayerWatch(Protocol):
    """See adapters.torch_device.head.HiddenStates."""

    closed: bool
    hooks: list[Any]

    def watch_layers(self, network: Any) -> None: ...

    def remove_hooks(self) -> None: ...

    def store_outputs(self, places: Any) -> None: ...


class FlexForwards:
    """Forwards whose attention is one call in each layer, over inputs that are filled up to a size."""

    def __init__(
        self, compute: Compute, pool: KvPool, kernel: Kernel, *, windows: tuple[int, ...], device: Any
    ) -> None:
        self._compute, self._pool, self._kernel, self._device = compute, pool, kernel, device
        lengths = [window or FAR for window in windows or (0,)]  # whose rules are the class's own asks for none
        self._windows = send_array(np.array(lengths), device)
        self._tables = PageTables(pool, device, TILE_STEPS[-1])

    def run(self, plan: ForwardPlan, hidden: Any = None) -> Any:
        """Queue a forward as it comes, and return what `compute` makes of it."""
        size = size_of(plan)
        inputs, pages = self._send(size, *self._pad(plan, size))
        return self.queue(size, inputs, pages, hidden)

    def send(self, plan: ForwardPlan, size: Size, static: Any) -> None:
        """Queue what brings a plan's inputs to where a graph of that size has them."""
        inputs, _ = self._send(size, *self._pad(plan, size))
        static.copy_(inputs)

    def send_blank(self, size: Size) -> tuple[Any, Any]:
        """Return inputs of a size on the device, with which a forward touches nothing but the scratch block."""
        return self._send(size, *make_blank_inputs(size, block=self._pool.block, pool_blocks=self._pool.blocks))

    def queue(self, size: Size, inputs: Any, pages: Any, hidden: Any = None) -> Any:
        """Return what `compute` makes of inputs of a size, which lie on the device one after the other."""
        ids, positions, writes, sources, wanted, rows, own = inputs.split([length for _, length in size.inputs])
        batch = FlexBatch(self._pool, writes, sources, rows, own, pages, self._windows, self._kernel)
        return self._compute(ids, positions, wanted, batch, hidden)

    def _pad(self, plan: ForwardPlan, size: Size) -> tuple[Indices, Indices]:
        return pad_inputs(plan, size, block=self._pool.block, pool_blocks=self._pool.blocks)

    def _send(self, size: Size, inputs: Indices, tables: Indices) -> tuple[Any, Any]:
        pages = self._tables.get_pages(size.tiles)
        self._tables.send(tables, pages)
        return send_array(inputs, self._device), pages


class Graphs:
    """Recorded forwards by size. `record` returns what does again, on the same tensors, what a function does.
    `most_rows`: of what a forward makes."""

    def __init__(self, forwards: FlexForwards, record: Callable[[Step], Step], *, most_rows: int) -> None:
        self._forwards, self._record, self._most_rows = forwards, record, most_rows
        self._recorded: OrderedDict[Size, tuple[Step, Any, Any]] = OrderedDict()
        self._made: Any = None

    def drop_recorded(self) -> None:
        """Forget what was recorded: forwards do something else from now on."""
        self._recorded.clear()

    def prepare(self, size: Size) -> None:
        """Record a size if need be, in place of the one that was not used for longest where there are too many."""
        if size not in self._recorded:
            self._recorded[size] = self._make(size)
        self._recorded.move_to_end(size)
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)

    def replay(self, plan: ForwardPlan, size: Size) -> Any:
        """Queue the forward, and return where its logits will be: valid until the next replay of any graph."""
        step, static, made = self._recorded[size]
        self._forwards.send(plan, size, static)
        step()
        return made

    def _make(self, size: Size) -> tuple[Step, Any, Any]:
        static, pages = self._forwards.send_blank(size)
        first = self._forwards.queue(size, static, pages)
        if self._made is None:  # of all sizes: a graph's own would stay as long as it does
            self._made = torch.empty((self._most_rows, first.shape[1]), dtype=torch.float32, device=first.device)
        made = self._made[: len(first)]

        def step() -> None:
            made.copy_(self._forwards.queue(size, static, pages))

        return self._record(step), static, made


class CudaRecorder:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory: Any = None
        self.capturing = False  # it stays so where a capture failed

    def __call__(self, step: Step) -> Step:
        """See Graphs. Waits for the device."""
        stream = _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries allocate their workspaces before anything is recorded
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.capturing = True
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            step()
        self.capturing = False
        self._memory = self._memory or graph.pool()
        replay: Step = graph.replay
        return replay


@cache
def _capture_stream(device: Any) -> Any:
    """Return the stream on which this process captures for a device. It is one, as cuBLAS keeps a workspace for every
    stream that it has seen, until the process ends: 32 MiB each on a H200."""
    return torch.cuda.Stream(device)


class ForwardRunner:
    """Layers of a model on a device, one forward at a time. `windows` are the layers' sliding windows, () where the
    model's class says itself what a row sees. `last`: they end with the model's last one, so that they give logits,
    else hidden states. `past`: what the class is told of the tokens before, beside positions. `kernel` attends all
    sequences in one call; None: one after the other. `captures`: whether forwards can be CUDA graphs."""

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        *,
        windows: tuple[int, ...],
        device: Any,
        kernel: Kernel | None,
        last: bool = True,
        past: Any = None,
        captures: bool = True,
    ) -> None:
        self.network, self._pool, self._windows = model, pool, windows
        self._watches: list[LayerWatch] = []
        self._last, self._past = last, past
        self._device = device
        self.forwards = FlexForwards(self.compute, pool, kernel, windows=windows, device=device) if kernel else None
        self._recorder = CudaRecorder(device) if kernel and captures and device.type == "cuda" else None
        self._graphs: Graphs | None = None
        if self.forwards and self._recorder:
            most_rows = MOST_WANTED if last else LADDER[-1]
            self._graphs = Graphs(self.forwards, self._recorder, most_rows=most_rows)
        self._clock = _CudaClock() if device.type == "cuda" else _HostClock()
        self._host: dict[Any, Any] = {}

    def add_watch(self, watch: LayerWatch) -> None:
        """Let something keep what layers give, from the next forward on, until it is closed. Any thread may say so."""
        self._watches.append(watch)

    def record_ahead(self, sizes: Sequence[Size]) -> None:
        """Record the graphs of sizes, where there are graphs. Waits for the device."""
        if self._graphs is not None:
            with torch.inference_mode(), on_device(self._device):
                for size in sizes:
                    self._graphs.prepare(size)

    def run(self, plan: ForwardPlan, hidden: Hidden | None = None) -> ShardResult:
        """Return the wanted rows of logits, or the hidden states of all tokens, valid until the next call. `hidden`:
        what the tokens are where the model's first layer is not here. The host waits once, for all that comes back."""
        with torch.inference_mode(), on_device(self._device):
            self._change_watches()
            # Graphs have no input for hidden states: these layers run as they come.
            size = size_of_graph(plan) if self._graphs and hidden is None else None
            if self._graphs and size:
                self._graphs.prepare(size)
            self._clock.start()
            made = self._graphs.replay(plan, size) if self._graphs and size else self._rows(plan, hidden)
            if not self._last:
                return ShardResult(self._send_back(made[: plan.token_count]), self._clock.stop_ms())
            whole, rest = made[: plan.whole_count], made[plan.whole_count : plan.wanted_count]
            rows = self._send_back(whole)
            best: BestLogits | None = None
            if plan.best:
                scales = None if plan.scales is None else send_array(plan.scales, self._device)
                values = self._send_back(find_best(rest, plan.best, scales))
                best = read_best(values, lambda row: rest[row].cpu().numpy())
            return ShardResult(rows, self._clock.stop_ms(), best=best)

    def take_memory_back(self) -> bool:
        """After a forward had no memory: give back what nothing uses. False: a graph was being captured, and what the
        allocator thinks of that is not known."""
        if self._recorder is None:
            return True
        if self._recorder.capturing:
            return False
        torch.cuda.empty_cache()
        return True

    def close(self) -> None:
        """There is nothing to end: memory goes with this object."""

    def _rows(self, plan: ForwardPlan, hidden: Hidden | None) -> Any:
        """Return what `compute` makes of a plan, padding included, on the device."""
        states = self._pad_hidden(hidden, len(plan.ids))
        if self.forwards is not None:
            return self.forwards.run(plan, states)
        fixed = (plan.ids, plan.positions, plan.writes, plan.sources, plan.wanted, plan.tiles)
        ids, positions, writes, sources, wanted, tiles = (send_array(array, self._device) for array in fixed)
        groups, at = [], 0
        for group in plan.groups:
            count = group.stop - group.first
            own = tiles[at : at + count * group.tile]
            at += len(own)
            groups.append(
                DeviceGroup(own, positions[own].view(count, group.tile), send_array(group.table, self._device))
            )
        paged = PagedBatch(self._pool, writes, sources, groups, self._windows)
        return self.compute(ids, positions, wanted, paged, states)

    def compute(self, ids: Any, positions: Any, wanted: Any, paged: PagedBatch | FlexBatch, hidden: Any = None) -> Any:
        """Run the layers: (rows,) ids, or (rows, hidden size) states, and positions to (wanted, vocabulary), or to
        (rows, hidden size), in float32."""
        read = {"input_ids": ids[None]} if hidden is None else {"inputs_embeds": hidden[None]}
        shared = {"position_ids": positions[None], "use_cache": False, "past_key_values": self._past}
        with attending(paged):
            if not self._last:
                return self.network.model(**read, **shared).last_hidden_state[0].float()
            logits = self.network(**read, **shared, logits_to_keep=wanted).logits[0].float()
        for watch in self._watches:
            if watch.hooks:
                watch.store_outputs(paged.writes)
        return logits

    def _change_watches(self) -> None:
        """Begin and end what was asked for since the last forward; no layer runs meanwhile."""
        fresh = [watch for watch in self._watches if not watch.hooks and not watch.closed]
        closed = [watch for watch in self._watches if watch.closed]
        for watch in closed:
            watch.remove_hooks()
            self._watches.remove(watch)
        for watch in fresh:
            watch.watch_layers(self.network)
        if self._graphs is not None and (fresh or closed):
            self._graphs.drop_recorded()

    def _pad_hidden(self, hidden: Hidden | None, rows: int) -> Any:
        """Return hidden states on the device, in the model's format; rows that only fill up are 0."""
        if hidden is None:
            return None
        padded = torch.zeros((rows, hidden.shape[1]), dtype=self.network.dtype, device=self._device)
        padded[: len(hidden)] = send_array(hidden, self._device)
        return padded

    def _send_back(self, values: Any) -> Any:
        """Queue what brings values to the host, and return where they will be, as an array."""
        if self._device.type == "cpu":
            return values.numpy()
        count, held = values.numel(), self._host.get(values.dtype)
        if held is None or len(held) < count:
            held = self._host[values.dtype] = pin(torch.empty(count, dtype=values.dtype))
        sent = held[:count].view(values.shape)
        if count:
            sent.copy_(values, non_blocking=True)
        return sent.numpy()


class _HostClock:
    def start(self) -> None:
        self._started = time.perf_counter()

    def stop_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000.0


class _CudaClock:
    """Events on the stream that the work is queued on: what the device took, not how long it was waited for."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._begin.record()

    def stop_ms(self) -> float:
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Let this thread's work be on a device, by kernels that take masks."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), sdpa_kernel(list(_MASKED_BACKENDS)):
        yield
