"""Fewer devices to cut shards from: those that can be in the best plan, where there are many."""

from __future__ import annotations

import numpy as np

from policies.planning.placement.shards import Floats, Hops, Ints, Items

_FEW = 64  # devices; so many are all looked at
_ZONES = 3  # zones that are kept of those that can hold the target alone


def narrow(items: Items, stage: Floats, layers: int, hops: Hops, most: int) -> tuple[Items, Floats]:
    """Return the items of the zones in which a target of so many layers, in at most `most` shards, seems fastest, and
    of the best hosts in them.

    A device's price is what a layer takes on it when it is full, hop included. A zone is rated by its cheapest devices
    that together hold the target; where no zone holds it alone, by price, until there is three times the room.
    """
    if len(np.unique(items.device)) <= _FEW:
        return items, stage
    price = _price(items, hops.zone)
    zones = _zones(items, price, layers, hops, most)
    kept = np.flatnonzero(np.isin(items.zone, zones))
    hosts = [_hosts(items, kept[items.zone[kept] == zone], hops, most) for zone in zones]
    kept = np.flatnonzero(np.isin(items.host, np.concatenate(hosts)))
    return items.of(kept), stage[kept]


def _price(items: Items, hop: float) -> Floats:
    price: Floats = items.layer_ms + (items.fixed_ms + items.host_ms + hop) / items.most
    return price


def _best_items(items: Items, rows: Ints, price: Floats) -> Ints:
    """Return the cheapest item of each device, the cheapest first."""
    ordered = rows[np.lexsort((items.tie[rows], price[rows]))]
    _, first = np.unique(items.device[ordered], return_index=True)
    return ordered[np.sort(first)]


def _zones(items: Items, price: Floats, layers: int, hops: Hops, most: int) -> Ints:
    alone, all_of = [], []
    for zone in np.unique(items.zone):
        rows = _best_items(items, np.flatnonzero(items.zone == zone), price)
        room = int(items.most[rows].sum())
        all_of.append((float(price[rows[:most]].mean()), int(zone), room))
        for order in (rows, rows[np.argsort(-items.most[rows], kind="stable")]):
            ms = _estimate_filled_ms(items, order[:most], layers, hops.zone)
            if np.isfinite(ms):
                alone.append((ms, int(zone)))
    kept: list[int] = []
    for _, zone in sorted(alone):
        if zone not in kept and len(kept) < _ZONES:
            kept.append(zone)
    room = 0
    for _, zone, more in sorted(all_of):
        if not alone and room < 3 * layers:
            kept.append(zone)
            room += more
    return np.array(kept, np.int64)


def _estimate_filled_ms(items: Items, rows: Ints, layers: int, hop: float) -> float:
    """Return what these devices take, filled in this order until they hold all layers; infinite where they do not."""
    room = np.cumsum(items.most[rows])
    if not len(rows) or room[-1] < layers:
        return float("inf")
    count = int(np.searchsorted(room, layers)) + 1
    used = items.most[rows[:count]].astype(float)
    used[-1] -= room[count - 1] - layers
    hosts = np.unique(items.host[rows[:count]], return_index=True)[1]
    paid = float(items.host_ms[rows[:count]][hosts].sum())
    return paid + float((items.fixed_ms[rows[:count]] + hop + used * items.layer_ms[rows[:count]]).sum())


def _hosts(items: Items, rows: Ints, hops: Hops, most: int) -> Ints:
    """Return the hosts whose devices are cheapest, together (with the hops of one host) or alone."""
    price = _price(items, hops.host)
    hosts = np.unique(items.host[rows])
    rated = []
    for host in hosts:
        mine = _best_items(items, rows[items.host[rows] == host], price)[:most]
        together = float((price[mine] * items.most[mine]).sum() + hops.zone - hops.host) / float(items.most[mine].sum())
        rated.append((together, int(items.tie[mine].min()), int(host)))
    alone = _best_items(items, rows, _price(items, hops.zone))[:most]
    return np.unique(
        np.concatenate([[host for _, _, host in sorted(rated)[: 2 + most // 2]], items.host[alone]])
    ).astype(np.int64)
