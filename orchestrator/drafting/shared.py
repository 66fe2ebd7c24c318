"""One drafter for several targets: their sequences share its passes.

Each target has a session with sequences of its own. A pass drafts one token more for every sequence that a token is
wanted of, whichever target it is of. Those are the sequences of open asks, and ahead those of targets that this takes
nothing from. No pass waits for company: what comes meanwhile is in the next (`policies/speculation/draft_pass`). An ask
is answered as soon as it is fulfilled, or when its time does not allow for another pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from orchestrator.clock import Clock
from orchestrator.drafting.load_meter import LoadMeter
from orchestrator.drafting.lookahead import LookaheadSequence
from orchestrator.drafting.port import NOTHING, Ask, Draft, Drafter
from orchestrator.drafting.protocol import Begin, End, Extend, Update
from policies.speculation.draft_pass import PassTimes, WantedRow, choose_rows


@dataclass(slots=True, eq=False)
class _OpenAsk:
    """A draft request that is owed an answer. `waits`: a draft was missing when it came. `passes`: that had one of its
    sequences. `moved`: how many tokens were committed to a sequence since, where its target went on meanwhile."""

    number: int
    asks: Sequence[Ask]
    asked: list[tuple[LookaheadSequence, Ask]]
    end_s: float
    round_s: float
    waits: bool
    passes: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    def list_growing(self, step_s: float) -> list[LookaheadSequence]:
        """Return the sequences that another token is worth its time for. The first pass is free: without it nobody
        would learn that passes have become cheaper."""
        price = step_s / self.round_s if self.passes and self.round_s else 0.0
        return [sequence for sequence, ask in self.asked if sequence.wants_more_for(ask, price)]


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """What is to be sent to a session: one draft for each ask of the request of this number. `offsets`: see
    drafting.protocol.DraftResponse."""

    session: DraftSession
    number: int
    drafts: list[Draft]
    offsets: list[int]


@dataclass(slots=True, eq=False)
class DraftSession:
    """One connected target. `runs_ahead`: it is drafted for while it verifies. `hits` and `misses`: see
    drafting.protocol.DraftResponse. `in_company`: a pass since its last answer had rows of another target too."""

    number: int
    runs_ahead: bool
    hits: int = 0
    misses: int = 0
    sequences: dict[str, LookaheadSequence] = field(default_factory=dict)
    open_ask: _OpenAsk | None = None
    in_company: bool = False

    def key(self, key: str) -> str:
        """Return what the drafter calls a sequence of this target: others may have one of the same name."""
        return f"{self.number}/{key}"


class SharedDrafter:
    """See the module. Asked again for a longer draft of the same sequence, the drafter must go on where it was."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self.drafter = drafter
        self.meter = LoadMeter(clock)
        self._clock = clock
        self._numbers = count()
        self._sessions: list[DraftSession] = []
        self._times = PassTimes()
        self._unread_passes = 0
        self._due: list[SharedAnswer] = []

    def join(self, *, runs_ahead: bool) -> DraftSession:
        """Return a session of a target that has said nothing yet."""
        session = DraftSession(next(self._numbers), runs_ahead)
        self._sessions.append(session)
        return session

    def leave(self, session: DraftSession) -> None:
        """Forget a target: its sequences give their places up."""
        for key in tuple(session.sequences):
            self.update(session, End(key, keep=False))
        self._sessions.remove(session)
        self._due = [answer for answer in self._due if answer.session is not session]

    def update(self, session: DraftSession, update: Update) -> None:
        """Take in what became of a sequence. An ask for one that begins anew or ends is answered before."""
        one = session.open_ask
        if one is not None and any(ask.key == update.key for _, ask in one.asked):
            if isinstance(update, Extend):
                one.moved[update.key] += len(update.tokens)
            else:
                self._close_ask(session, one)
        match update:
            case Begin(key, tokens, sampling):
                session.sequences[key] = LookaheadSequence(session.key(key))
                self.drafter.begin(session.key(key), tokens, sampling)
            case Extend(key, tokens):
                if (sequence := session.sequences.get(key)) is not None:
                    sequence.commit(tokens)
                    self.drafter.extend(sequence.key, tokens)
                    if one is not None and session.open_ask is one:
                        one.waits = one.waits or not all(sequence.ahead for sequence, _ in one.asked)
            case End(key, keep):
                if (sequence := session.sequences.pop(key, None)) is not None:
                    self.drafter.end(sequence.key, keep=keep)

    def ask(
        self, session: DraftSession, number: int, asks: Sequence[Ask], within_s: float, round_s: float = 0.0
    ) -> None:
        """Owe a session one draft for each ask, within that time; an older request that is open is not answered.

        Where the target waits, `round_s` is the time of one of its rounds. A token that is accepted with chance p saves
        p * round_s, and is drafted while that is more than drafting it takes. 0: nobody waits, and time is free.
        """
        asked = [(session.sequences[ask.key], ask) for ask in asks if ask.key in session.sequences]
        missing = sum(not sequence.ahead for sequence, _ in asked)
        if session.runs_ahead:
            session.hits += len(asked) - missing
            session.misses += missing
        end_s = self._clock.monotonic_s() + within_s
        session.open_ask = _OpenAsk(number, asks, asked, end_s, round_s, missing > 0)

    def take_answers(self) -> list[SharedAnswer]:
        """Return the answers that are due now: what was there already, what is fulfilled, and what is out of time."""
        for session in self._sessions:
            one = session.open_ask
            if one is not None and self._is_due(one):
                self._close_ask(session, one)
        found, self._due = self._due, []
        return found

    def run_pass(self) -> bool:
        """Draft one token further for every sequence that the next pass takes. False: there is nothing to do."""
        wanted = [found for session in self._sessions for found in self._list_wanted(session)]
        chosen = choose_rows([row for _, _, row in wanted], self._unread_passes)
        if not chosen:
            return False
        taken = [wanted[number] for number in chosen]
        unread = sum(row.reading for _, _, row in wanted) > sum(row.reading for _, _, row in taken)
        self._unread_passes = self._unread_passes + 1 if unread else 0
        sessions = {id(session): session for session, _, _ in taken}.values()
        for session in sessions:
            session.in_company = session.in_company or len(sessions) > 1
        for session in {id(session): session for session, _, row in taken if row.asked}.values():
            if session.open_ask is not None:
                session.open_ask.passes += 1
        self._grow([sequence for _, sequence, _ in taken], len(sessions))
        return True

    def _list_wanted(self, session: DraftSession) -> list[tuple[DraftSession, LookaheadSequence, WantedRow]]:
        one = session.open_ask
        asked = one.list_growing(self._times.mean_s) if one is not None else []
        ahead = [sequence for sequence in session.sequences.values() if sequence.wants_ahead and sequence not in asked]
        rows = [(sequence, True) for sequence in asked]
        rows += [(sequence, False) for sequence in ahead if session.runs_ahead]
        return [(session, sequence, WantedRow(asks, sequence.reading > 0, sequence.chance)) for sequence, asks in rows]

    def _is_due(self, one: _OpenAsk) -> bool:
        if not one.waits or not one.list_growing(self._times.mean_s):
            return True
        return bool(one.passes) and self._clock.monotonic_s() + self._times.safe_s > one.end_s

    def _close_ask(self, session: DraftSession, one: _OpenAsk) -> None:
        session.open_ask = None
        cut = bool(one.list_growing(self._times.mean_s))
        self.meter.observe_answer(crowded=cut and session.in_company)
        session.in_company = False
        found = {ask.key: sequence.draft(ask) for sequence, ask in one.asked}
        for sequence, ask in one.asked:
            sequence.wanted = len(found[ask.key].tokens) + 1 + ask.limit
        drafts = [found.get(ask.key, NOTHING) for ask in one.asks]
        offsets = [one.moved[ask.key] for ask in one.asks] if one.moved else []
        self._due.append(SharedAnswer(session, one.number, drafts, offsets))

    def _grow(self, sequences: Sequence[LookaheadSequence], targets: int) -> None:
        """Ask for one token more than each sequence has."""
        started_s = self._clock.monotonic_s()
        drafts = self.drafter.propose([Ask(sequence.key, len(sequence.ahead) + 1) for sequence in sequences])
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.grow(draft)
        took_s = self._clock.monotonic_s() - started_s
        reads = any(sequence.reading for sequence in sequences)  # who reads a prompt takes longer
        self.meter.observe_pass(took_s, targets, reads=reads)
        if not reads:
            self._times.observe(len(sequences), took_s)
