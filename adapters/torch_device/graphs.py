"""CUDA graphs of small forwards: decoding and verification launch one graph instead of hundreds of kernels.

A graph has fixed shapes, so a forward is filled up to the next size of each kind: rows, tiles, blocks that a tile
reads. Graphs are captured when first needed, over static buffers, and share one memory pool. Larger forwards run as
they come. Both compute the same: a row's bits do not depend on filling (docs/adr/0015-torch.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from adapters.torch_device.attention import DeviceGroup, KvPool, PagedBatch
from adapters.torch_device.plan import ForwardPlan, Indices

MOST_ROWS, MOST_TILES, MOST_READ_BLOCKS = 64, 16, 2048
LEAST_BLOCKS = 8
_WARM_UPS = 2

Compute = Callable[[Any, Any, Any, PagedBatch], Any]


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
