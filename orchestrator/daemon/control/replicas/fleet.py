"""All replicas together, kept as they change, so that no event has to look at each of them. No effects.

Whatever changes of a replica is noted (Replicas.changed), and taken in before somebody asks the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.health.health import HealthBoard, Part
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas, Standing
from orchestrator.daemon.control.routing.candidates import Candidates
from orchestrator.daemon.control.routing.loads import LoadBoard
from orchestrator.daemon.control.state import FAILED, READY
from policies.serving.failover.health import Health
from policies.serving.narrowing import PRICED_ALL
from policies.serving.replica_load import SharedPaces, reckon_tpot_ms

_WITH_STREAMS = (Rank.SERVING, Rank.RETIRING)
_WATCHED = (Rank.STANDBY, Rank.JOINING, Rank.SERVING, Rank.RETIRING)
_K = TypeVar("_K")
_RANKS = {rank: number for number, rank in enumerate(_WATCHED)}


def place_of(replica: Replica) -> tuple[int, int]:
    """Return what replicas are sorted by: their ranks, and their places among the replicas."""
    return _RANKS.get(replica.rank, len(_RANKS)), replica.engine


class Fleet:
    """Counts and lists of `replicas`, which have streams. `paces` of those that may have streams. `candidates`: where
    there are too many to price them all. `turns` counts how often one came, went, or turned ready or lost."""

    def __init__(self, replicas: Replicas, health: HealthBoard, loads: LoadBoard) -> None:
        self.paces = SharedPaces()
        self.candidates: Candidates | None = None
        self.turns = 0
        self._replicas = replicas
        self._health = health
        self._loads = loads
        self._places = 0
        self._sent = 0
        self._free = 0
        self._in_service = 0
        self._failed = 0
        self._retiring = 0
        self._ready = 0
        self._usable = 0
        self._routed = 0
        self._crowded: OrderedDict[Replica, None] = OrderedDict()
        self._loading: dict[Replica, None] = {}
        self._busy: dict[Replica, None] = {}
        self._standing_by: dict[Replica, None] = {}
        self._unable: dict[Replica, None] = {}
        self._on_part: dict[Part, dict[Replica, None]] = {}
        self._on_device: dict[str, dict[Replica, None]] = {}
        self._unwell: set[Replica] = set()  # these may not be healthy
        self._unwell_by: object = None

    def refresh(self) -> None:
        changed, paced = self._replicas.changed, self._replicas.paced
        if changed:
            while changed:
                self._take(changed.popitem()[0])
            if (self._routed > PRICED_ALL) is (self.candidates is None):
                self._begin_or_end_narrowing()
        while paced:
            replica = paced.popitem()[0]
            if replica.standing.routed:
                self.paces.set_paces(replica.worker, replica.paces, replica.standing.alike)
                if self.candidates is not None:
                    self.candidates.note_pace(replica)

    def predict_tokens_per_s(self, replica: Replica) -> float:
        """Return what a replica makes with all its places taken, by the rounds of its own and of those that are alike,
        without drafts; 0 where nothing is known."""
        self.refresh()
        places, standing = replica.places, replica.standing
        together_ms = self.paces.share_tpot_ms(self.paces.find_group(standing.alike), standing.expected_pace, places)
        own_ms = replica.paces.plain.tpot_ms(places)
        if not own_ms and not together_ms:
            return 0.0
        return MS_PER_S * places / reckon_tpot_ms(own_ms, together_ms, places)

    def count_stream(self, name: str, more: int) -> None:
        replica = self._replicas.find_named(name)
        if replica is None:
            return
        standing = replica.standing
        before, places = standing.live, standing.places
        live = standing.live = before + more
        if self.candidates is not None:
            self.candidates.set_load(replica)
        if standing.serves:
            self._sent += more
            self._free += (places - live if live < places else 0) - (places - before if before < places else 0)
            if live > places:
                self._crowded[replica] = None
            elif before > places:
                del self._crowded[replica]
        if standing.decodes:
            if not live:
                del self._busy[replica]
            elif not before:
                self._busy[replica] = None

    def count_places(self) -> tuple[int, int]:
        """Return how many streams are at the replicas that serve, and how many they decode at a time."""
        self.refresh()
        return self._sent, self._places

    def count_ready(self) -> int:
        return self._ready

    def count_hopeful(self) -> int:
        return self._in_service - self._failed

    def count_usable_places(self) -> int:
        """Return how many streams these decode at a time, once their workers are there."""
        return self._usable

    @property
    def waits_beside_places(self) -> bool:
        return bool(self._free > 0 and self._crowded)

    @property
    def all_failed(self) -> bool:
        return 0 < self._in_service == self._failed

    @property
    def is_plain(self) -> bool:
        return not (self._retiring or self._standing_by)

    @property
    def has_unable(self) -> bool:
        return bool(self._unable)

    def count_free(self) -> int:
        self.refresh()
        return self._free

    def take_crowded(self) -> list[Replica]:
        """Return those that serve and have more streams than places; of very many one, another each time."""
        if self.candidates is None or not self._crowded:
            return self.list_crowded()
        first = next(iter(self._crowded))
        self._crowded.move_to_end(first)
        return [first]

    def list_crowded(self) -> list[Replica]:
        self.refresh()
        return sorted(self._crowded, key=place_of) if self._crowded else []

    def list_loading(self) -> list[Replica]:
        self.refresh()
        return sorted(self._loading, key=place_of) if self._loading else []

    def list_busy(self) -> list[Replica]:
        self.refresh()
        return sorted(self._busy, key=place_of) if self._busy else []

    def is_beside(self, replica: Replica) -> bool:
        """Return whether another replica has streams, and so may slow this one down."""
        return len(self._busy) > (replica in self._busy)

    @property
    def works(self) -> bool:
        return bool(self._busy or self._loading)

    def list_on(self, part: Part) -> list[Replica]:
        """Return those on a part that may have streams, in the order of their places."""
        self.refresh()
        if part.kind == "worker":
            replica = self._replicas.find_named(part.name)
            return [replica] if replica is not None and replica.rank in _WITH_STREAMS else []
        return sorted(
            (replica for replica in self._on_part.get(part, ()) if replica.rank in _WITH_STREAMS), key=place_of
        )

    def list_on_device(self, device: str) -> list[Replica]:
        self.refresh()
        return sorted(self._on_device.get(device, ()), key=place_of)

    def find_unwell(self, now_s: float) -> set[Replica]:
        """Return those that may not be healthy: a part of theirs is not."""
        self.refresh()
        parts = self._health.find_unwell(now_s)
        if parts is not self._unwell_by:
            before, self._unwell_by = self._unwell, parts
            self._unwell = {replica for part in parts for replica in self._list_with(part)}
            if self.candidates is not None:
                for replica in before | self._unwell:
                    if replica.standing.routed:
                        self.candidates.put(replica, self._judge(replica, now_s))
        return self._unwell

    def _judge(self, replica: Replica, now_s: float) -> Health:
        if replica not in self._unwell:
            return Health.HEALTHY
        return self._health.judge(replica.parts, now_s, replica.name).state

    def _begin_or_end_narrowing(self) -> None:
        if self.candidates is not None:
            self.candidates.forget_all()
            self.candidates = None
            return
        self.candidates = Candidates(self._replicas, self._loads, self.paces)
        self._unwell_by = None  # their health is found anew
        for replica in self._replicas.with_streams:
            self.candidates.put(replica, Health.HEALTHY)

    def _list_with(self, part: Part) -> list[Replica]:
        if part.kind == "worker":
            replica = self._replicas.find_named(part.name)
            return [replica] if replica is not None else []
        return list(self._on_part.get(part, ()))

    def _take(self, replica: Replica) -> None:
        """Take in what a replica is now, but for the number of its streams."""
        exists, rank, standing = self._replicas.has(replica), replica.rank, replica.standing
        ready, running = replica.state.serving, replica.life.running
        may_have = exists and rank in _WITH_STREAMS
        watched = may_have or (exists and rank in _WATCHED)
        before = (standing.in_service, standing.failed, standing.ready, standing.serves)
        self._count(standing, -1)
        standing.in_service = may_have and rank is Rank.SERVING
        standing.failed = standing.in_service and replica.state.phase == FAILED
        standing.retires = may_have and rank is Rank.RETIRING
        standing.serves = standing.in_service and ready and running
        standing.decodes = watched and ready and running
        standing.places = replica.places
        standing.ready = standing.in_service and replica.state.phase == READY
        known = standing.in_service and replica.state.ready is not None and not standing.failed
        standing.usable = standing.places if known else 0
        self._count(standing, 1)
        self.turns += before != (standing.in_service, standing.failed, standing.ready, standing.serves)
        self._take_cache(replica)
        live = standing.live
        standing.expected_pace, standing.alike = replica.expected_pace, replica.alike
        self.paces.set_paces(replica.worker, replica.paces if may_have else None, standing.alike)
        self._routed += may_have - standing.routed
        if self.candidates is not None and may_have:
            self.candidates.put(replica, standing.health)
        elif self.candidates is not None and standing.routed:
            self.candidates.drop(replica)
        standing.routed = may_have
        _list(self._crowded, replica, listed=standing.serves and live > standing.places)
        _list(self._loading, replica, listed=watched and running and not ready)
        _list(self._busy, replica, listed=standing.decodes and live > 0)
        _list(self._standing_by, replica, listed=standing.in_service and replica.standby)
        unable = may_have and replica.state.ready is not None and bool(replica.state.ready.cannot)
        _list(self._unable, replica, listed=unable)
        if watched is not standing.listed:
            standing.listed = watched
            self._unwell_by = None
            for part in replica.parts:
                _index(self._on_part, part, replica, listed=watched)
            for device in replica.devices:
                _index(self._on_device, device, replica, listed=watched)

    def _count(self, standing: Standing, sign: int) -> None:
        if standing.serves:
            self._places += sign * standing.places
            self._sent += sign * standing.live
            self._free += sign * max(0, standing.places - standing.live)
        self._in_service += sign * standing.in_service
        self._failed += sign * standing.failed
        self._retiring += sign * standing.retires
        self._ready += sign * standing.ready
        self._usable += sign * standing.usable

    def _take_cache(self, replica: Replica) -> None:
        standing, ready, gauges = replica.standing, replica.state.ready, replica.state.gauges
        block_tokens, blocks = (ready.kv.block_tokens, ready.kv.blocks) if ready is not None else (0, 0)
        standing.kv_tokens = block_tokens * blocks
        standing.kv_free_tokens = block_tokens * (gauges.free_blocks if gauges is not None else blocks)
        standing.draft = replica.draft
        server = gauges.server if gauges is not None else None
        standing.server = server if server is not None and (server.others_running or server.others_waiting) else None


def _list(where: dict[Replica, None], replica: Replica, *, listed: bool) -> None:
    if listed:
        where[replica] = None
    else:
        where.pop(replica, None)


def _index(where: dict[_K, dict[Replica, None]], key: _K, replica: Replica, *, listed: bool) -> None:
    replicas = where.setdefault(key, {})
    _list(replicas, replica, listed=listed)
    if not replicas:
        del where[key]
