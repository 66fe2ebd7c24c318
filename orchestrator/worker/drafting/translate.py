"""A drafter of another vocabulary: what it proposes is put into the target's tokens where the target left off.

As in universal assisted generation (transformers' AssistedCandidateGeneratorDifferentTokenizers): the draft model reads
the committed text in its own tokens, and the text that it proposes is encoded with the target's tokenizer. Whatever
comes out is a draft like any other, and the target judges it token by token, so nothing is lost. What is: the noise
that a draft model shares with its target is noise of token ids, and ids of two vocabularies have nothing to do with
each other. So the draft model chooses greedily, for requests that sample too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import (
    NO_HINTS,
    NOTHING,
    Ask,
    Draft,
    Drafter,
    DraftHints,
    WorkBeside,
    describe_beside,
)
from orchestrator.worker.drafting.retokenize import Bridge, DraftText, RetokenizedDraft, retokenize_draft
from policies.sampling import Sampling
from policies.speculation.calibration import Calibration, chance, observe_token_outcome

_LONGER_WORD = 0.8
"""The chance that a last word is not longer than drafted, before outcomes say more. ADR 0018: outcomes correct it."""
_GREEDY = Sampling()


@dataclass(slots=True, eq=False)
class _TranslatedSequence:
    """A sequence: its text in both vocabularies, how many of the target's tokens that is, what was proposed last."""

    text: DraftText
    tokens: int
    proposed: RetokenizedDraft = field(default_factory=RetokenizedDraft)


class TranslatingDrafter:
    """Implements drafting.port.Drafter. `inner` drafts in the tokens of the bridge's draft side."""

    def __init__(self, inner: Drafter, bridge: Bridge) -> None:
        self._inner = inner
        self._bridge = bridge
        self._known: dict[str, _TranslatedSequence] = {}
        # A last word that may go on is right less often than one with another behind it.
        self._calibrations = {True: Calibration(), False: Calibration()}

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        known = self._known[key] = _TranslatedSequence(DraftText(self._bridge), len(tokens))
        known.text.extend(tokens)
        self._inner.begin(key, known.text.tokens, _GREEDY)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """The end of the text may be other tokens than before: then the drafter begins anew behind what
        stays, which costs it the forward of a few tokens."""
        known = self._known.get(key)
        if known is None:
            return
        self._learn(known.proposed, tokens)
        known.proposed = RetokenizedDraft()
        known.tokens += len(tokens)
        text = known.text
        start, before = text.settled, text.tokens[text.settled :]
        text.extend(tokens)
        now = text.tokens[start:]
        if now[: len(before)] == before:
            self._inner.extend(key, now[len(before) :])
        else:
            self._inner.begin(key, text.tokens, _GREEDY)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        known = [self._known.get(ask.key) for ask in asks]
        inner_asks = [
            replace(ask, limit=_inner_limit(sequence, ask.limit))
            for ask, sequence in zip(asks, known, strict=True)
            if sequence
        ]
        drafts = iter(self._inner.propose(inner_asks))
        return [
            NOTHING if sequence is None else self._translate_draft(sequence, next(drafts), ask.limit)
            for ask, sequence in zip(asks, known, strict=True)
        ]

    def end(self, key: str, *, keep: bool) -> None:
        self._known.pop(key, None)
        self._inner.end(key, keep=keep)

    def memory_bytes(self) -> int:
        return self._inner.memory_bytes()

    def states(self) -> list[DrafterState]:
        return [msgspec.structs.replace(state, vocabulary="translated") for state in self._inner.states()]

    def describe_beside(self) -> WorkBeside:
        return describe_beside(self._inner)

    def close(self) -> None:
        self._known.clear()
        self._inner.close()

    def _translate_draft(self, known: _TranslatedSequence, draft: Draft, limit: int) -> Draft:
        if not draft.tokens:
            return NOTHING
        made = known.proposed = retokenize_draft(self._bridge, known.text, draft.tokens, draft.confidences)
        del made.tokens[limit:], made.confidences[limit:]
        if made.loose < len(made.tokens):
            made.confidences[made.loose] *= _LONGER_WORD
        confidences = [
            chance(self._calibrations[index >= made.loose], confidence)
            for index, confidence in enumerate(made.confidences)
        ]
        return Draft(tuple(made.tokens), tuple(confidences), draft.drafter) if made.tokens else NOTHING

    def _learn(self, made: RetokenizedDraft, committed: Sequence[int]) -> None:
        """Compare what was proposed with what was committed, up to the first token that was wrong."""
        for index, (token, chosen) in enumerate(zip(made.tokens, committed, strict=False)):
            loose = index >= made.loose
            self._calibrations[loose] = observe_token_outcome(
                self._calibrations[loose], made.confidences[index], token == chosen
            )
            if token != chosen:
                return


def _inner_limit(known: _TranslatedSequence, limit: int) -> int:
    """Return how many of the draft's tokens make `limit` of the target's, going by the text so far."""
    if limit <= 0:
        return 0
    return math.ceil(limit * max(0.25, min(4.0, len(known.text.tokens) / max(1, known.tokens)))) + 1
