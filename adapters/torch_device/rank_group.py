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
from device_profiles.units import KIB, MIB, ceil_div

_LOOPBACK = "127.0.0.1"
# Of a part, from which on fewer bytes are quicker. ADR 0081: over two ranks 1.3 ms and not 4.1 for 1.5 MB, but 0.37 and
# not 0.27 for 6 KB. Over four 36 and not 74 for 6 MB, and equal for 1.5 MB.
_REDUCED_BYTES, _SPREAD_BYTES = 256 * KIB, 2 * MIB


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

        Its bits depend on no other row. Of two parts the sum is the same in either order, so that they may be reduced.
        More are added one rank after the other, in float32: in a ring the order depends on where a number stands in the
        message, and so on the number of rows. Where they are large each rank adds its columns of all, which moves as
        many bytes as a ring does, and else each rank gets all parts.
        """
        own = part.contiguous()
        size = own.numel() * own.element_size()
        if self.ranks == 2 and (own.device.type != "cpu" or size >= _REDUCED_BYTES):
            self._wait(lambda group: group.allreduce([own], dist.AllreduceOptions()))
            return own
        if self.ranks > 2 and size >= _SPREAD_BYTES:
            return self._add_columns(own)
        return _sum_in_order(self._gather(own)).to(part.dtype)

    def _add_columns(self, own: Any) -> Any:
        """Return the sum of all parts: each rank adds up a share of their columns, and all get the shares."""
        width = own.shape[-1]
        share = ceil_div(width, self.ranks)
        padded = nn.functional.pad(own, (0, share * self.ranks - width)).reshape(-1, self.ranks, share)
        shares = padded.transpose(0, 1).contiguous()
        parts = torch.empty_like(shares)
        self._wait(lambda group: group.alltoall_base(parts, shares, [], [], dist.AllToAllOptions()))
        summed = self._gather(_sum_in_order(list(parts)).to(own.dtype))
        return torch.cat(summed, dim=-1)[:, :width].reshape(own.shape)

    def _gather(self, own: Any) -> list[Any]:
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        self._wait(lambda group: group.allgather(parts, own))
        return parts

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


def _sum_in_order(parts: list[Any]) -> Any:
    """Return the sum of parts, one after the other, in float32."""
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other
    return total


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
