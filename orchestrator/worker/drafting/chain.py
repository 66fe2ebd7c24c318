"""Several drafters as one, in order of cost: a later one is asked where the earlier ones have little to propose.

Drafters are compared by the tokens that can be expected of their drafts, so the certainty that each states is
calibrated here by outcomes. Of the text's repetitions, say, far fewer are right in sampled text than in greedy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from orchestrator.worker.drafting.guard import GuardedDrafter
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Alternative, Ask, Draft, Drafter, DraftHints
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.drafting.variants import DrafterGroup
from policies.sampling import Sampling
from policies.speculation.calibration import Calibration, chance, observe_draft_outcome
from policies.speculation.chain import OPTIMISM_TOKENS, asks_on, estimate_accepted_tokens, usual_after


@dataclass(slots=True)
class _DrafterStats:
    """What is known of one drafter, for one kind of text (greedy or sampled). `usual`: see
    policies.speculation.chain. `proposed` are its last drafts, by sequence, as it gave them."""

    calibration: Calibration = field(default_factory=Calibration)
    usual: float = OPTIMISM_TOKENS
    proposed: dict[str, Draft] = field(default_factory=dict)

    def note(self, key: str, draft: Draft) -> Draft:
        """Return a draft with calibrated confidences, and remember it until its verdict."""
        self.proposed[key] = draft
        calibrated = replace(draft, confidences=tuple(chance(self.calibration, c) for c in draft.confidences))
        if not draft.is_drawn(0):  # later confidences tell of draws that may be proposed again: see _promises_more
            self.usual = usual_after(self.usual, calibrated.confidences)
        return calibrated

    def learn(self, key: str, committed: Sequence[int]) -> None:
        draft = self.proposed.pop(key, None)
        if draft is None:
            return
        self.calibration = observe_draft_outcome(self.calibration, draft.tokens, draft.confidences, committed)


class ChainDrafter(DrafterGroup):
    """Implements drafting.port.Drafter. Of several drafts for a sequence the one that promises most is taken, the
    cheapest of equals; `Draft.drafter` says whose it is. `predictions` are asked first, for those sequences that came
    with one. Every drafter learns what was committed, whoever proposed it. One that raises is not asked any more."""

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter], predictions: PredictionDrafter | None = None) -> None:
        every = drafters if predictions is None else [predictions, *drafters]
        super().__init__([own if isinstance(own, GuardedDrafter) else GuardedDrafter(own) for own in every])
        self._predictions = predictions
        self._greedy: dict[str, bool] = {}
        self._tallies: dict[str, list[DrafterShare]] = {}
        self._silent: frozenset[int] = frozenset()
        self._standings = {greedy: [_DrafterStats() for _ in self._drafters] for greedy in (True, False)}

    @property
    def _first(self) -> int:
        """The number of the first drafter that has anything to do: predictions cost nothing while there are none."""
        return int(self._predictions is not None and not self._predictions.busy)

    def choose(self, names: Collection[str] | None) -> None:
        """Let only the drafters of these names propose; None: all of them. The rest go on reading along. Where any
        may propose, predictions may."""
        known = [[state.name for state in drafter.states()] for drafter in self._drafters]
        silent = {number for number, own in enumerate(known) if names is not None and not set(own) & set(names)}
        if names and self._predictions is not None:
            silent.discard(0)
        self._silent = frozenset(silent)

    def states(self) -> list[DrafterState]:
        return [
            msgspec.structs.replace(state, state="off") if number in self._silent and state.state == "ok" else state
            for number, drafter in enumerate(self._drafters)
            for state in drafter.states()
        ]

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._forget(key)
        self._greedy[key] = sampling.temperature == 0.0
        self._tallies[key] = [DrafterShare("") for _ in self._drafters]
        for drafter in self._drafters:
            drafter.begin(key, tokens, sampling, hints)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        if key in self._greedy:
            for standing in self._standings[self._greedy[key]]:
                standing.learn(key, tokens)
        for drafter in self._drafters[self._first :]:
            drafter.extend(key, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        best, takers = [NOTHING] * len(asks), [-1] * len(asks)
        for number, drafter in enumerate(self._drafters[self._first :], start=self._first):
            places = [place for place, ask in enumerate(asks) if self._asks(number, ask, best[place])]
            # none, too: it hears that a round begins
            drafts = drafter.propose([_beyond(asks[place], best[place]) for place in places])
            for place, draft in zip(places, drafts, strict=True):
                key = asks[place].key
                tally = self._tallies[key][number]
                tally.asked += 1
                if draft.tokens:
                    tally.answered += 1
                    tally.proposed += len(draft.tokens)
                    noted = self._standings[self._greedy[key]][number].note(key, draft)
                    better = _promises_more(noted, best[place])
                    if better:
                        best[place], noted, takers[place] = noted, best[place], number
                    if asks[place].alternatives:
                        best[place] = _keep_other(best[place], noted)
        for ask, taker in zip(asks, takers, strict=True):
            if taker >= 0:
                self._tallies[ask.key][taker].taken += 1
        return best

    def describe_shares(self, key: str) -> list[DrafterShare]:
        """A drafter that no round met is left out."""
        named = zip(self._drafters, self._tallies.get(key, ()), strict=False)
        return [
            msgspec.structs.replace(tally, name=state.name)
            for drafter, tally in named
            if tally.asked + tally.spared + tally.off
            for state in drafter.states()[:1]
        ]

    def _asks(self, number: int, ask: Ask, best: Draft) -> bool:
        if ask.key not in self._greedy:
            return False
        predictions = self._predictions if number == 0 else None
        if predictions is not None and not predictions.knows(ask.key):
            return False
        if number in self._silent:
            self._tallies[ask.key][number].off += 1
            return False
        if predictions is not None:
            return True
        standing = self._standings[self._greedy[ask.key]][number]
        asks = not best.is_drawn(0) and asks_on(best.confidences, limit=ask.limit, usual=standing.usual)
        self._tallies[ask.key][number].spared += not asks
        return asks

    def end(self, key: str, *, keep: bool) -> None:
        self._forget(key)
        for drafter in self._drafters:
            drafter.end(key, keep=keep)

    def _forget(self, key: str) -> None:
        self._tallies.pop(key, None)
        if (greedy := self._greedy.pop(key, None)) is not None:
            for standing in self._standings[greedy]:
                standing.proposed.pop(key, None)


def _beyond(ask: Ask, best: Draft) -> Ask:
    return replace(ask, cheaper=best.tokens[: ask.limit]) if best.tokens else ask


def _keep_other(best: Draft, other: Draft) -> Draft:
    """Return the best draft, which may also go on as another one from where they differ."""
    pairs = zip(best.tokens, other.tokens, strict=False)
    place = next((number for number, (own, its) in enumerate(pairs) if own != its), None)
    if place is None:
        return best
    way = Alternative(place, other.tokens[place:], other.confidences[place:])
    return replace(best, alternatives=(way, *best.alternatives))


def _promises_more(draft: Draft, best: Draft) -> bool:
    """Return whether a draft is worth more. Of drawn ones only the first token's confidence may be looked at. Later
    tokens depend on those drawn before them. Draws that are chosen for what they are, are no draws any more."""
    if draft.is_drawn(0):
        return draft.confidences[0] > (best.confidences[0] if best.tokens else 0.0)
    return estimate_accepted_tokens(draft.confidences) > estimate_accepted_tokens(best.confidences)
