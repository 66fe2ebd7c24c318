"""Asks a draft model only where it pays: `policies/speculation/gate`, fed with what drafts took and brought.

What is learned belongs to the drafter and not to a request, so a new request does not pay for it again. Greedy, coupled
and drawn drafts are judged separately, and so are loads: what drafts bring to a batch says little of one sequence. Two
figures count: the tokens that drafts bring beyond those of cheaper drafters, and the time that they add to a round.
Where one sequence decodes, the target's part is measured. So whatever the two models take from each other (caches,
threads) is in it. Else it is taken from the rows, because other drafters' drafts and a grown batch would be in it.

A text that the model has not read (it is not read while drafts do not pay) is read where that is worth it, and behind
its first token: who waits for that does not wait for drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.worker.drafting.cache import DraftSequence
from orchestrator.worker.drafting.port import Ask, Draft
from policies.running_mean import update_mean
from policies.sampling import Rule
from policies.speculation.gate import (
    TRIAL_ROUNDS,
    DraftCost,
    GateState,
    decide_drafting,
    observe_drafted_round,
    reads,
)
from policies.speculation.trial_account import FIRST_ROUNDS, release_held_back, spend

_Kind = tuple[Rule, int]
"""What is judged apart: how tokens are chosen, and the power of two that the number of sequences is below."""

# Least weight of the newest sequence in the mean length. Not tuned.
_NEWEST = 0.1
_USUAL_TOKENS = 128.0
"""The length of an output, until some ended. Not tuned."""
_TRIAL_TOKENS = 4
"""A trial's drafts are no longer: it is to tell what a token costs and brings, and to lose little. ADR 0016."""


@dataclass(slots=True)
class _GatedRound:
    """What is known of the last round's drafts of a rule. `sequences`: who decoded in it, drafted for or not. `load`:
    as in _Kind. `cost_ms`: of drafting; `rows_ms`: of verification, going by the rows. `gained`: accepted tokens beyond
    those that cheaper drafts had right, too."""

    round_ms: float
    sequences: int
    load: int
    cost_ms: float = 0.0
    rows_ms: float = 0.0
    reading: bool = False
    gained: int = 0

    def compute_added_ms(self, last_ms: float) -> float:
        """Return what the drafts added to a round whose target's part took `last_ms` (0: not known)."""
        measured = last_ms > 0.0 and self.sequences == 1
        return self.cost_ms + (max(0.0, last_ms - self.round_ms) if measured else self.rows_ms)


@dataclass(slots=True)
class DraftGate:
    """See the module. `reading_ms` estimates what it takes to read what a sequence is behind."""

    reading_ms: Callable[[DraftSequence], float]
    _worths: defaultdict[_Kind, GateState] = field(default_factory=lambda: defaultdict(GateState))
    _saved: float = FIRST_ROUNDS  # one account pays for trials of all kinds
    _open: dict[Rule, _GatedRound] = field(default_factory=dict)
    _usual_tokens: float = _USUAL_TOKENS
    _ended: int = 0

    @property
    def rests(self) -> bool:
        """Whether trials have shown that drafts do not pay under any rule and load so far."""
        worths = self._worths.values()
        return any(worth.rounds for worth in worths) and not any(worth.drafting for worth in worths)

    def choose_asks(self, asks: Sequence[Ask], known: Mapping[str, DraftSequence], step_ms: float) -> list[Ask]:
        """Return those to draft for in this round; a round with whoever asks was completed since the last call."""
        self._settle(max((ask.last_ms for ask in asks), default=0.0))
        by_rule: defaultdict[Rule, list[tuple[float, Ask, DraftSequence]]] = defaultdict(list)
        kept: list[Ask] = []
        for ask in asks:
            sequence = known.get(ask.key)
            if sequence is None or ask.fixed:
                kept.append(ask)
                continue
            reading_ms = self.reading_ms(sequence)
            if not (ask.first and reading_ms):  # a text is read behind the first token
                by_rule[sequence.sampling.rule].append((reading_ms, ask, sequence))
        for rule, candidates in by_rule.items():
            candidates.sort(key=lambda candidate: candidate[0])
            kept += self._worth_it(rule, candidates, step_ms, len(asks), 1.0 / len(by_rule))
        return kept

    def _worth_it(
        self,
        rule: Rule,
        candidates: Sequence[tuple[float, Ask, DraftSequence]],
        step_ms: float,
        sequences: int,
        rounds: float,
    ) -> list[Ask]:
        """Return the asks that are granted; they come in the order of what there is to read for them. `rounds`: the
        rule's part of this one."""
        round_ms, kind = candidates[0][1].round_ms, (rule, sequences.bit_length())
        worth = decide_drafting(self._worth(kind), DraftCost(round_ms, step_ms, candidates[0][0]), rounds)
        self._keep(kind, worth)
        if not worth.drafting:
            return []
        kept: list[Ask] = []
        rows_ms = sum(ask.row_ms for _, ask, _ in candidates if not ask.free)
        for reading_ms, ask, known in candidates:
            cost = DraftCost(round_ms, step_ms, reading_ms, sequences, rows_ms)
            if not reads(worth, cost, self.estimate_left(known)):
                break
            worth = replace(worth, account=spend(worth.account, reading_ms / round_ms))
            tried = worth.rounds < TRIAL_ROUNDS
            kept.append(replace(ask, limit=min(ask.limit, _TRIAL_TOKENS)) if tried else ask)
        if kept:
            self._open[rule] = _GatedRound(round_ms, sequences, kind[1])
        return kept

    def estimate_left(self, known: DraftSequence) -> float:
        """Return how many tokens are expected to come behind a sequence's."""
        done = len(known.tokens) - known.prompt
        return max(self._usual_tokens - done, done)

    def _worth(self, kind: _Kind) -> GateState:
        worth = self._worths[kind]
        return replace(worth, account=worth.account._replace(saved=self._saved))

    def _keep(self, kind: _Kind, worth: GateState) -> None:
        self._worths[kind], self._saved = worth, worth.account.saved

    def observe_drafts(self, took_ms: float, drafts: Iterable[tuple[Rule, Ask, Draft]], *, reading: bool) -> None:
        """The drafts that were chosen are there, after so long; `reading`: with more to read than verdicts."""
        made = list(drafts)
        for rule, ask, draft in made:
            if not ask.fixed and (gated := self._open.get(rule)) is not None:
                gated.cost_ms += took_ms / len(made)
                gated.rows_ms += ask.row_ms * max(0, len(draft.tokens) - ask.free)
                gated.reading = reading

    def observe_gain(self, rule: Rule, tokens: int) -> None:
        """A draft had so many tokens right beyond those that the cheaper one had right, too (below 0: fewer)."""
        if (gated := self._open.get(rule)) is not None:
            gated.gained += tokens

    def observe_sequence_start(self) -> None:
        for kind, worth in self._worths.items():
            self._worths[kind] = replace(worth, account=release_held_back(worth.account))

    def observe_sequence_end(self, known: DraftSequence) -> None:
        """A sequence ended: how long others will be is guessed from that."""
        self._usual_tokens = update_mean(
            self._usual_tokens, float(len(known.tokens) - known.prompt), _NEWEST, self._ended
        )
        self._ended += 1

    def _settle(self, last_ms: float) -> None:
        for rule, gated in self._open.items():
            accepted = gated.gained / gated.sequences
            kind = rule, gated.load
            worth = observe_drafted_round(
                self._worth(kind),
                round_ms=gated.round_ms,
                accepted=accepted,
                cost_ms=gated.compute_added_ms(last_ms),
                reading=gated.reading,
            )
            self._keep(kind, worth)
        self._open.clear()
