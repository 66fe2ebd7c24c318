"""The replicas that are looked at for a request, where there are too many to price them all. No effects."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from orchestrator.daemon.control.replicas.replicas import Replica, Replicas
from orchestrator.daemon.control.routing.affinity import PrefixHolders
from orchestrator.daemon.control.routing.loads import LoadBoard
from orchestrator.daemon.control.state import FAILED
from orchestrator.daemon.control.streams.streams import Stream
from policies.serving.failover.health import REFUSES, Health
from policies.serving.narrowing import Kind, Narrowing, step_of
from policies.serving.replica_load import FELT_COMPANY, SharedPaces, is_alike, reckon_tpot_ms

MOST_BLOCKS: Final = 1_000_000
"""Of prompts that are remembered of all replicas together. ADR 0091: bounds memory."""
# Of a token's time without drafts: a replica that waits longer for its draft is of another kind. ADR 0097. Not tuned.
_WAITS: Final = 0.1
# ADR 0091: up to four that remember most of the prompt are priced.
_MOST_HOLDERS: Final = 4
# Tenths of its KV cache that a replica has filled, from which on each tenth is a kind. ADR 0091: below FULL, from which
# a cache costs.
_PRESSED_FROM: Final = 6


class Candidates:
    def __init__(self, replicas: Replicas, loads: LoadBoard, paces: SharedPaces) -> None:
        self._replicas = replicas
        self._paces = paces
        self._loads = loads
        self._narrowing: Narrowing[Replica] = Narrowing()
        self._holders = PrefixHolders()
        self._most_blocks = MOST_BLOCKS

    def put(self, replica: Replica, health: Health) -> None:
        self._narrowing.put(replica.name, replica, self._find_kind(replica, health), replica.standing.live)
        replica.standing.health = health
        if not replica.prefixes.is_told:
            replica.prefixes.tell(self._holders, replica.name, self._most_blocks)
        if self._most_blocks * len(self._narrowing) > MOST_BLOCKS:
            self._most_blocks //= 2
            for other in self._replicas.with_streams:
                if other.prefixes.is_told:
                    other.prefixes.tell(self._holders, other.name, self._most_blocks)

    def note_pace(self, replica: Replica) -> None:
        if self._step_paces(replica) != replica.standing.steps:
            self.put(replica, replica.standing.health)

    def set_load(self, replica: Replica) -> None:
        self._narrowing.set_load(replica.name, replica, replica.standing.live)

    def drop(self, replica: Replica) -> None:
        self._narrowing.drop(replica.name)
        replica.prefixes.tell(None, "", MOST_BLOCKS)

    def forget_all(self) -> None:
        """There are so few that all are priced: nothing is kept."""
        for replica in self._replicas.list_all():
            replica.prefixes.tell(None, "", MOST_BLOCKS)

    def choose(self, stream: Stream, prefix: Sequence[int], more: Sequence[str]) -> tuple[list[Replica], int]:
        """Return the replicas that are looked at for a stream, and how many are not. `more` are, whatever they are."""
        ruled_out = len(stream.failed_at) + len(more)
        chosen = dict.fromkeys(self._narrowing.choose(stream.group, ruled_out))
        names = self._holders.find_holders(prefix)
        holders = [replica for name in names if (replica := self._replicas.find_named(name)) is not None]
        if len(holders) > _MOST_HOLDERS:
            holders = sorted(holders, key=lambda replica: replica.standing.live)[:_MOST_HOLDERS]
        chosen |= dict.fromkeys(holders)
        for name in (stream.at, stream.bound_to, *stream.failed_at, *more):
            replica = self._replicas.find_named(name) if name else None
            if replica is not None and replica.standing.listed:
                chosen[replica] = None
        return list(chosen), len(self._replicas.with_streams) - len(chosen)

    def _find_kind(self, replica: Replica, health: Health) -> Kind:
        standing, state = replica.standing, replica.state
        standing.steps = self._step_paces(replica)
        stretch = self._loads.find_share(replica.device, replica.spec.cores)[0].factor if self._loads.knows else 1.0
        filled = 1.0 - standing.kv_free_tokens / standing.kv_tokens if standing.kv_tokens else 0.0
        takes = standing.decodes and health not in REFUSES
        key: Hashable = (
            replica.rank,
            replica.standby,
            None if standing.decodes else (state.phase, replica.life.stage),
            health,
            replica.group,
            standing.places,
            step_of(standing.kv_tokens),
            max(_PRESSED_FROM, int(10.0 * filled)),
            standing.draft,
            standing.alike,
            standing.steps,
            step_of(stretch),
            not replica.runs,
            (standing.server.others_running, standing.server.others_waiting) if standing.server is not None else None,
        )
        shared_ms = self._paces.share_tpot_ms(self._paces.find_group(standing.alike), standing.expected_pace, 1)
        token_ms = reckon_tpot_ms(replica.paces.plain.tpot_ms(1), shared_ms, 1) * stretch
        return Kind(key, takes, state.phase != FAILED, replica.group, token_ms, standing.places)

    def _step_paces(self, replica: Replica) -> tuple[int, ...]:
        """Return what sets a replica apart from those on devices that are alike, in steps: what a token takes it alone
        and with all places taken, what it waits for its draft, and what others cost it; () where nothing does."""
        pace, standing = replica.paces.plain, replica.standing
        group, places = self._paces.find_group(standing.alike), standing.places
        alone_ms, full_ms = pace.tpot_ms(1), pace.tpot_ms(places)
        drafted = replica.paces.drafted.get(standing.draft) if standing.draft else None
        wait_ms = drafted.wait_ms / drafted.weight if drafted is not None and drafted.weight else 0.0
        waits = step_of(wait_ms) if wait_ms > _WAITS * alone_ms else 0
        company = step_of(replica.paces.company) if replica.paces.company >= FELT_COMPANY else 0
        if is_alike(alone_ms, group.plain.tpot_ms(1)) and is_alike(full_ms, group.plain.tpot_ms(places)):
            return (waits, company) if waits or company else ()
        return step_of(alone_ms), step_of(full_ms), waits, company
