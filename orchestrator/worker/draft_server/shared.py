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
from orchestrator.protocol.draft_messages import DraftLoad
from orchestrator.worker.draft_server.lookahead import Branch, LookaheadSequence
from orchestrator.worker.drafting.port import NOTHING, Ask, BranchingDrafter, Draft, Drafter
from orchestrator.worker.drafting.protocol import Begin, End, Extend, Update
from policies.running_mean import update_mean
from policies.speculation.draft_pass import (
    MOST_BRANCHES,
    PassTimes,
    WantedRow,
    choose_rows,
    count_branches,
    price_new_branch,
    value_branch,
)

# ADR 0056: once a second. Not tuned: who decides waits for three of them.
EVERY_S = 1.0
# ADR 0056: below the 3 s after which a silent worker is ended.
IDLE_EVERY_S = 2.0
_NEWEST = 0.05  # weight of the newest pass in their mean times


@dataclass(slots=True)
class _Window:
    began_s: float
    busy_s: float = 0.0
    answers: int = 0
    crowded: int = 0


class LoadMeter:
    """Counts passes and answers over windows of EVERY_S. While nothing is done it tells that every IDLE_EVERY_S, as a
    sign of life to whoever is connected."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = _Window(clock.monotonic_s())
        self._alone_s = self._shared_s = 0.0
        self._told: DraftLoad | None = None
        self._told_s = 0.0

    def observe_pass(self, took_s: float, targets: int, *, reads: bool) -> None:
        """A pass for so many targets is over. `reads`: it read a prompt, which tells nothing of what company costs."""
        self._window.busy_s += took_s
        if reads:
            return
        if targets > 1:
            self._shared_s = update_mean(self._shared_s or took_s, took_s, _NEWEST)
        else:
            self._alone_s = update_mean(self._alone_s or took_s, took_s, _NEWEST)

    def observe_answer(self, *, crowded: bool) -> None:
        """An answer went. `crowded`: drafts were cut short, and another target's had shared the passes for them."""
        self._window.answers += 1
        self._window.crowded += crowded

    def take_report(self, targets: int, sequences: int) -> DraftLoad | None:
        """Return the load of the window that is over; None while it goes on, and where there is nothing to tell."""
        now_s = self._clock.monotonic_s()
        window = self._window
        if now_s - window.began_s < EVERY_S:
            return None
        self._window = _Window(now_s)
        load = DraftLoad(
            targets=targets,
            sequences=sequences,
            busy=round(min(1.0, window.busy_s / (now_s - window.began_s)), 3),
            crowded=round(window.crowded / window.answers, 3) if window.answers else 0.0,
            slowdown=round(self._shared_s / self._alone_s, 3) if self._shared_s and self._alone_s else 0.0,
        )
        alive = targets > 0 and now_s - self._told_s >= IDLE_EVERY_S
        if load == self._told and not window.busy_s and not alive:
            return None
        self._told, self._told_s = load, now_s
        return load


@dataclass(slots=True, eq=False)
class _OpenAsk:
    """A draft request that is owed an answer. `waits`: a draft was missing when it came. `passes`: that had one of its
    sequences. `moved`: how many tokens were committed to a sequence since, where its target went on meanwhile."""

    number: int
    asks: Sequence[Ask]
    sequence_asks: list[tuple[LookaheadSequence, Ask]]
    end_s: float
    round_s: float
    waits: bool
    passes: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    def list_growing(self, step_s: float) -> list[LookaheadSequence]:
        """Return the sequences that another token is worth its time for. The first pass is free: without it nobody
        would learn that passes have become cheaper."""
        price = step_s / self.round_s if self.passes and self.round_s else 0.0
        return [sequence for sequence, ask in self.sequence_asks if sequence.wants_more_for(ask, price)]


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
    """One connected target. `runs_ahead`: it is drafted for while it verifies, `lead`: so many tokens further than its
    next drafts, as it is behind a link. `hits` and `misses`: see
    drafting.protocol.DraftResponse. `in_company`: a pass since its last answer had rows of another target too."""

    number: int
    runs_ahead: bool
    lead: int = 0
    hits: int = 0
    misses: int = 0
    sequences: dict[str, LookaheadSequence] = field(default_factory=dict)
    open_ask: _OpenAsk | None = None
    in_company: bool = False
    begin_count: int = 0

    def key(self, key: str) -> str:
        """Return what the drafter calls a sequence of this target: others may have one of the same name."""
        return f"{self.number}/{key}"


@dataclass(frozen=True, slots=True)
class SharedLines:
    """What is drafted ahead for a sequence and not asked for, to be sent to a session."""

    session: DraftSession
    sequence: LookaheadSequence


_Wanted = tuple[DraftSession, LookaheadSequence, WantedRow]


class SharedDrafter:
    """See the module. Asked again for a longer draft of the same sequence, the drafter must go on where it was."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self.drafter = drafter
        self.meter = LoadMeter(clock)
        self._clock = clock
        self._branching = drafter if isinstance(drafter, BranchingDrafter) else None
        self._numbers = count()
        self._sessions: list[DraftSession] = []
        self._times = PassTimes()
        self._unread_passes = 0
        self._due: list[SharedAnswer] = []

    def join(self, *, runs_ahead: bool) -> DraftSession:
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
        open_ask = session.open_ask
        if open_ask is not None and any(ask.key == update.key for _, ask in open_ask.sequence_asks):
            if isinstance(update, Extend):
                open_ask.moved[update.key] += len(update.tokens)
            else:
                self._close_ask(session, open_ask)
        match update:
            case Begin(key, tokens, sampling):
                if (before := session.sequences.get(key)) is not None:
                    self._prune(before.branches)
                session.begin_count += 1
                session.sequences[key] = LookaheadSequence(session.key(key), session.begin_count, len(tokens))
                self.drafter.begin(session.key(key), tokens, sampling)
            case Extend(key, tokens):
                if (sequence := session.sequences.get(key)) is not None:
                    self._commit(sequence, tokens)
                    if open_ask is not None and session.open_ask is open_ask:
                        open_ask.waits |= not all(sequence.ahead for sequence, _ in open_ask.sequence_asks)
            case End(key, keep):
                if (sequence := session.sequences.pop(key, None)) is not None:
                    self._prune(sequence.branches)
                    self.drafter.end(sequence.key, keep=keep)

    def _commit(self, sequence: LookaheadSequence, tokens: Sequence[int]) -> None:
        """Go on from what the target chose: with what was guessed, or with the branch that was made for it."""
        branch = sequence.find_branch(tokens)
        over = sequence.commit(tokens)
        self.drafter.extend(sequence.key, tokens)
        if branch is not None and self._branching is not None:
            over.remove(branch)
            sequence.guess, sequence.stuck = branch.line.guess, branch.line.stuck
            self._branching.adopt(sequence.key, branch.line.key)
        self._prune(over)

    def _prune(self, branches: Sequence[Branch]) -> None:
        if self._branching is not None:
            for branch in branches:
                self._branching.prune(branch.line.key)

    def ask(
        self, session: DraftSession, number: int, asks: Sequence[Ask], within_s: float, round_s: float = 0.0
    ) -> None:
        """Owe a session one draft for each ask, within that time; an older request that is open is not answered.

        Where the target waits, `round_s` is the time of one of its rounds. A token that is accepted with chance p saves
        p * round_s, and is drafted while that is more than drafting it takes. 0: nobody waits, and time is free.
        """
        sequence_asks = [(session.sequences[ask.key], ask) for ask in asks if ask.key in session.sequences]
        missing = sum(not sequence.ahead for sequence, _ in sequence_asks)
        if session.runs_ahead:
            session.hits += len(sequence_asks) - missing
            session.misses += missing
        end_s = self._clock.monotonic_s() + within_s
        session.open_ask = _OpenAsk(number, asks, sequence_asks, end_s, round_s, missing > 0)

    def take_answers(self) -> list[SharedAnswer]:
        """Return the answers that are due now: what was there already, what is fulfilled, and what is out of time."""
        for session in self._sessions:
            open_ask = session.open_ask
            if open_ask is not None and self._is_due(open_ask):
                self._close_ask(session, open_ask)
        due, self._due = self._due, []
        return due

    def list_lines(self) -> list[SharedLines]:
        """Return what has grown, of what is drafted ahead, since it was sent to whoever verifies meanwhile."""
        return [
            SharedLines(session, sequence)
            for session in self._sessions
            if session.runs_ahead
            for sequence in session.sequences.values()
            if sequence.has_news
        ]

    def run_pass(self) -> bool:
        """Draft one token further for every sequence that the next pass takes. False: there is nothing to do."""
        wanted = [line for session in self._sessions for line in self._list_lines(session)]
        row_share = self._times.row_share
        for session in self._sessions:
            branches = _list_branches(session)
            rows = [row for _, _, row in (*wanted, *branches)]
            least = price_new_branch(rows, self._unread_passes, row_share)
            self._branch_out(session, least, count_branches(row_share))
        wanted += [line for session in self._sessions for line in _list_branches(session)]
        chosen = choose_rows([row for _, _, row in wanted], self._unread_passes, row_share)
        if not chosen:
            return False
        taken = [wanted[number] for number in chosen]
        unread = sum(row.reading for _, _, row in wanted) > sum(row.reading for _, _, row in taken)
        self._unread_passes = self._unread_passes + 1 if unread else 0
        sessions = {id(session): session for session, _, _ in taken}.values()
        for session in sessions:
            session.in_company = session.in_company or len(sessions) > 1
        for session in {id(session): session for session, _, row in taken if row.urgent}.values():
            if session.open_ask is not None:
                session.open_ask.passes += 1
        self._grow([sequence for _, sequence, _ in taken], len(sessions))
        return True

    def _branch_out(self, session: DraftSession, least: float, more: int) -> None:
        """Begin branches for the likeliest outcomes of what the target verifies now, its own token alone among them: so
        many `more` of each sequence, as the next pass has no room for others. `least`: see price_new_branch, a
        value."""
        if self._branching is None or not session.runs_ahead:
            return
        most = MOST_BRANCHES // max(1, len(session.sequences))
        for sequence in session.sequences.values():
            bound = min(most, len(sequence.branches) + more)
            if len(sequence.branches) >= bound:
                continue
            outcomes = [
                outcome
                for outcome in self._branching.list_outcomes(sequence.key)
                if value_branch(outcome.chance, grown=False) >= least
            ]
            for outcome in sequence.choose_outcomes(outcomes, bound, session.lead):
                key = f"{sequence.key}/{sequence.committed + outcome.accepted}/{outcome.token}"
                if self._branching.branch(sequence.key, key, outcome):
                    line = LookaheadSequence(key, reading=0, wanted=max(1, sequence.limit))
                    sequence.branches.append(Branch(outcome, line))

    def _list_lines(self, session: DraftSession) -> list[_Wanted]:
        open_ask = session.open_ask
        growing = open_ask.list_growing(self._times.mean_s) if open_ask is not None else []
        rows = [(sequence, True) for sequence in growing]
        for sequence in session.sequences.values() if session.runs_ahead else ():
            if sequence.wants_ahead and sequence not in growing:
                rows.append((sequence, False))
        return [(session, sequence, WantedRow(asks, sequence.reading > 0, sequence.chance)) for sequence, asks in rows]

    def _is_due(self, open_ask: _OpenAsk) -> bool:
        if not open_ask.waits or not open_ask.list_growing(self._times.mean_s):
            return True
        return bool(open_ask.passes) and self._clock.monotonic_s() + self._times.safe_s > open_ask.end_s

    def _close_ask(self, session: DraftSession, open_ask: _OpenAsk) -> None:
        session.open_ask = None
        cut = bool(open_ask.list_growing(self._times.mean_s))
        self.meter.observe_answer(crowded=cut and session.in_company)
        session.in_company = False
        by_key = {ask.key: sequence.draft(ask) for sequence, ask in open_ask.sequence_asks}
        for sequence, ask in open_ask.sequence_asks:
            sequence.sent, sequence.limit = len(by_key[ask.key].tokens), ask.limit
            sequence.wanted = len(by_key[ask.key].tokens) + 1 + ask.limit + session.lead
        drafts = [by_key.get(ask.key, NOTHING) for ask in open_ask.asks]
        offsets = [open_ask.moved[ask.key] for ask in open_ask.asks] if open_ask.moved else []
        self._due.append(SharedAnswer(session, open_ask.number, drafts, offsets))

    def _grow(self, sequences: Sequence[LookaheadSequence], targets: int) -> None:
        started_s = self._clock.monotonic_s()
        drafts = self.drafter.propose([Ask(sequence.key, len(sequence.ahead) + 1) for sequence in sequences])
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.grow(draft)
        took_s = self._clock.monotonic_s() - started_s
        reads = any(sequence.reading for sequence in sequences)  # who reads a prompt takes longer
        self.meter.observe_pass(took_s, targets, reads=reads)
        if not reads:
            self._times.observe(len(sequences), took_s)


def _list_branches(session: DraftSession) -> list[_Wanted]:
    return [
        (session, branch.line, WantedRow(urgent=False, reading=False, chance=_value(branch), branch=True))
        for sequence in session.sequences.values()
        for branch in sequence.branches
        if branch.line.wants_ahead
    ]


def _value(branch: Branch) -> float:
    return value_branch(branch.chance, grown=bool(branch.line.ahead))
