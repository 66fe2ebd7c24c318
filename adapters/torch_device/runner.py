"""Runs a plan: its arrays to the device, the model over them, the wanted rows back. The same for CPU and CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.contract import Hidden, Logits
from adapters.torch_device.attention import DeviceGroup, KvPool, PagedBatch
from adapters.torch_device.graphs import Graphs
from adapters.torch_device.plan import ForwardPlan, Indices

# cuDNN's and FlashAttention's kernels take no mask; of those that do, this one reads keys in an order of its own.
_MASKED_BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class ForwardRunner:
    """Layers of a model on a device, one forward at a time. `windows` are the layers' sliding windows. `last`: they end
    with the model's last one, so that they give logits, else hidden states."""

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
    ) -> None:
        self._model, self._pool, self._block, self._windows = model, pool, block, windows
        self._last = last
        self._device = device
        self._graphs: Graphs | None = None
        if device.type == "cuda":
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
        shared = {"position_ids": positions[None], "use_cache": False, "paged": paged}
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
