"""Layer shards: which devices run how many layers, so that the rounds of a target that no device can hold are shortest.

The time of a shard grows by the layer: a device runs l layers in a + b l ms, and can hold so many. Between two shards
comes a hop, which costs least on one host, more within a zone and most between zones. The sum of all this is what one
stream waits for. It is found by dynamic programming over (shards, layers), exactly for hops of that kind. Devices are
joined to hosts, hosts to zones and zones to the whole, each a min-plus convolution of two tables

    joined[s, l] = min over (t, x) of left[s - t, l - x] + right[t, x] + hop

The first and the last shard have less room: the embedding and the output layer are theirs alone. So shards are cut as
if no shard had these. Only where that leaves the ends no room, there are such tables four times. They are of devices
that have neither end, the first layer, the last one, or both. Joined are those that have no end in common.

The slowest shard bounds what many streams get together. It is bounded by `most_ms`: a device then takes no more
layers than it runs in that time (see sharded.py). The problem is that of Helix (arXiv 2406.01566), which solves it as a
mixed-integer program, and of prima.cpp (arXiv 2504.08791).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Which ends of a model are looked at, or among a table's shards: bits. Three are no bits of their own.
_NO_END, _FIRST, _LAST, _BOTH = range(4)


@dataclass(frozen=True, slots=True)
class Hops:
    """What a hop costs in ms: forward, and from the last shard back to the first."""

    host: float
    zone: float
    far: float
    back_host: float
    back_zone: float
    back_far: float


@dataclass(frozen=True, slots=True)
class Items:
    """What can take layers: `fixed_ms` + layers * `layer_ms`, for at most `most` layers, on `device`. A device may
    have several, of which one is taken, by `option`. `most_at_ends`: with the first layer of the model among them, and
    with the last one. `host_ms` counts once for each host in use: what its price counts as. `tie` decides between
    equals, the lowest first."""

    device: Ints
    host: Ints
    zone: Ints
    fixed_ms: Floats
    layer_ms: Floats
    host_ms: Floats
    most: Ints
    most_at_ends: Ints
    tie: Ints
    option: Ints

    def of(self, rows: Ints) -> Items:
        kept: list[Any] = [getattr(self, field.name)[rows] for field in fields(self)]
        return Items(*kept)


@dataclass(frozen=True, slots=True)
class CutShard:
    """An item's number, and how many layers it takes."""

    item: int
    layers: int


@dataclass(frozen=True, slots=True)
class _Table:
    """`ms[e, s, l]`: the least that s shards with l layers in all take, infinite where they cannot. `e` says which
    ends of the model are among them. `parts`: the two tables it was joined from, `take[e, s, l]`: which ends, and how
    many shards and layers, of them the second has. Without parts it is one device's, and `item[e, l]` runs l layers.
    `closed`: nothing comes between its shards, as they are a device's, a host's or a zone's."""

    ms: Floats
    parts: tuple[_Table, _Table] | None = None
    take: Ints | None = None
    item: Ints | None = None
    closed: bool = True


def cut_shards(items: Items, layers: int, hops: Hops, shards: Sequence[int]) -> list[CutShard] | None:
    """Return the shards with the least sum, as many as one of `shards` (ascending, from 2). In their order hosts
    and zones stay together, and the ends have room. None where it cannot be done."""
    taken = _cut(items, layers, hops, shards, _NO_END)
    if taken is None:
        return None
    have_room = (taken[end].layers <= items.most_at_ends[taken[end].item, end] for end in (0, -1))
    return taken if all(have_room) else _cut(items, layers, hops, shards, _BOTH)


def _cut(items: Items, layers: int, hops: Hops, shards: Sequence[int], wanted: int) -> list[CutShard] | None:
    """See cut_shards. `wanted`: the ends that are looked at, which the shards have then."""
    most = shards[-1]
    zones, ends = [], []
    for in_zone in _groups(items.zone, np.arange(len(items.device)), items.tie):
        hosts = []
        for in_host in _groups(items.host, in_zone, items.tie):
            devices = [_device(items, group, layers, wanted) for group in _groups(items.device, in_host, items.tie)]
            joined = _join_tables(_useful(devices, most), hops.host, most)
            table = _with_hop(joined, float(items.host_ms[in_host[0]]))
            hosts.append(table)
            ends.append((table, hops.back_host))
        zones.append(_join_tables(_useful(hosts, most), hops.zone, most))
        ends.append((zones[-1], hops.back_zone))
    ends.append((_join_tables(zones, hops.far, most), hops.back_far))
    known = [
        (float(table.ms[wanted, count, layers]) + back, number, count)
        for number, (table, back) in enumerate(ends)
        for count in shards
        if count < table.ms.shape[1]
    ]
    ms, number, count = min(known, default=(np.inf, 0, 0))
    if not np.isfinite(ms):
        return None
    before, after = _trace_shards(ends[number][0], wanted, count, layers)
    return before + after


def _groups(values: Ints, rows: Ints, tie: Ints) -> list[Ints]:
    ordered = rows[np.argsort(tie[rows], kind="stable")]
    kinds, first, which = np.unique(values[ordered], return_index=True, return_inverse=True)
    by_kind = np.argsort(which, kind="stable")
    groups = np.split(ordered[by_kind], np.cumsum(np.bincount(which, minlength=len(kinds)))[:-1])
    return [groups[kind] for kind in np.argsort(first)]


def _device(items: Items, rows: Ints, layers: int, wanted: int) -> _Table:
    counts, item = np.arange(layers + 1), np.zeros((wanted + 1, layers + 1), np.int64)
    ms = items.fixed_ms[rows, None] + items.layer_ms[rows, None] * counts
    table = np.full((wanted + 1, 2, layers + 1), np.inf)
    for end, most in enumerate((items.most, *items.most_at_ends.T)[: wanted + 1]):
        of_end = np.where(counts <= most[rows, None], ms, np.inf)
        best = np.argmin(of_end, axis=0)
        table[end, 1, 1:] = of_end[best, counts][1:]
        item[end] = rows[best]
    table[_NO_END, 0, 0] = 0.0
    return _Table(table, item=item)


def _useful(tables: list[_Table], most: int) -> list[_Table]:
    """Return the tables without those of which there are more alike than can be used."""
    seen: dict[bytes, int] = {}
    kept = []
    for table in tables:
        key = table.ms.tobytes()
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= most:
            kept.append(table)
    return kept


def _join_tables(tables: list[_Table], hop: float, most: int) -> _Table:
    total, *others = (_with_hop(_without_both(table), hop) for table in tables)
    for table in others:
        total = _pair(total, table, most)
    ms = total.ms.copy()
    ms[:, 1:] -= hop
    return replace(total, ms=ms, closed=True)


def _without_both(table: _Table) -> _Table:
    """Return the table without what has both ends: nothing can come behind it or before it."""
    return replace(table, ms=np.where(np.arange(len(table.ms))[:, None, None] == _BOTH, np.inf, table.ms))


def _with_hop(table: _Table, hop: float) -> _Table:
    ms = table.ms.copy()
    ms[:, 1:] += hop
    return replace(table, ms=ms)


def _pair(left: _Table, right: _Table, most: int) -> _Table:
    """Return the min-plus convolution of two tables."""
    wanted, layers = len(left.ms) - 1, left.ms.shape[2] - 1
    shards = min(most, left.ms.shape[1] + right.ms.shape[1] - 2)
    ms = np.full((wanted + 1, shards + 1, layers + 1), np.inf)
    ms[:, : left.ms.shape[1]] = left.ms[:, : shards + 1]
    take = np.zeros((*ms.shape, 3), np.int16)
    padded = np.concatenate([left.ms, np.full((*left.ms.shape[:2], 1), np.inf)], axis=2)
    for end, own in product(range(wanted + 1), repeat=2):
        if end & own != own:
            continue
        for mine in range(1, min(right.ms.shape[1], shards + 1)):
            counts = np.flatnonzero(np.isfinite(right.ms[own, mine]))
            if not len(counts):
                continue
            others = np.arange(layers + 1)[:, None] - counts
            rest = padded[end ^ own, : shards + 1 - mine][:, np.where(others < 0, layers + 1, others)]
            rest = rest + right.ms[own, mine, counts]
            at = np.argmin(rest, axis=2)
            times_ms = np.take_along_axis(rest, at[:, :, None], axis=2)[:, :, 0]
            into = slice(mine, mine + len(times_ms))
            better = times_ms < ms[end, into]
            ms[end, into] = np.where(better, times_ms, ms[end, into])
            chosen = np.stack(np.broadcast_arrays(own, mine, counts[at]), axis=-1)
            take[end, into] = np.where(better[:, :, None], chosen, take[end, into])
    return _Table(ms, (left, right), take, closed=False)


def _trace_shards(table: _Table, end: int, shards: int, layers: int) -> tuple[list[CutShard], list[CutShard]]:
    """Return the shards behind one entry of a table in order, in two lists: others may come between them. A table that
    is `closed` has one list: what has the last layer comes behind others."""
    if not shards:
        return [], []
    if table.parts is None or table.take is None:
        assert table.item is not None  # noqa: S101  # what was not joined is a device's
        before, after = [CutShard(int(table.item[end, layers]), layers)], list[CutShard]()
    else:
        own, mine, count = (int(number) for number in table.take[end, shards, layers])
        heads, tails = _trace_shards(table.parts[1], own, mine, count)
        left_heads, left_tails = _trace_shards(table.parts[0], end ^ own, shards - mine, layers - count)
        before = left_heads + heads if (end ^ own) & _FIRST else heads + left_heads
        after = left_tails + tails
    if not table.closed:
        return before, after
    return ([], before + after) if end == _LAST else (before + after, [])
