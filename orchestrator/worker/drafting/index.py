"""The index drafter: continue as a passage of the operator's documents goes on (drafting/passages.py).

It is asked where cheaper drafters promise little. Documents that a request does not quote bring nothing. So what an ask
brings is measured, and where it is worth less than the ask takes, only one in a while is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.cache import count_common_prefix
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.passages import MATCH, Passages
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, DraftHints, Meter
from orchestrator.worker.drafting.suffix_vote import VotedDraft, VoteRates, vote_draft, weigh_match
from policies.running_mean import update_mean
from policies.sampling import Sampling
from policies.speculation.probe import Probe

# That vote. ADR 0086. Not tuned apart.
_PLACES = 16
# Tokens: a single one is everywhere in a large store. ADR 0086.
_LEAST_MATCH = 2
# ADR 0086: a store that says nothing of what is asked costs nothing measurable so (1.03 times the speed without).
_SELDOM = Probe(16)
# Weight of the newest ask in what one brings. ADR 0086. Not tuned: quotations come in runs.
_NEWEST = 0.04
# Tokens that an ask is thought to bring at first. ADR 0086: so that a store is looked at in a new sequence.
_HOPED = 0.5
# So often is looked for a store that replaces this one. ADR 0086: one stat a second.
_RENEW_S = 1.0
_UNBOUNDED = 1 << 62  # no bound
# An ask is to bring so many times what it takes. ADR 0086: rows and learning take as much again.
_MARGIN = 2.0


class IndexDrafter:
    """Implements drafting.port.Drafter. It drafts from the store at a path, which is called `store`. It does not own
    the text: it follows the end of each sequence alone. A store of at most `most_bytes` that replaces it is taken as a
    sequence begins."""

    def __init__(
        self, path: Path, store: str, clock: Clock, *, name: str, vocabulary: str, most_bytes: int = _UNBOUNDED
    ) -> None:
        """Raises MappedFileUnusable where the store cannot be used with this vocabulary (its fingerprint)."""
        self.name = name
        self._path, self._vocabulary, self._most_bytes = path, vocabulary, most_bytes
        self._looked_s = clock.monotonic_s()
        self._store = store
        self._clock = clock
        self._passages = Passages(path, vocabulary)
        self._meter = Meter(DrafterState(name, "index", memory_bytes=self._passages.size_bytes), clock)
        self._ends: dict[str, list[int]] = {}
        self._rates = VoteRates()
        self._asked: dict[str, VotedDraft] = {}
        self._rounds = 0
        self._brought, self._ask_ms = _HOPED, 0.0

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._renew()
        self._asked.pop(key, None)
        if hints.stores is None or self._store in hints.stores:
            self._ends[key] = list(tokens[-MATCH:])
        else:
            self._ends.pop(key, None)

    def _renew(self) -> None:
        """Go on with a store that was made anew under the same path. The old one stays where that cannot be used."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < _RENEW_S:
            return
        self._looked_s = now_s
        if not self._passages.is_replaced:
            return
        try:
            renewed = Passages(self._path, self._vocabulary)
        except MappedFileUnusable:
            return
        before, self._passages = self._passages, renewed
        if renewed.size_bytes > self._most_bytes:
            before, self._passages = renewed, before
        before.close()
        self._brought = max(self._brought, _HOPED)
        self._meter.state = msgspec.structs.replace(self._meter.state, memory_bytes=self._passages.size_bytes)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        end = self._ends.get(key)
        if end is None:
            return
        end.extend(tokens)
        del end[:-MATCH]
        if (proposed := self._asked.pop(key, None)) is not None:
            self._brought = update_mean(self._brought, count_common_prefix(proposed.tokens, tokens), _NEWEST)
            self._rates.learn(proposed, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if not any(ask.key in self._ends for ask in asks) or not self._is_due(asks[0]):
            return [NOTHING] * len(asks)
        started_s = self._clock.monotonic_s()
        with self._meter.round():
            drafts = [self._draft(ask) for ask in asks]
        took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S / len(asks)
        self._ask_ms = update_mean(self._ask_ms, took_ms, _NEWEST)
        return drafts

    def _is_due(self, ask: Ask) -> bool:
        """Return whether to look in this round: what a look brings is to be worth what it takes, or it is tried."""
        self._rounds += 1
        pays = ask.fixed or not ask.round_ms or self._brought * ask.round_ms >= _MARGIN * self._ask_ms
        return pays or _SELDOM.is_due(self._rounds)

    def _draft(self, ask: Ask) -> Draft:
        end, limit = self._ends.get(ask.key), ask.limit
        if end is None or limit <= 0:
            return NOTHING
        matches = self._passages.find_matches(end[-MATCH:], _PLACES, _LEAST_MATCH)
        read = self._passages.read
        voters = [(weigh_match(match.length, own=False), read(match.place, limit), 0, False) for match in matches]
        longest = matches[0].length if matches else 0
        draft, self._asked[ask.key] = vote_draft(voters, longest, self._rates, limit, self.name)
        return draft

    def end(self, key: str, *, keep: bool) -> None:
        self._ends.pop(key, None)
        self._asked.pop(key, None)

    def memory_bytes(self) -> int:
        return self._passages.size_bytes

    def states(self) -> list[DrafterState]:
        return [self._meter.state]

    def close(self) -> None:
        self._passages.close()
