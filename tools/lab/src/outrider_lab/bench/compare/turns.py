"""Loads engines side by side and lets one work at a time: prompt by prompt, wave by wave, in orders that alternate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from adapters.device_memory import read_host_memory
from adapters.energy import EnergyMeter
from device_profiles.units import ceil_div, human_bytes
from outrider_lab.bench.compare.figures import BASE, EngineRun
from outrider_lab.bench.compare.pairs import Pair, rates_of
from outrider_lab.bench.compare.process import EngineFailed, EngineProcess, EngineSpec
from outrider_lab.peers.contract import Answer, EngineMissing, NotOffered, PeerPrompt

_T = TypeVar("_T")
Tell = Callable[[str, int, int], None]
"""Hears what is being done, and how much of how much of it."""

_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt with its key and its category."""

    key: str
    category: str
    prompt: PeerPrompt


@dataclass(slots=True)
class Side:
    """An engine that is loaded, and what it gave so far."""

    process: EngineProcess
    run: EngineRun


@contextmanager
def load_engines(specs: Sequence[EngineSpec], logs: Path, tell: Tell) -> Iterator[tuple[list[Side], list[EngineRun]]]:
    """Load engines one after the other; give those that are there, and a row for each that is asked for, in order. One
    that cannot be loaded, or for which there is no memory beside the others, costs its row."""
    sides, rows, most_bytes = list[Side](), list[EngineRun](), 0
    with ExitStack() as stack:
        for number, spec in enumerate(specs):
            tell(f"loading {spec.name}", number, len(specs))
            run = EngineRun(spec.engine, spec.mode)
            rows.append(run)
            free = read_host_memory().free_bytes
            if free < most_bytes:
                run.state = "left out"
                run.reason = (
                    f"the engines before took up to {human_bytes(most_bytes)}, and {human_bytes(free)} are free"
                )
                continue
            try:
                process = EngineProcess(spec, logs, partial(_tell_stage, tell, spec.name))
            except EngineMissing as error:
                run.state, run.reason = "not installed", str(error)
                continue
            except (EngineFailed, NotOffered) as error:
                run.state, run.reason = "failed", str(error)
                continue
            stack.callback(process.close)
            run.described, run.load_s = process.described, process.load_s
            most_bytes = max(most_bytes, process.peak_bytes() or 0)
            sides.append(Side(process, run))
        yield sides, rows


def _tell_stage(tell: Tell, name: str, what: str) -> None:
    tell(f"{name}: {what}", 0, 1)


class Turns:
    """What engines are asked, in turn."""

    def __init__(self, sides: Sequence[Side], max_tokens: int, meter: EnergyMeter, tell: Tell) -> None:
        """Take engines that are loaded."""
        self._sides, self._max_tokens, self._meter, self._tell = list(sides), max_tokens, meter, tell

    def warm_up(self, prompts: Sequence[PeerPrompt]) -> None:
        """Let runtimes compile their shapes, alone and together, and forget what was said."""
        for number, side in enumerate(self._sides):
            self._tell(f"warming up {side.run.name}", number, len(self._sides))
            for prompt in prompts:
                self._call(side, "generate", prompt, _WARM_TOKENS)
            self._call(side, "generate_many", list(prompts), _WARM_TOKENS, optional="at_once_tok_s")
            self._call(side, "forget")

    def ask_alone(self, prompts: Sequence[NamedPrompt], passes: int) -> None:
        """Ask each engine each prompt, one at a time, in so many passes that know nothing of each other. One turn more
        comes first and counts for nothing."""
        for one in prompts[:1]:
            self._tell("one at a time, a turn that does not count", 0, 1)
            for side in self._sides:
                self._call(side, "generate", one.prompt, self._max_tokens)
        for number in range(passes):
            for side in self._sides:
                side.run.alone.append({})
                self._call(side, "forget")
            for index, one in enumerate(prompts):
                self._tell(f"one at a time, pass {number + 1} of {passes}", index, len(prompts))
                self._take_turn(one, number * len(prompts) + index)

    def _take_turn(self, one: NamedPrompt, number: int) -> None:
        """Ask for one prompt: Outrider's plain mode before each other engine, and once more at the end."""

        def ask(side: Side) -> Answer | None:
            before = self._meter.joules()
            answer: Answer | None = self._call(side, "generate", one.prompt, self._max_tokens)
            if answer is not None and one.key not in side.run.alone[-1]:
                side.run.alone[-1][one.key] = answer
                self._note_energy(side, before)
            return answer

        for side, own, before, after in self._beside_base(ask, number):
            side.run.pairs.append(Pair(one.key, rates_of(own), rates_of(before), rates_of(after)))

    def ask_together(self, prompts: Sequence[NamedPrompt], at_once: int, passes: int) -> None:
        """Ask each engine for waves of prompts, of which `at_once` run together; the fastest pass of a wave counts."""
        waves = list(split_waves(prompts, at_once))
        best: dict[tuple[str, int], float] = {}
        for number in range(passes):
            for side in self._sides:
                self._call(side, "forget")
            for index, wave in enumerate(waves):
                self._tell(f"{at_once} at a time, pass {number + 1} of {passes}", index, len(waves))
                for name, took_s in self._take_wave(wave, index, number * len(waves) + index):
                    best[name, index] = min(took_s, best.get((name, index), took_s))
        for side in self._sides:
            side.run.company_s = sum(best.get((side.run.name, index), 0.0) for index in range(len(waves)))

    def _take_wave(self, wave: Sequence[NamedPrompt], index: int, number: int) -> list[tuple[str, float]]:
        """Ask for one wave as for one prompt; return how long each engine took, every time that it was asked."""
        took: list[tuple[str, float]] = []
        prompts = [one.prompt for one in wave]

        def ask(side: Side) -> float | None:
            answers: list[Answer] | None = self._call(
                side, "generate_many", prompts, self._max_tokens, optional="at_once_tok_s"
            )
            if answers is None:
                return None
            for one, answer in zip(wave, answers, strict=True):
                side.run.company.setdefault(one.key, answer)
            took_s = max(answer.last_s for answer in answers)
            took.append((side.run.name, took_s))
            return sum(answer.generated for answer in answers) / took_s

        for side, own, before, after in self._beside_base(ask, number):
            rates = [{"at_once_tok_s": rate} for rate in (own, before, after)]
            side.run.pairs.append(Pair(f"wave {index}", *rates))
        return took

    def _beside_base(self, ask: Callable[[Side], _T | None], number: int) -> Iterator[tuple[Side, _T, _T, _T]]:
        """Ask all; yield each engine's answer with Outrider's plain mode's before and behind it, seconds away.

        A machine that slows down over minutes slows all three. An engine that does not answer costs no answer of the
        base."""
        base = next((side for side in self._sides if side.run.name == BASE), None)
        before = ask(base) if base is not None else None
        for side in alternate([one for one in self._sides if one is not base], number):
            own = ask(side)
            if own is None or base is None:
                continue
            after = ask(base)
            if before is not None and after is not None:
                yield side, own, before, after
            before = after

    def score(self, texts: Sequence[Sequence[int]]) -> None:
        """Let each engine read the texts."""
        for number, side in enumerate(self._sides):
            self._tell(f"quality of {side.run.name}", number, len(self._sides))
            found = [self._call(side, "score", list(text), optional="perplexity") for text in texts]
            side.run.scores = [score for score in found if score is not None] if None not in found else []

    def note_memory(self) -> None:
        """Note how much each engine has taken at most."""
        for side in self._sides:
            side.run.peak_bytes = side.process.peak_bytes()

    def _call(self, side: Side, method: str, *arguments: Any, optional: str = "") -> Any:
        """Return what a call gives; None where the engine has failed, or does not offer it: that is noted, at the
        figure `optional`."""
        if side.run.state == "failed" or (optional and optional in side.run.notes):
            return None
        try:
            with side.process.turn() as process:
                return process.call(method, *arguments)
        except NotOffered as error:
            side.run.notes[optional or method] = str(error)
        except (EngineFailed, EngineMissing) as error:
            side.run.state, side.run.reason = "failed", f"in {method}: {error}"
        return None

    def _note_energy(self, side: Side, before: float | None) -> None:
        after = self._meter.joules()
        if before is not None and after is not None:
            side.run.joules = (side.run.joules or 0.0) + after - before


def alternate(items: Sequence[_T], number: int) -> list[_T]:
    """Return the order of a turn: each item comes first, and last, as often as the others, with either neighbour
    before it."""
    turn = (number // 2) % len(items) if items else 0
    turned = [*items[turn:], *items[:turn]]
    return turned[::-1] if number % 2 else turned


def split_waves(prompts: Sequence[_T], at_once: int) -> Iterator[Sequence[_T]]:
    """Yield waves of equal size, about twice as many prompts as run together: one joins when another ends."""
    count = ceil_div(len(prompts), 2 * at_once)
    size = ceil_div(len(prompts), count)
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
