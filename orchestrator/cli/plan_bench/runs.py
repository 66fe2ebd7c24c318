"""Measures configurations: tokens per second of the real decode loop while all of its places are taken.

Requests wait until one before them ends, as many running at once as a configuration says, so that a figure is of the
steady state that is predicted. The first ones are given fewer tokens, each another number, so that they do not
all end together; counting begins when the first of them has ended and ends when no more wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from adapters.tokenizer import Tokenizer
from orchestrator.bootstrap import EngineOptions, Target, build_drafter, build_loop, load_tokenizer
from orchestrator.bootstrap.options import SuffixOptions
from orchestrator.cli.bench_prompts import BenchError
from orchestrator.cli.plan_bench.texts import prompt_text
from orchestrator.cluster.port import Submit
from orchestrator.decoding.loop import DecodeLoop

PLAIN, POLICY = "0", "policy"
_ALONE = 3  # requests of a visit, where they come one after another
_LEAST_REFILLS = 4  # requests that take the place of others in a visit, where several run at once


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a configuration: so many requests at once, with short or long prompts."""

    concurrency: int
    long: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.concurrency} at once, {'long' if self.long else 'short'} prompts"

    @property
    def requests(self) -> int:
        """Requests of a visit."""
        return _ALONE if self.concurrency == 1 else self.concurrency + max(_LEAST_REFILLS, self.concurrency)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is run. `depth`: "0", a fixed depth, or "policy", which leaves it open up to the configured bound."""

    runtime: str
    depth: str
    load: Load

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        depth = "depth by policy" if self.depth == POLICY else f"depth {self.depth}"
        return f"{self.runtime}, {depth}, {self.load.name}"


@dataclass(slots=True)
class Measured:
    """What was counted. `turns`: how often a sequence said something in a round."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    turns: int = 0
    drafted: int = 0

    def add(self, other: Measured) -> None:
        """Count another visit as well."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences per second."""
        return self.tokens / self.seconds


def prompts(tokenizer: Tokenizer, load: Load, visit: int) -> list[list[int]]:
    """Return the prompts of a visit as token ids; another visit starts elsewhere in the texts."""
    first = visit * (_ALONE if load.concurrency == 1 else load.concurrency)
    return [
        tokenizer.encode_chat([{"role": "user", "content": prompt_text(first + number, long=load.long)}])
        for number in range(load.requests)
    ]


class Runner:
    """A loaded target on which configurations are visited."""

    def __init__(self, options: EngineOptions, target: Target) -> None:
        self._target = target
        self._options = msgspec.structs.replace(
            options,
            prefix_reuse=False,
            drafters=[one for one in options.drafters if isinstance(one, SuffixOptions)],
        )
        self.tokenizer = load_tokenizer(target.tokenizer_dir)

    def close(self) -> None:
        """Free the target."""
        self._target.model.close()

    def visit(self, configuration: Configuration, visit: int, output_tokens: int) -> Measured:
        """Decode the requests of a visit with a new drafter. Raises BenchError for one that is refused."""
        options = msgspec.structs.replace(self._options, max_running=configuration.load.concurrency)
        drafter = build_drafter(options, self._target) if configuration.depth != PLAIN else None
        loop = build_loop(self._target, options, drafter)
        submits = self._submits(configuration, visit, output_tokens)
        try:
            for submit in submits:
                refused = loop.submit(submit)
                if refused is not None:
                    raise BenchError(f"{configuration.name}: {refused.message}")
            return _counted(loop, configuration.load)
        finally:
            for submit in submits:
                loop.cancel(submit.request_id)
            if drafter is not None:
                drafter.close()

    def _submits(self, configuration: Configuration, visit: int, output_tokens: int) -> list[Submit]:
        load, depth = configuration.load, configuration.depth
        made = []
        for number, prompt in enumerate(prompts(self.tokenizer, load, visit)):
            part = min(1.0, (number + 1) / load.concurrency)
            tokens = max(1, round(part * output_tokens))
            made.append(Submit(f"{number}", prompt, tokens, depth=None if depth in (PLAIN, POLICY) else int(depth)))
        return made


def _counted(loop: DecodeLoop, load: Load) -> Measured:
    """Run a visit until no request waits for the next free place; count while all places are taken."""
    found, done = Measured(), 0
    said: set[str] = set()
    started_s = time.perf_counter() if load.concurrency == 1 else None
    while done <= load.requests - load.concurrency:
        taken = loop.run_round()
        done += sum(bool(delta.finish) for delta in taken.deltas)
        if started_s is None:
            said.update(delta.request_id for delta in taken.deltas)
            started_s = time.perf_counter() if done and len(said) >= load.concurrency else None
            continue
        found.add(Measured(sum(len(delta.tokens) for delta in taken.deltas), 0.0, 1, len(taken.deltas), taken.drafted))
    found.seconds = time.perf_counter() - (started_s or 0.0)
    return found
