"""Layer shards: which devices run how many layers, so that the rounds of a target that no device can hold are shortest.

The time of a shard grows by the layer: a device runs l layers in a + b l ms, and can hold so many. Between two shards
comes a hop, which costs least on one host, more within a zone and most between zones. The sum of all this is what one
stream waits for. It is found by dynamic programming over (shards, layers), exactly for hops of that kind. Devices are
joined to hosts, hosts to zones and zones to the whole, each a min-plus convolution of two tables

    joined[s, l] = min over (t, x) of left[s - t, l - x] + right[t, x] + hop

The slowest shard, which bounds what many streams get together, is bounded by `most_ms`: a device then takes no more
layers than it runs in that time (see sharded.py). The problem is that of Helix (arXiv 2406.01566), which solves it as a
mixed-integer program, and of prima.cpp (arXiv 2504.08791).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    """What can take layers: `fixed_ms` + layers * `layer_ms`, for at most `most` layers, on `device` (a device may have
    several, of which one is taken, by `option`). `host_ms` counts once for each host in use: what its price counts as.
    `tie` decides between equals, the lowest first."""

    device: Ints
    host: Ints
    zone: Ints
    fixed_ms: Floats
    layer_ms: Floats
    host_ms: Floats
    most: Ints
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
    """`ms[s, l]`: the least that s shards with l layers in all take, infinite where they cannot. `parts`: the two
    tables it was joined from, `take[s, l]`: how many (shards, layers) of them the second has; without parts it is one
    device's, and `item[l]` runs l layers."""

    ms: Floats
    parts: tuple[_Table, _Table] | None = None
    take: Ints | None = None
    item: Ints | None = None


def cut_shards(items: Items, layers: int, hops: Hops, shards: Sequence[int]) -> list[CutShard] | None:
    """Return the shards with the least sum, as many as one of `shards` (ascending), in an order in which hosts and
    zones stay together; None where it cannot be done."""
    most = shards[-1]
    zones, ends = [], []
    for in_zone in _groups(items.zone, np.arange(len(items.device)), items.tie):
        hosts = []
        for in_host in _groups(items.host, in_zone, items.tie):
            devices = [_device(items, group, layers) for group in _groups(items.device, in_host, items.tie)]
            joined = _join_tables(_useful(devices, most), hops.host, most)
            table = _with_hop(joined, float(items.host_ms[in_host[0]]))
            hosts.append(table)
            ends.append((table, hops.back_host))
        zones.append(_join_tables(_useful(hosts, most), hops.zone, most))
        ends.append((zones[-1], hops.back_zone))
    ends.append((_join_tables(zones, hops.far, most), hops.back_far))
    known = [
        (float(table.ms[count, layers]) + back, number, count)
        for number, (table, back) in enumerate(ends)
        for count in shards
        if count < len(table.ms)
    ]
    ms, number, count = min(known, default=(np.inf, 0, 0))
    return list(_trace_shards(ends[number][0], count, layers)) if np.isfinite(ms) else None


def _groups(values: Ints, rows: Ints, tie: Ints) -> list[Ints]:
    """Return the rows of each value, groups and rows in the order of their lowest tie."""
    ordered = rows[np.argsort(tie[rows], kind="stable")]
    kinds, first, which = np.unique(values[ordered], return_index=True, return_inverse=True)
    by_kind = np.argsort(which, kind="stable")
    groups = np.split(ordered[by_kind], np.cumsum(np.bincount(which, minlength=len(kinds)))[:-1])
    return [groups[kind] for kind in np.argsort(first)]


def _device(items: Items, rows: Ints, layers: int) -> _Table:
    counts = np.arange(layers + 1)
    ms = items.fixed_ms[rows, None] + items.layer_ms[rows, None] * counts
    ms = np.where(counts <= items.most[rows, None], ms, np.inf)
    best = np.argmin(ms, axis=0)
    table = np.full((2, layers + 1), np.inf)
    table[1, 1:] = ms[best, counts][1:]
    table[0, 0] = 0.0
    return _Table(table, item=rows[best])


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
    total = _with_hop(tables[0], hop)
    for table in tables[1:]:
        total = _pair(total, _with_hop(table, hop), most)
    ms = total.ms.copy()
    ms[1:] -= hop
    return _Table(ms, total.parts, total.take, total.item)


def _with_hop(table: _Table, hop: float) -> _Table:
    ms = table.ms.copy()
    ms[1:] += hop
    return _Table(ms, table.parts, table.take, table.item)


def _pair(left: _Table, right: _Table, most: int) -> _Table:
    """Return the min-plus convolution of two tables."""
    layers = left.ms.shape[1] - 1
    shards = min(most, len(left.ms) + len(right.ms) - 2)
    ms = np.full((shards + 1, layers + 1), np.inf)
    ms[: len(left.ms)] = left.ms[: shards + 1]
    take = np.zeros((shards + 1, layers + 1, 2), np.int16)
    padded = np.concatenate([left.ms, np.full((len(left.ms), 1), np.inf)], axis=1)
    for mine in range(1, min(len(right.ms), shards + 1)):
        counts = np.flatnonzero(np.isfinite(right.ms[mine]))
        if not len(counts):
            continue
        others = np.arange(layers + 1)[:, None] - counts
        rest = padded[: shards + 1 - mine][:, np.where(others < 0, layers + 1, others)] + right.ms[mine, counts]
        at = np.argmin(rest, axis=2)
        times_ms = np.take_along_axis(rest, at[:, :, None], axis=2)[:, :, 0]
        into = slice(mine, mine + len(times_ms))
        better = times_ms < ms[into]
        ms[into] = np.where(better, times_ms, ms[into])
        take[into, :, 0] = np.where(better, mine, take[into, :, 0])
        take[into, :, 1] = np.where(better, counts[at], take[into, :, 1])
    return _Table(ms, (left, right), take)


def _trace_shards(table: _Table, shards: int, layers: int) -> Iterator[CutShard]:
    """Yield the shards behind one entry of a table."""
    while table.parts is not None and table.take is not None:
        mine, count = (int(number) for number in table.take[shards, layers])
        yield from _trace_shards(table.parts[1], mine, count)
        table, shards, layers = table.parts[0], shards - mine, layers - count
    if shards and table.item is not None:
        yield CutShard(int(table.item[layers]), layers)
