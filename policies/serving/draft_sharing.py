"""Which worker of a draft drafts for which replica of the target.

A replica wants a worker that few other replicas have; a worker on another host counts as half a replica more. What it
has stays its own, unless its worker does not draft and another one does, or it has clearly less company elsewhere.

There may be thousands of both, so nothing here looks at every pair of them. Workers wait in heaps by their company, on
each host and in all. Replicas on one host with one worker want the same, and move in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from policies.serving.draft_pool import PoolWorker

# Of a replica more: what lies between two hosts. ADR 0056: any value between 0 and 1 decides alike, between equals
# alone.
_OTHER_HOST = 0.5
_NOBODY = (1 << 30, -1)  # beyond any company that there is


def assign_drafts(
    replicas: Mapping[str, str], workers: Sequence[PoolWorker], assigned: Mapping[str, int]
) -> dict[str, int]:
    """Return which worker drafts for each replica, by the replica's name; where there is no worker, nobody does.

    `replicas`: their hosts by their names. What is `assigned` stays where no replica gains by another worker.
    """
    usable = [worker for worker in workers if worker.serving] or list(workers)
    if not usable:
        return {}
    shares = _Shares(usable)
    names = sorted(replicas)
    for name in names:
        if assigned.get(name) in shares.counts:
            shares.give(name, replicas[name], assigned[name])
    for name in names:
        if name not in shares.found:
            shares.give(name, replicas[name], shares.find_best(replicas[name])[1])
    while shares.balance():
        pass
    return shares.found


class _Shares:
    """Who has which worker, while it is decided. `counts`: replicas of each worker. `found`: the worker of each."""

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.counts = dict.fromkeys([worker.number for worker in workers], 0)
        self.found: dict[str, int] = {}
        self._hosts = {worker.number: worker.host for worker in workers}
        self._names: dict[int, dict[str, list[str]]] = {number: {} for number in self.counts}  # heaps
        self._all = [(0, number) for number in sorted(self.counts)]
        self._on: dict[str, list[tuple[int, int]]] = {"": []}
        for count, number in self._all:
            self._on.setdefault(self._hosts[number], []).append((count, number))

    def give(self, name: str, host: str, number: int) -> None:
        """Let a worker draft for a replica."""
        self.found[name] = number
        heappush(self._names[number].setdefault(host, []), name)
        self._count(number, 1)

    def find_best(self, host: str) -> tuple[float, int]:
        """Return the worker that a replica of a host would take, and how little it wants it."""
        near, far = self._find_near(host), self._find_first(self._all)
        return min(near, (far[0] + _OTHER_HOST * self._is_apart(host, far[1]), far[1]))

    def balance(self) -> bool:
        """Move whoever gains by it, those with the most company first; return whether anybody moved."""
        crowded = [(-count, number) for number, count in self.counts.items() if count]
        heapify(crowded)
        gains: dict[int, list[tuple[float, str]]] = {}
        moved = False
        while crowded:
            count, number = crowded[0]
            if -count != self.counts[number]:
                heapreplace(crowded, (-self.counts[number], number))
            elif self._move_one(number, gains):
                moved = True
            else:
                heappop(crowded)
        return moved

    def _move_one(self, number: int, gains: dict[int, list[tuple[float, str]]]) -> bool:
        """Move the replica of a worker that gains most, where one does. `gains`: how little each of its hosts wants the
        best worker near by, as it was found before."""
        names, own = self._names[number], self.counts[number] - 1
        fewest, elsewhere = self._find_first(self._all)
        if own + _OTHER_HOST <= fewest:
            return False
        near = gains.get(number)
        if near is None:
            near = gains[number] = [(self._want_near(host, number), host) for host in names]
            heapify(near)
        while near and ((host := near[0][1]) not in names or self._want_near(host, number) != near[0][0]):
            if host in names:
                heapreplace(near, (self._want_near(host, number), host))
            else:
                heappop(near)
        gain, host, to = 0.0, "", -1
        if near and own - near[0][0] > 0.0:
            gain, host = own - near[0][0], near[0][1]
            to = self._find_near(host)[1]
        apart = next((name for name in names if self._is_apart(name, number)), None)
        other = apart if apart is not None else next(iter(names))
        saved = own + _OTHER_HOST * (apart is not None) - fewest - _OTHER_HOST * self._is_apart(other, elsewhere)
        if saved > gain:
            gain, host, to = saved, other, elsewhere
        if gain <= 0.0:
            return False
        name = heappop(names[host])
        if not names[host]:
            del names[host]
        self._count(number, -1)
        self.give(name, host, to)
        return True

    def _want_near(self, host: str, number: int) -> float:
        """Return how little a replica of a host wants the best worker near by, less what its own is away."""
        return self._find_near(host)[0] - _OTHER_HOST * self._is_apart(host, number)

    def _find_near(self, host: str) -> tuple[int, int]:
        """Return the company and number of the best worker that is not on another host; a worker or a replica may be
        anywhere."""
        if not host:
            return self._find_first(self._all)
        workers = self._on.get(host)
        anywhere = self._find_first(self._on[""])
        return min(self._find_first(workers), anywhere) if workers else anywhere

    def _find_first(self, heap: list[tuple[int, int]]) -> tuple[int, int]:
        counts = self.counts
        while heap and counts[heap[0][1]] != heap[0][0]:
            heapreplace(heap, (counts[heap[0][1]], heap[0][1]))
        return heap[0] if heap else _NOBODY

    def _is_apart(self, host: str, number: int) -> bool:
        other = self._hosts[number]
        return bool(host and other and host != other)

    def _count(self, number: int, more: int) -> None:
        self.counts[number] += more
        if more < 0:  # what lies in a heap says more than is so, and would not come up
            heappush(self._all, (self.counts[number], number))
            heappush(self._on[self._hosts[number]], (self.counts[number], number))
