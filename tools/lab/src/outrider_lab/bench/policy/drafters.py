"""The kinds of drafters that depth policies are tried with.

Each is wrapped as the product wraps any drafter (drafting.chain: its word is calibrated), so that what is measured is
what a server with such a drafter does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.load_options import EngineOptions, SuffixOptions
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, Drafter, DraftHints, NoDrafter
from orchestrator.worker.drafting.variants import DrafterGroup
from orchestrator.worker.loading.drafters import build_suffix
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.loading.statistics import find_statistics
from outrider_lab.bench.errors import BenchError
from policies.sampling import Sampling

KINDS = ("good", "bad", "alternating")
TURNS_EVERY = 50
"""Output tokens after which the alternating drafter turns from good to bad, or back."""
_SURE = 0.95


class RandomTokens(NoDrafter):
    """Proposes random tokens, as many as it is asked for, and is sure of each."""

    name = "random"

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)  # noqa: S311  # drafts, not secrets

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        draw = self._random
        return [
            Draft(tuple(draw.choices(range(self._vocabulary), k=ask.limit)), (_SURE,) * ask.limit, self.name)
            for ask in asks
        ]

    def states(self) -> list[DrafterState]:
        return [DrafterState(self.name, self.name)]


class Alternating(DrafterGroup):
    """Drafts of `good` for the first `every` tokens of an output, of `bad` for the next, and so on."""

    name = "alternating"

    def __init__(self, good: Drafter, bad: Drafter, every: int = TURNS_EVERY) -> None:
        super().__init__([good, bad])
        self._every = every
        self._done: dict[str, int] = {}

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._done[key] = 0
        for drafter in self._drafters:
            drafter.begin(key, tokens, sampling, hints)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        if key in self._done:
            self._done[key] += len(tokens)
        for drafter in self._drafters:
            drafter.extend(key, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [NOTHING] * len(asks)
        for turn, drafter in enumerate(self._drafters):
            places = [place for place, ask in enumerate(asks) if self._done.get(ask.key, 0) // self._every % 2 == turn]
            for place, draft in zip(places, drafter.propose([asks[place] for place in places]), strict=True):
                drafts[place] = draft
        return drafts

    def end(self, key: str, *, keep: bool) -> None:
        self._done.pop(key, None)
        for drafter in self._drafters:
            drafter.end(key, keep=keep)


def with_suffix_alone(options: EngineOptions) -> EngineOptions:
    """Return options without draft models. Raises BenchError where the configuration drafts nothing from the text."""
    drafters = [one for one in options.drafters if isinstance(one, SuffixOptions)]
    if not drafters or options.max_depth == 0:
        raise BenchError("the configuration has no drafts from the text itself (`suffix`): there is no depth to choose")
    return msgspec.structs.replace(options, drafters=drafters)


class Drafters:
    """Drafters of each kind, as a long-lived server has them.

    What a chain learned of its drafters stays. No text is remembered from one visit to the next (`of`), because
    benchmarks send the same prompts again. `options`: of `with_suffix_alone`.
    """

    def __init__(self, options: EngineOptions, target: LoadedSource, *, seed: int = 0) -> None:
        vocabulary = target.model.spec.vocabulary_size
        own = [one for one in options.drafters if isinstance(one, SuffixOptions)]
        good, turning = (
            [build_suffix(one, statistics=find_statistics(one, options.model, target)) for one in own] for _ in range(2)
        )
        self._suffixes = [*good, *turning]
        self._chains = {
            "good": ChainDrafter(good),
            "bad": ChainDrafter([RandomTokens(vocabulary, seed)]),
            "alternating": ChainDrafter([Alternating(one, RandomTokens(vocabulary, seed)) for one in turning]),
        }

    def of(self, kind: str) -> Drafter:
        """Return a drafter with no text remembered; the one that was returned before for this kind is not used on."""
        for suffix in self._suffixes:
            suffix.forget()
        return self._chains[kind]
