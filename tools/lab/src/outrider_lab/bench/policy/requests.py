"""The requests of each category. Every other one is sampled, with a seed of its own, so that a prompt that comes again
where a category has few of them is another request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Submit
from orchestrator.worker.measuring.prompts import PromptText, spread
from outrider_lab.bench.errors import BenchError
from policies.sampling import Sampling

MIX = "mix"
"""The category of a visit with requests of all of them."""
_TEMPERATURE, _TOP_P = 0.8, 0.95


@dataclass(frozen=True, slots=True)
class Requests:
    """`by_category[name]`: its requests, the first of which are those of a smaller load."""

    by_category: dict[str, list[Submit]]

    def of(self, category: str, count: int) -> list[Submit]:
        if category != MIX:
            return self.by_category[category][:count]
        lists = list(self.by_category.values())
        places = [(place, number) for place in range(len(lists[0])) for number in range(len(lists))]
        return [lists[number][place] for place, number in places[:count]]

    def all(self) -> list[Submit]:
        return [submit for own in self.by_category.values() for submit in own]


def choose_categories(texts: Sequence[PromptText], wanted: Sequence[str]) -> list[str]:
    """Return the categories that are asked for (none: all of the file's). Raises BenchError for an unknown one."""
    known = list(dict.fromkeys(text.category for text in texts))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise BenchError(f"--category {unknown[0]!r} is none of the file's: {', '.join(known)}")
    return list(dict.fromkeys(wanted)) or known


def requests_of(
    texts: Sequence[PromptText], categories: Sequence[str], tokenizer: Tokenizer, *, count: int, max_tokens: int
) -> Requests:
    """Return `count` requests for each category."""
    stop_tokens = sorted(tokenizer.eos_ids)
    found: dict[str, list[Submit]] = {}
    for number, category in enumerate(categories):
        own = [text for text in texts if text.category == category]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text.text}]) for text in spread(own, count)]
        found[category] = [
            Submit(
                request_id=f"{category}-{place}",
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=_sampling(place, greedy=place % 2 == 0 and place < len(own), seed=1000 * number + place),
                stop_tokens=stop_tokens,
                route=category,
            )
            for place, prompt in enumerate(prompts)
        ]
    return Requests(found)


def _sampling(place: int, *, greedy: bool, seed: int) -> Sampling:
    return Sampling(seed=seed) if greedy else Sampling(temperature=_TEMPERATURE, top_p=_TOP_P, seed=seed)
