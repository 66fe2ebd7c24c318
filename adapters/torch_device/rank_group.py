"""The ranks of one model as a group of torch.distributed, and what their layers exchange through it.

It is an object of its own beside torch's default group, of which a process has one: several models may be loaded.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from adapters.contract import DeviceLost
from adapters.torch_device.split import RankPart

_LOOPBACK = "127.0.0.1"


class GroupBroken(DeviceLost):
    """Ranks do not reach one another any more, or one does not answer in time."""


class RankGroup:
    """One rank's end. `connect` before use: layers are built before all ranks are there."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group: Any = None

    def connect(self, meeting: Path, device: Any, patience_s: float) -> None:
        """Wait for all ranks, which meet at a file. `patience_s`: how long one waits for another from now on.

        Raises GroupBroken.
        """
        try:
            store = dist.FileStore(str(meeting), self.ranks)
            store.set_timeout(timedelta(seconds=patience_s))
            options = _choose_options(device)
            options._timeout = timedelta(seconds=patience_s)
            made = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
            self._group = made(store, self.rank, self.ranks, options)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error

    def add(self, part: Any) -> Any:
        """Return the sum of all ranks' parts, on every rank, of the parts' shape.

        They are added one rank after the other, in float32: the order of an all-reduce may depend on the number of
        rows, and a row's bits would then, too.
        """
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        self._wait(lambda group: group.allgather(parts, own))
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def join_columns(self, part: Any, widths: list[int]) -> Any:
        """Return all ranks' columns, (1, rows, columns), in order on rank 0; another rank gets its own back."""
        own = nn.functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks)] if self.rank == 0 else []
        self._wait(lambda group: group.gather([parts] if parts else [], [own], dist.GatherOptions()))
        if not parts:
            return part
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def abort(self) -> None:
        """Let whoever waits for another rank wait no longer. From another thread."""
        if self._group is not None:
            self._group.abort()

    def _wait(self, start: Any) -> None:
        try:
            start(self._group).wait()
        except RuntimeError as error:
            raise GroupBroken(str(error).strip().splitlines()[0]) from error


class SummedLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product over this rank's part of the inputs; with those of the other ranks it is the whole product."""

    def __init__(self, product: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.product, self._group = product, group

    def forward(self, rows: Any) -> Any:
        """(1, rows, own inputs) to (1, rows, outputs)."""
        return self._group.add(self.product(rows))


class SplitEmbedding(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An embedding of this rank's tokens; with the other ranks' it is that of all. Exact: zeros are added."""

    def __init__(self, own: nn.Module, tokens: range, group: RankGroup) -> None:
        super().__init__()
        self.own, self._tokens, self._group = own, tokens, group

    def forward(self, ids: Any) -> Any:
        """(1, rows) ids to (1, rows, hidden)."""
        local = ids - self._tokens.start
        mine = (local >= 0) & (local < len(self._tokens))
        rows = self.own(torch.where(mine, local, 0))
        return self._group.add(torch.where(mine[..., None], rows, 0.0).to(rows.dtype))


class SplitHead(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product that gives this rank's outputs; rank 0 gets those of all."""

    def __init__(self, product: nn.Module, widths: list[int], group: RankGroup) -> None:
        super().__init__()
        self.product, self._widths, self._group = product, widths, group

    def forward(self, rows: Any) -> Any:
        """(1, rows, hidden) to (1, rows, outputs)."""
        return self._group.join_columns(self.product(rows), self._widths)


def join_ranks(model: Any, part: RankPart, widths: list[int], group: RankGroup) -> None:
    """Let a model that was built of a rank's part compute with the other ranks: exchange its layers that need them."""
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, group)
    model.model.embed_tokens = SplitEmbedding(model.model.embed_tokens, part.tokens, group)
    if not isinstance(model.lm_head, nn.Identity):
        model.lm_head = SplitHead(model.lm_head, widths, group)


def _choose_options(device: Any) -> Any:
    """Return the options of the library for a device; sockets are of the loopback alone."""
    if device.type == "cuda":
        return dist.ProcessGroupNCCL.Options()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return options
