"""How many tokens a step makes for requests of one category, by the pair of target and draft that decodes them.

A draft is right in some kinds of text and wrong in others. So the pair that ends requests first on the mean is not the
one that ends each of them first. What sets a category apart on a pair is a factor on the pair's own mean: the tokens of
a step of its requests over those of all requests. A category of which the pair has seen little counts in part as all
requests do, and a little better than that. So each pair is tried with it: optimism under uncertainty (Auer,
Cesa-Bianchi and Fischer 2002) without its constants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

# What older requests of a category keep with each newer one, and older ones of all: 20 and 100 of them count. ADR 0121.
_KEPT: Final = 0.95
_KEPT_OF_ALL: Final = 0.99
# Of the pair's mean: by so much better a category is taken for that a pair has not seen. ADR 0121.
_OPTIMISM: Final = 0.25
# That are remembered. Bounds memory: as many as the tags that a draft store remembers.
_MOST_CATEGORIES: Final = 512


class StepSums(NamedTuple):
    """Sums over requests, older ones counting less: how many they are, their tokens, and the steps that made them."""

    requests: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def observe(self, tokens: int, steps: int, kept: float) -> StepSums:
        """Take in a request that has ended; older ones keep a share of their weight."""
        return StepSums(kept * self.requests + 1.0, kept * self.tokens + tokens, kept * self.steps + steps)


class CategoryGain(NamedTuple):
    """Tokens of a step over those of all requests of a pair, and how many requests of the category it has seen."""

    factor: float = 1.0
    requests: float = 0.0


UNKNOWN_GAIN: Final = CategoryGain()


def estimate_gain(category: StepSums, everybody: StepSums) -> CategoryGain:
    """Return what sets a category apart, by the steps of its requests and of all requests of a pair."""
    if everybody.steps <= 0.0 or everybody.tokens <= 0.0:
        return UNKNOWN_GAIN
    mean, usual_steps = everybody.tokens / everybody.steps, everybody.steps / everybody.requests
    tokens = category.tokens + usual_steps * mean * (1.0 + _OPTIMISM)
    return CategoryGain(tokens / (category.steps + usual_steps) / mean, category.requests)


class DraftGains:
    """What is known of categories on pairs. A pair is any key that is equal for equal ones."""

    def __init__(self) -> None:
        self._everybody: dict[Hashable, StepSums] = {}
        self._categories: OrderedDict[str, dict[Hashable, StepSums]] = OrderedDict()

    def observe(self, category: str, pair: Hashable, tokens: int, steps: int) -> None:
        """A request of a category has ended on a pair, after so many steps."""
        if steps <= 0 or tokens <= 0:
            return
        self._everybody[pair] = self._everybody.get(pair, StepSums()).observe(tokens, steps, _KEPT_OF_ALL)
        known = self._categories.setdefault(category, {})
        known[pair] = known.get(pair, StepSums()).observe(tokens, steps, _KEPT)
        self._categories.move_to_end(category)
        if len(self._categories) > _MOST_CATEGORIES:
            self._categories.popitem(last=False)

    def find(self, category: str, pair: Hashable) -> CategoryGain:
        """Return what sets a category apart on a pair."""
        everybody = self._everybody.get(pair)
        if everybody is None:
            return UNKNOWN_GAIN
        return estimate_gain(self._categories.get(category, {}).get(pair, StepSums()), everybody)


def predict_saved_ms(plain_ms: float, saved_ms: float, factor: float) -> float:
    """Return what a draft saves of a token of a category that takes `plain_ms` without it, and `saved_ms` less on the
    mean of all requests. A draft costs nothing where it brings nothing: it is then left alone."""
    return max(0.0, plain_ms - (plain_ms - saved_ms) / factor)
