"""Runs configurations: the real decode loop over the same prompts, all configurations of a runtime in turns.

Requests wait until one before them ends, as many running at once as a configuration says, so that a figure is of the
steady state that is predicted. The first ones are given fewer tokens, each another number, so that they do not all end
together. Counting begins when the first of them has ended, and ends when no more wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import msgspec

from adapters.contract import LoadedModel, Segment
from adapters.tokenizer import Tokenizer, load_tokenizer
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions, SuffixOptions
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.rounds import Decoding, RoundSample
from orchestrator.worker.measuring.steps import follow_on
from orchestrator.worker.measuring.watched import WatchedModel
from outrider_lab.bench.plan.texts import prompt_text

PLAIN, POLICY = "0", "policy"
CONTROL_ROWS, CONTROL_BEHIND = 2, 64
"""The forward that is repeated to see how fast the machine is: rows of one sequence, and the positions before them."""
_CONTROLS, _COLD = 12, 3


@dataclass(frozen=True, slots=True)
class RunLoad:
    """What is asked of a configuration: so many requests at once, with short or long prompts."""

    concurrency: int
    long: bool

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once, {'long' if self.long else 'short'} prompts"

    def requests(self, counted: int) -> int:
        """Return how many are needed for about as many as `counted` to be counted."""
        return counted if self.concurrency == 1 else self.concurrency + counted


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is run. `depth`: "0", a fixed depth, or "policy", which leaves it open up to the configured bound."""

    runtime: str
    depth: str
    load: RunLoad

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        depth = "depth by policy" if self.depth == POLICY else f"depth {self.depth}"
        return f"{self.runtime}, {depth}, {self.load.name}"


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """The rounds that count of a configuration."""

    rounds: Sequence[RoundSample]

    @property
    def seconds(self) -> float:
        return sum(one.whole_ms for one in self.rounds) / 1000.0

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def requests(self) -> int:
        """How many came to their ends."""
        return sum(one.ended for one in self.rounds)

    @property
    def components(self) -> dict[str, float]:
        """What tokens/s come from. In rounds without prompts: tokens and verified drafts of a sequence, and the time,
        drafting included; of a request: what rounds with prompts took longer than those without."""
        plain = [one for one in self.rounds if not one.prompt_rows]
        turns = max(1, sum(one.turns for one in plain))
        round_ms = mean([one.whole_ms for one in plain] or [0.0])
        with_prompts = [one for one in self.rounds if one.prompt_rows]
        added_ms = sum(one.whole_ms - (round_ms if one.sequences else 0.0) for one in with_prompts)
        return {
            "tokens_per_round": sum(one.tokens for one in plain) / turns,
            "drafts_per_round": sum(one.drafted for one in plain) / turns,
            "round_ms": round_ms,
            "draft_ms": mean([one.draft_ms for one in plain] or [0.0]),
            "prefill_ms": added_ms / max(1, self.requests),
        }


def select_full_rounds(rounds: Sequence[RoundSample], load: RunLoad, requests: int) -> list[RoundSample]:
    """Return the rounds in which all places are taken.

    They are those from the end of the first request until no more of them wait. Where requests come one after another,
    they are those from the beginning.
    """
    if load.concurrency == 1:
        return list(rounds)
    found, ended = [], 0
    for one in rounds:
        if 0 < ended <= requests - load.concurrency:
            found.append(one)
        ended += one.ended
    return found


def prompts(tokenizer: Tokenizer, load: RunLoad, requests: int) -> list[list[int]]:
    """Return prompts as token ids."""
    return [
        tokenizer.encode_chat([{"role": "user", "content": prompt_text(number, long=load.long)}])
        for number in range(requests)
    ]


class LoopRunner:
    """A loaded target, and the loops of its configurations."""

    def __init__(self, options: EngineOptions, target: LoadedSource) -> None:
        self._target = target
        self._options = msgspec.structs.replace(
            options,
            prefix_reuse=False,
            drafters=[one for one in options.drafters if isinstance(one, SuffixOptions)],
        )
        self._slot = 1  # the first one is the control's
        self._drafters: list[Drafter] = []
        self.tokenizer = load_tokenizer(target.tokenizer_dir)

    def close(self) -> None:
        """Free the target and the drafters."""
        for drafter in self._drafters:
            drafter.close()
        self._target.model.close()

    def begin(self, configuration: Configuration, requests: int, output_tokens: int) -> Decoding:
        """Return a configuration's requests, ready to be decoded by a loop of its own with a new drafter. Raises
        OutriderError for one that is refused."""
        watched = WatchedModel(self._target.model, self._slot)
        self._slot += configuration.load.concurrency
        target = replace(self._target, model=watched)
        options = msgspec.structs.replace(self._options, max_running=configuration.load.concurrency)
        drafter = build_drafter(options, target) if configuration.depth != PLAIN else None
        if drafter is not None:
            self._drafters.append(drafter)
        loop = build_loop(target, options, drafter)
        return Decoding(loop, watched, self._submits(configuration, requests, output_tokens), SystemClock())

    def warm(self, configuration: Configuration, output_tokens: int) -> None:
        """Run a little of a configuration, in slots that others take afterwards."""
        slot = self._slot
        self.begin(configuration, configuration.load.concurrency, output_tokens).advance()
        self._slot = slot

    def control_ms(self) -> float:
        """Return what the control's forward takes now: a mean."""
        return _control_ms(self._target.model)

    def _submits(self, configuration: Configuration, requests: int, output_tokens: int) -> list[Submit]:
        load, depth = configuration.load, configuration.depth
        stops = sorted(self.tokenizer.eos_ids)
        made = []
        for number, prompt in enumerate(prompts(self.tokenizer, load, requests)):
            tokens = max(1, round(min(1.0, (number + 1) / load.concurrency) * output_tokens))
            fixed = None if depth in (PLAIN, POLICY) else int(depth)
            made.append(Submit(f"{number}", prompt, tokens, depth=fixed, stop_tokens=stops))
        return made


def _control_ms(model: LoadedModel) -> float:
    clock, times = SystemClock(), []
    tokens = [5 + place for place in range(CONTROL_BEHIND)]
    model.forward([Segment(0, 0, tokens, (CONTROL_BEHIND - 1, CONTROL_BEHIND))])
    apart = model.capabilities.apart_tokens > 0
    for number in range(_COLD + _CONTROLS):
        began_s = clock.monotonic_s()
        model.forward(follow_on(model, [Segment(0, CONTROL_BEHIND, tokens[:CONTROL_ROWS], (0, CONTROL_ROWS), apart)]))
        if number >= _COLD:  # the first ones find other rows, and another model, in the processor's caches
            times.append((clock.monotonic_s() - began_s) * 1000.0)
    model.release(0)
    return mean(times)
