"""CUDA tensors without a device: shapes, types and places of each operation are checked as on one, and nothing is
computed. What the host would wait for is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_DTYPES = {torch.float32: np.float32, torch.int32: np.int32}
_VALUES_READ = (_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.unique_dim)
"""Operations whose answer, or its shape, the host has to know at once."""


@dataclass
class Counts:
    """Of what ran: `waits`, each by what is waited for; operations by name; bytes allocated on CUDA, those that came
    back to the host, and in how many copies."""

    waits: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    allocated_bytes: int = 0
    returned_bytes: int = 0
    returns: int = 0


class _Counting(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    supports_higher_order_operators = True

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        made = function(*args, **given)
        name, counts = str(function), self._counts
        counts.operations.append(name)
        before = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        packet = getattr(function, "overloadpacket", function)
        if packet in _VALUES_READ and _is_cuda(before):
            counts.waits.append(name)
        elif packet in (_aten._to_copy, _aten.copy_):
            ends = [made.device.type, before[-1].device.type]
            if sorted(ends) == ["cpu", "cuda"] and not _is_queued(args, given):
                counts.waits.append(f"{name} {ends[1]} to {ends[0]}")
            if ends == ["cpu", "cuda"]:
                counts.returned_bytes += before[-1].numel() * before[-1].element_size()
                counts.returns += 1
        schema = getattr(function, "_schema", None)
        if schema is None or not any(value.alias_info for value in schema.returns):
            new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            counts.allocated_bytes += sum(leaf.numel() * leaf.element_size() for leaf in new if _is_cuda([leaf]))
        return made


def _is_cuda(tensors: list[Any]) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors)


def _is_queued(args: Any, given: dict[str, Any]) -> bool:
    return bool(given.get("non_blocking")) or any(value is True for value in args[2:])


def _get_item(tensor: Any, places: Any) -> Any:
    return _take(tensor, places if isinstance(places, tuple) else (places,))


def _set_item(tensor: Any, places: Any, value: Any) -> None:
    own = _get_item(tensor, places)
    if isinstance(value, torch.Tensor):
        _aten.copy_(own, value)
    else:
        own.fill_(value)


def _to(tensor: Any, *places: Any, **named: Any) -> Any:
    named |= {"device" if isinstance(value, torch.device) else "dtype": value for value in places}
    if any(value != getattr(tensor, name, value) for name, value in named.items()):
        return _aten._to_copy(tensor, **named)
    return tensor


# Python's own ask for the driver, which a build for processors does not have.
_BY_OPERATIONS = {"__getitem__": _get_item, "__setitem__": _set_item, "to": _to, "copy_": _aten.copy_}


def _replace(name: str) -> Any:
    own, other = getattr(torch.Tensor, name), _BY_OPERATIONS[name]

    def run(tensor: Any, *places: Any, **named: Any) -> Any:
        cuda = any(value.type == "cuda" for value in (*places, *named.values()) if isinstance(value, torch.device))
        return (other if cuda or tensor.device.type == "cuda" else own)(tensor, *places, **named)

    return run


def _take(tensor: Any, places: tuple[Any, ...]) -> Any:
    named = sum(place is not None and place is not Ellipsis for place in places)
    axis = 0
    chosen: list[Any] = []
    for place in places:
        if place is Ellipsis:
            axis += tensor.dim() - named - axis
        elif place is None:
            tensor, axis = tensor.unsqueeze(axis), axis + 1
        elif isinstance(place, slice):
            tensor, axis = _aten.slice(tensor, axis, place.start, place.stop, place.step or 1), axis + 1
        elif isinstance(place, int):
            tensor, named = tensor.select(axis, place), named - 1
        else:
            chosen += [None] * (axis - len(chosen)) + [place]
            axis += 1
    return _aten.index(tensor, chosen) if chosen else tensor


class _Event:
    """A CUDA event; `counts` are those of the run that is on."""

    counts = Counts()
    elapsed_time = staticmethod(lambda *_: 1.0)

    def __init__(self, **_: Any) -> None:
        """See torch.cuda.Event."""

    def record(self) -> None:
        """See torch.cuda.Event."""

    def synchronize(self) -> None:
        self.counts.waits.append("an event")


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors on CUDA be made, with none of their memory."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    own = torch.Tensor.numpy
    # A fake tensor of the host has no memory, and what it would hold was not computed.
    monkeypatch.setattr(
        torch.Tensor,
        "numpy",
        lambda host: np.zeros(host.shape, _DTYPES[host.dtype]) if isinstance(host, FakeTensor) else own(host),
    )
    for name in _BY_OPERATIONS:
        monkeypatch.setattr(torch.Tensor, name, _replace(name))
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what runs meanwhile."""
    counts = _Event.counts = Counts()
    with _Counting(counts):
        yield counts
    _Event.counts = Counts()


def place(network: Any) -> Any:
    """Give a network tensors on CUDA in place of its own, of the same shapes; returns it."""
    for module in network.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = torch.empty(value.shape, dtype=value.dtype, device="cuda:0")
    return network
