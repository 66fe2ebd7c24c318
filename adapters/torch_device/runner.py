"""Runs a plan: its arrays to the device, the model over them, the wanted rows back. The same for CPU and CUDA.

CUDA graphs of small forwards: decoding and verification launch one graph instead of hundreds of kernels.

A graph has fixed shapes, so a forward is filled up to the next size of each kind: rows, tiles, blocks that a tile
reads. Graphs are captured when first needed, over static buffers, and share one memory pool. Larger forwards run as
they come. Both compute the same: a row's bits do not depend on filling (docs/adr/0015-torch.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.contract import Hidden, Logits
from adapters.torch_device.attention import DeviceGroup, KvPool, PagedBatch, attending
from adapters.torch_device.plan import ForwardPlan, Indices

# ADR 0015: larger forwards run as they come. Not tuned.
MOST_ROWS, MOST_TILES, MOST_READ_BLOCKS = 64, 16, 2048
# So that short contexts share a graph. Not tuned: masked positions add exactly zero (ADR 0015).
LEAST_BLOCKS = 8
_WARM_UPS = 2  # the first allocates the libraries' workspaces. Not tuned.

Compute = Callable[[Any, Any, Any, PagedBatch], Any]
# cuDNN's and FlashAttention's kernels take no mask; of those that do, this one reads keys in an order of its own.
_MASKED_BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a graph: rows, rows with logits, tiles of `tile` rows, and blocks that each tile reads."""

    rows: int
    wanted: int
    tiles: int
    tile: int
    blocks: int

    @property
    def inputs(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The static inputs by name and shape, in the order in which they lie in their buffer."""
        return (
            ("ids", (self.rows,)),
            ("positions", (self.rows,)),
            ("writes", (self.rows,)),
            ("sources", (self.rows,)),
            ("wanted", (self.wanted,)),
            ("tiles", (self.tiles * self.tile,)),
            ("tile_positions", (self.tiles, self.tile)),
            ("tables", (self.tiles, self.blocks)),
        )


def size_of(plan: ForwardPlan) -> Size | None:
    """Return the shape of the graph for a plan; None where it is too large, or its tiles differ."""
    tiles, tile = plan.groups[-1].stop, plan.groups[0].tile
    blocks = _next_power(max(group.table.shape[1] for group in plan.groups), LEAST_BLOCKS)
    size = Size(len(plan.ids), len(plan.wanted), _next_power(tiles, 1), tile, blocks)
    fits = size.rows <= MOST_ROWS and size.tiles <= MOST_TILES and size.tiles * size.blocks <= MOST_READ_BLOCKS
    return size if fits and all(group.tile == tile for group in plan.groups) else None


def pad_inputs(plan: ForwardPlan, size: Size, blank_block: int) -> dict[str, Indices]:
    """Return a plan's inputs in the shapes of a graph. Tiles beyond the plan's read the blank block's first
    position, which is finite, and nobody reads what they compute."""
    tiles = np.zeros(size.tiles * size.tile, np.int64)
    tiles[: len(plan.tiles)] = plan.tiles
    positions = np.zeros(size.tiles * size.tile, np.int64)
    positions[: len(plan.tiles)] = plan.positions[plan.tiles]
    tables = np.full((size.tiles, size.blocks), blank_block, np.int64)
    for group in plan.groups:
        tables[group.first : group.stop, : group.table.shape[1]] = group.table
    return {
        "ids": plan.ids,
        "positions": plan.positions,
        "writes": plan.writes,
        "sources": plan.sources,
        "wanted": plan.wanted,
        "tiles": tiles,
        "tile_positions": positions.reshape(size.tiles, size.tile),
        "tables": tables,
    }


class StaticInputs:
    """The inputs of one graph: views of one buffer on the device, sent in one copy from pinned memory."""

    def __init__(self, size: Size, device: Any) -> None:
        sizes = [int(np.prod(shape)) for _, shape in size.inputs]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = self._device.split(sizes)
        self.views = {name: part.view(shape) for part, (name, shape) in zip(parts, size.inputs, strict=True)}

    def send(self, values: dict[str, Indices]) -> None:
        """Queue the copy. The one before must have been used up."""
        np.concatenate([values[name].ravel() for name in self.views], out=self._host.numpy())
        self._device.copy_(self._host, non_blocking=True)

    def batch(self, pool: KvPool, block: int, windows: tuple[int, ...]) -> PagedBatch:
        """Return the batch that a forward over these inputs is about: one group, a table for every tile."""
        views = self.views
        group = DeviceGroup(views["tiles"], views["tile_positions"], views["tables"])
        return PagedBatch(pool, views["writes"], views["sources"], [group], block, windows)


class Graphs:
    """Captured forwards by shape. `compute` is what is captured."""

    def __init__(
        self, compute: Compute, pool: KvPool, *, block: int, scratch_block: int, windows: tuple[int, ...], device: Any
    ) -> None:
        self._compute, self._pool, self._block, self._scratch = compute, pool, block, scratch_block
        self._windows, self._device = windows, device
        self._captured: dict[Size, tuple[Any, StaticInputs, Any]] = {}
        self._memory: Any = None
        self.capturing = False  # it stays so where a capture failed

    def prepare(self, plan: ForwardPlan) -> Size | None:
        """Capture the graph for a plan if need be; None where there is none for it. Waits for the device."""
        size = size_of(plan)
        if size is not None and size not in self._captured:
            self._captured[size] = self._capture(size)
        return size

    def replay(self, plan: ForwardPlan, size: Size) -> Any:
        """Queue the forward, and return where its logits will be: valid until the next replay of any graph."""
        graph, inputs, logits = self._captured[size]
        inputs.send(pad_inputs(plan, size, self._scratch + 1))
        graph.replay()
        return logits

    def _capture(self, size: Size) -> tuple[Any, StaticInputs, Any]:
        inputs = StaticInputs(size, self._device)
        # Nothing but the scratch block is touched while a graph is made.
        inputs.views["writes"].fill_(self._scratch * self._block)
        inputs.views["tables"].fill_(self._scratch + 1)

        def forward() -> Any:
            batch = inputs.batch(self._pool, self._block, self._windows)
            return self._compute(inputs.views["ids"], inputs.views["positions"], inputs.views["wanted"], batch)

        stream = _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries allocate their workspaces before anything is recorded
            for _ in range(_WARM_UPS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.capturing = True
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            logits = forward()
        self.capturing = False
        self._memory = self._memory or graph.pool()
        return graph, inputs, logits


@cache
def _capture_stream(device: Any) -> Any:
    """Return the stream on which this process captures for a device. It is one, as cuBLAS keeps a workspace for every
    stream that it has seen, until the process ends: 32 MiB each on a H200."""
    return torch.cuda.Stream(device)


def _next_power(count: int, least: int) -> int:
    """Return the power of two from `count` (>= 1) on, at least `least`, itself one."""
    return max(least, 1 << (count - 1).bit_length())


class ForwardRunner:
    """Layers of a model on a device, one forward at a time. `windows` are the layers' sliding windows, () where the
    model's class says itself what a row sees. `last`: they end with the model's last one, so that they give logits,
    else hidden states. `past`: what the class is told of the tokens before, beside positions. `captures`: whether
    forwards can be CUDA graphs."""

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        *,
        block: int,
        scratch_block: int,
        windows: tuple[int, ...],
        device: Any,
        last: bool = True,
        past: Any = None,
        captures: bool = True,
    ) -> None:
        self._model, self._pool, self._block, self._windows = model, pool, block, windows
        self._last, self._past = last, past
        self._device = device
        self._graphs: Graphs | None = None
        if device.type == "cuda" and captures:
            self._graphs = Graphs(
                self.compute, pool, block=block, scratch_block=scratch_block, windows=windows, device=device
            )
        self._clock = _CudaClock() if device.type == "cuda" else _HostClock()
        self._stage = _Stage(device)
        self._host: Any = None

    def run(self, plan: ForwardPlan, hidden: Hidden | None = None) -> tuple[Logits | Hidden, float]:
        """Return the wanted rows of logits, or the hidden states of all tokens, valid until the next call, and the
        milliseconds that the device took. `hidden`: what the tokens are where the model's first layer is not here."""
        with torch.inference_mode(), _on_device(self._device):
            # Graphs have no input for hidden states: these layers run as they come.
            size = self._graphs.prepare(plan) if self._graphs and hidden is None else None
            self._clock.start()
            made = self._graphs.replay(plan, size) if self._graphs and size else self._rows(plan, hidden)
            rows = made[: plan.wanted_count if self._last else plan.token_count]
            logits = self._on_host(rows)
            return logits, self._clock.stop_ms()

    def take_memory_back(self) -> bool:
        """After a forward had no memory: give back what nothing uses. False: a graph was being captured, and what the
        allocator thinks of that is not known."""
        if self._graphs is None:
            return True
        if self._graphs.capturing:
            return False
        torch.cuda.empty_cache()
        return True

    def close(self) -> None:
        """There is nothing to end: memory goes with this object."""

    def _rows(self, plan: ForwardPlan, hidden: Hidden | None) -> Any:
        """Return what `compute` makes of a plan, padding included, on the device."""
        tables = [group.table for group in plan.groups]
        fixed = [plan.ids, plan.positions, plan.writes, plan.sources, plan.wanted, plan.tiles]
        sent = self._stage.send([*fixed, plan.positions[plan.tiles], *tables])
        ids, positions, writes, sources, wanted, tiles, tile_positions = sent[:7]
        groups, at = [], 0
        for group, table in zip(plan.groups, sent[7:], strict=True):
            count = group.stop - group.first
            own = slice(at, at + count * group.tile)
            groups.append(DeviceGroup(tiles[own], tile_positions[own].view(count, group.tile), table))
            at = own.stop
        paged = PagedBatch(self._pool, writes, sources, groups, self._block, self._windows)
        return self.compute(ids, positions, wanted, paged, self._pad_hidden(hidden, len(plan.ids)))

    def compute(self, ids: Any, positions: Any, wanted: Any, paged: PagedBatch, hidden: Any = None) -> Any:
        """Run the layers: (rows,) ids, or (rows, hidden size) states, and positions to (wanted, vocabulary), or to
        (rows, hidden size), in float32."""
        read = {"input_ids": ids[None]} if hidden is None else {"inputs_embeds": hidden[None]}
        shared = {"position_ids": positions[None], "use_cache": False, "past_key_values": self._past}
        with attending(paged):
            if not self._last:
                return self._model.model(**read, **shared).last_hidden_state[0].float()
            return self._model(**read, **shared, logits_to_keep=wanted).logits[0].float()

    def _pad_hidden(self, hidden: Hidden | None, rows: int) -> Any:
        """Return hidden states on the device, in the model's format; rows that only fill up are 0."""
        if hidden is None:
            return None
        padded = torch.zeros((rows, hidden.shape[1]), dtype=self._model.dtype, device=self._device)
        padded[: len(hidden)] = torch.from_numpy(hidden)
        return padded

    def _on_host(self, rows: Any) -> Logits:
        if self._device.type == "cpu":
            logits: Logits = rows.numpy()
            return logits
        if self._host is None or len(self._host) < len(rows):
            self._host = torch.empty(rows.shape, dtype=torch.float32, pin_memory=True)
        view = self._host[: len(rows)]
        view.copy_(rows, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        copied: Logits = view.numpy()
        return copied


class _Stage:
    """Sends index arrays in one transfer, from pinned memory where the device has a memory of its own."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pinned: Any = None

    def send(self, arrays: list[Indices]) -> list[Any]:
        """Return the arrays on the device. What was sent before must have been used up."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [array.size for array in arrays]
        if self._pinned is None or len(self._pinned) < sum(sizes):
            self._pinned = torch.empty(2 * sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate([array.ravel() for array in arrays], out=self._pinned.numpy()[: sum(sizes)])
        sent = self._pinned[: sum(sizes)].to(self._device, non_blocking=True)
        return [part.view(array.shape) for part, array in zip(sent.split(sizes), arrays, strict=True)]


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
def _on_device(device: Any) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), sdpa_kernel(list(_MASKED_BACKENDS)):
        yield
