"""The prediction drafter: continue as the text goes on that a request's client expects to get back.

A client that has a file edited knows most of the answer (OpenAI's `prediction`). The drafter keeps a place in that
text. While the output follows the text, each draft is the text behind the place, and nothing is searched. A token that
is another one makes it look for its place again: behind the longest match of the output's end, and of equals behind the
nearest one ahead. So an edit costs the rounds until a few tokens after it are as they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.packed_tokens import unpack_tokens
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, PREDICTION, Ask, Draft, DraftHints, Meter, NoDrafter
from orchestrator.worker.drafting.suffix import PAIR_SHIFT, SuffixIndex
from policies.sampling import Sampling

_AHEAD, _BEHIND = 24, 8  # occurrences of the output's end that are compared, on either side of where it left the text
_WINDOW = 96  # tokens ahead in which a single token is taken for the place
_KNOWN = 3  # tokens of match that make a place one to look from
_SETTLED = 6  # tokens of match behind which no other place is looked for
_FIRST = 4  # a text that was not contradicted yet is believed as after so long a match
# Chance that the next token is as predicted, by the tokens of match before it (an index beyond the end takes the last).
# The first is a guess that one token took the place of another. Outcomes correct all of them (drafting.chain).
_CERTAINTY = (0.3, 0.5, 0.65, 0.75, 0.82, 0.87, 0.9, 0.92, 0.94, 0.955, 0.965, 0.972, 0.978, 0.983, 0.987, 0.99)
_TRIAL = (4, 6, 10)  # tokens that are drafted behind so short a match: many rows for a place that is a guess are a loss
_MOST_CERTAIN = len(_CERTAINTY) - 1


class PredictedText:
    """A predicted text and the place in it that an output has come to. `place` is the index of the token that is
    expected next; below 0 nothing is."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._index = SuffixIndex()  # of the text, once the output has left it
        self._output: list[int] = []
        self._left = 0  # the place where the output left the text last
        self._contradicted = False
        self.place = 0
        self.matched = _FIRST

    def extend(self, tokens: Sequence[int]) -> None:
        text, end = self._tokens, len(self._tokens)
        self._output.extend(tokens)
        for token in tokens:
            if 0 <= self.place < end and text[self.place] == token:
                self.place += 1
                self.matched += 1
            else:
                self._leave()
        if self._contradicted and self.matched < _SETTLED:
            self._find_place()

    def _leave(self) -> None:
        known = self.place >= 0 and self.matched >= _KNOWN
        if known:
            self._left = self.place
        # What stands before a text is no word of it in place of another.
        self.place = self.place + 1 if known and self.place > 0 else -1
        self.matched, self._contradicted = 0, True

    def _find_place(self) -> None:
        """Go on behind the longest match of the output's end, if that is longer than the one here."""
        best, place = self.matched, self.place
        for after in self._list_places():
            length = self._index.match(self._output, after, 4 * _SETTLED)
            if length > best:
                best, place = length, after
        self.matched, self.place = best, place

    def _list_places(self) -> list[int]:
        """Return places behind which the text may go on as the output, the likeliest of equals first."""
        if not self._index.tokens:
            self._index.extend(self._tokens)
        output = self._output
        if len(output) > 1:
            places = self._index.pairs.get((output[-2] << PAIR_SHIFT) | output[-1])
            if places:
                at = bisect_left(places, self._left)
                return places[at : at + _AHEAD] + places[max(0, at - _BEHIND) : at][::-1]
        places = self._index.singles.get(output[-1], [])
        at = bisect_left(places, self._left)
        return [place for place in places[at : at + 1] if place - self._left <= _WINDOW]

    def draft(self, limit: int) -> Draft:
        """Return up to `limit` tokens behind the place, each surer than the one before it."""
        if self.place < 0:
            return NOTHING
        most = min(limit, _TRIAL[self.matched]) if self.matched < len(_TRIAL) else limit
        tokens = self._tokens[self.place : self.place + most]
        if not tokens:
            return NOTHING
        sure = _CERTAINTY[min(self.matched, _MOST_CERTAIN) :][: len(tokens)]
        return Draft(tokens, sure + (_CERTAINTY[-1],) * (len(tokens) - len(sure)), PREDICTION)


class PredictionDrafter(NoDrafter):
    """Implements drafting.port.Drafter. It knows the sequences that began with a prediction, and no others."""

    def __init__(self, clock: Clock) -> None:
        self.name = PREDICTION
        self._meter = Meter(DrafterState(PREDICTION, PREDICTION), clock)
        self._texts: dict[str, PredictedText] = {}
        self._used = False

    @property
    def busy(self) -> bool:
        return bool(self._texts)

    def knows(self, key: str) -> bool:
        return key in self._texts

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._texts.pop(key, None)
        if not hints.prediction:
            return
        self._used = True
        text = self._texts[key] = PredictedText(unpack_tokens(hints.prediction))
        if hints.generated:
            text.extend(tokens[-hints.generated :])

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(key)) is not None:
            text.extend(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if not asks:
            return []
        with self._meter.round():
            return [self._texts[ask.key].draft(ask.limit) if ask.key in self._texts else NOTHING for ask in asks]

    def end(self, key: str, *, keep: bool) -> None:
        self._texts.pop(key, None)

    def states(self) -> list[DrafterState]:
        """Until a request brings a prediction there is nothing to say."""
        return [self._meter.state] if self._used else []
