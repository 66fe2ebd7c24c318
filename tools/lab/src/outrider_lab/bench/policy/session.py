"""All visits in random order, each beside plain decoding, and doubtful ones again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from device_profiles.cost import StepCost
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.policy.arms import ADAPTIVE, CONTROL, FIXED, Timed, policy_of
from outrider_lab.bench.policy.drafters import KINDS, Drafters, with_suffix_alone
from outrider_lab.bench.policy.requests import MIX, Requests, choose_categories
from outrider_lab.bench.policy.runs import Load, Visit, Visiting, VisitRunner, side_by_side
from outrider_lab.bench.selection import read_configured

BAR = 0.97
_DOUBTS = 12  # cells that are visited again, in each of
_AGAIN = 8  # so many passes
_CONTROL_EVERY = 3  # cells
_ROUND_MS, _SEQUENCE_MS = 7.0, 1.5  # what a round takes, roughly: weights of the progress bar


class Cell(NamedTuple):
    """Requests that are decoded together. `steps`: the load steps up to the concurrency and down again."""

    category: str
    concurrency: int
    steps: bool = False


class PolicyVariant(NamedTuple):
    """A policy, and the kind of its drafter ("": none)."""

    policy: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class VisitPlan:
    """What is visited. `limit`: requests of a cell at least; `sampled`: concurrencies at which all policies run."""

    categories: Sequence[str]
    concurrencies: Sequence[int]
    sampled: Sequence[int]
    limit: int
    tokens: int
    seed: int = 0

    @property
    def requests(self) -> int:
        return max(self.limit, 2 * max(self.concurrencies))

    def count(self, cell: Cell) -> int:
        if cell.steps:
            return sum(count for _, count in self._stages(cell))
        return max(self.limit, 2 * cell.concurrency)

    def load(self, cell: Cell) -> Load:
        if not cell.steps:
            return [(0, cell.concurrency)]
        load, tokens = [], 0
        for running, requests in self._stages(cell):
            load.append((tokens, running))
            tokens += requests * self.tokens
        return load

    def _stages(self, cell: Cell) -> list[tuple[int, int]]:
        """Return (requests at once, requests in all) of each stage."""
        most = cell.concurrency
        some = max(1, most // 4)
        return [(1, 1), (some, some), (most, most + most // 4), (some, 2 * some), (1, 2)]

    def cells(self) -> dict[Cell, list[PolicyVariant]]:
        adaptive = [PolicyVariant(ADAPTIVE, kind) for kind in KINDS]
        every = [Cell(category, count) for count in self.concurrencies for category in self.categories]
        found = {
            cell: [*adaptive, *([PolicyVariant(CONTROL)] if number % _CONTROL_EVERY == 0 else [])]
            for number, cell in enumerate(every)
        }
        all_policies = [PolicyVariant(name, "good") for name in (ADAPTIVE, *FIXED)]
        for count in self.concurrencies:
            if count in self.sampled:
                found[Cell(MIX, count)] = [PolicyVariant(CONTROL), *all_policies]
        found[Cell(MIX, max(self.concurrencies), steps=True)] = all_policies[:1]
        return found

    def weight(self, cell: Cell) -> float:
        """Return roughly what a visit takes."""
        waves = self.count(cell) / cell.concurrency if cell.concurrency == 1 or cell.steps else 1.0
        return 2.0 * waves * self.tokens * (_ROUND_MS + _SEQUENCE_MS * cell.concurrency)


class VisitPair(NamedTuple):
    """A visit under one variant, and plain decoding beside it."""

    plain: Visit
    own: Visit

    @property
    def ratio(self) -> float:
        """Its tokens/s over plain decoding's."""
        return self.own.tokens_per_s / self.plain.tokens_per_s


@dataclass(slots=True)
class ComparisonResult:
    """Results of a session. `uncounted`: cells in which no round of some variant counts, since prompts are so long that
    there is always one being read. `mismatches`: outputs that differ from plain decoding's."""

    pairs: dict[tuple[Cell, PolicyVariant], list[VisitPair]] = field(default_factory=dict)
    uncounted: list[Cell] = field(default_factory=list)
    compared: int = 0
    mismatches: list[str] = field(default_factory=list)
    timed: dict[PolicyVariant, Timed] = field(default_factory=dict)

    def leave_out_uncounted(self) -> None:
        """Forget the visits to cells of which there is nothing to say."""
        silent = [cell for (cell, _), pairs in self.pairs.items() if not all(v.tokens for pair in pairs for v in pair)]
        self.uncounted += dict.fromkeys(silent)
        self.pairs = {key: pairs for key, pairs in self.pairs.items() if key[0] not in self.uncounted}

    def ratio(self, cell: Cell, arm: PolicyVariant) -> float:
        """Return tokens/s over plain decoding's beside it; of several visits the median."""
        return statistics.median(pair.ratio for pair in self.pairs[cell, arm])


class PolicyComparison:
    """Runs a plan. `plain` and `runner`: of both halves of the target, the former for plain decoding beside what is
    compared with it. `told` hears what is done next, how large it is beside all of `total`, and how many tokens it
    makes at most."""

    def __init__(
        self,
        plan: VisitPlan,
        requests: Requests,
        plain: VisitRunner,
        runner: VisitRunner,
        options: EngineOptions,
        known: StepCost,
        told: Callable[[str, float, int], None],
    ) -> None:
        self._plan, self._requests, self._told = plan, requests, told
        self._plain, self._runner = plain, runner
        self._options, self._known = options, known
        self._random = random.Random(plan.seed)  # noqa: S311  # an order, not a secret
        self._cells = plan.cells()
        self._drafters: dict[PolicyVariant, Drafters] = {}
        self.found = ComparisonResult()

    @property
    def total(self) -> float:
        """What the progress bar counts to; visits that are done again are not in it."""
        return sum(len(arms) * self._plan.weight(cell) for cell, arms in self._cells.items())

    def run(self) -> ComparisonResult:
        """Visit everything, then again what fell short of the bar."""
        cells = list(self._cells)
        self._random.shuffle(cells)
        for cell in cells:
            self._visit(cell, self._cells[cell])
        self.found.leave_out_uncounted()
        for _ in range(_AGAIN):
            for cell, arm in self._doubtful():
                self._visit(cell, [arm])
            self.found.leave_out_uncounted()
        return self.found

    def _doubtful(self) -> list[tuple[Cell, PolicyVariant]]:
        """Return the worst of those that fell short: noise is larger than what the bar allows for."""
        short = [(self.found.ratio(cell, arm), cell, arm) for cell, arm in adaptive_cells(self.found)]
        return [(cell, arm) for ratio, cell, arm in sorted(short)[:_DOUBTS] if ratio < BAR]

    def _visit(self, cell: Cell, arms: Sequence[PolicyVariant]) -> None:
        submits = self._requests.of(cell.category, self._plan.count(cell))
        self._runner.read(submits)
        for arm in self._random.sample(arms, len(arms)):
            self._told(_describe_visit(cell, arm), self._plan.weight(cell), 2 * self._plan.tokens * len(submits))
            load = self._plan.load(cell)
            both = [self._plain.begin(submits, load), self._begin_visit(arm, submits, load)]
            side_by_side(self._random.sample(both, 2))
            pair = VisitPair(both[0].visit, both[1].visit)
            self.found.pairs.setdefault((cell, arm), []).append(pair)
            self._compare(_describe_visit(cell, arm), pair)

    def _begin_visit(self, arm: PolicyVariant, submits: Sequence[Submit], load: Load) -> Visiting:
        if not arm.kind:
            return self._runner.begin(submits, load)
        timed = self.found.timed.get(arm)
        if timed is None:  # a policy lives as long as a server: it keeps what it learned
            timed = self.found.timed[arm] = Timed(policy_of(arm.policy, self._known))
            self._drafters[arm] = Drafters(self._options, self._runner.target, seed=self._plan.seed)
        return self._runner.begin(submits, load, self._drafters[arm].of(arm.kind), timed)

    def _compare(self, described: str, pair: VisitPair) -> None:
        plain, own = pair.plain.outputs, pair.own.outputs
        self.found.compared += len(own.keys() & plain.keys())
        self.found.mismatches += [
            f"{key}, {described}" for key, tokens in own.items() if key in plain and not _agree(tokens, plain[key])
        ]


def _agree(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether outputs are the same, as far as both go: a visit ends where no more requests wait."""
    length = min(len(left), len(right))
    return left[:length] == right[:length]


def adaptive_cells(found: ComparisonResult) -> list[tuple[Cell, PolicyVariant]]:
    return [
        (cell, arm) for cell, arm in found.pairs if arm.policy == ADAPTIVE and cell.category != MIX and not cell.steps
    ]


def _describe_visit(cell: Cell, arm: PolicyVariant) -> str:
    load = f"1 to {cell.concurrency} and back" if cell.steps else f"{cell.concurrency} at once"
    return f"{cell.category}, {load}: {arm.policy}{', ' + arm.kind if arm.kind else ''}"


CONCURRENCIES = (1, 2, 4, 8, 16)
SAMPLED = (1, 4, 16)


def plan_of(
    texts: Sequence[PromptText],
    categories: Sequence[str] | None,
    concurrencies: Sequence[int] | None,
    sampled: Sequence[int] | None,
    *,
    limit: int,
    tokens: int,
    seed: int,
) -> VisitPlan:
    """Return what is visited. Raises BenchError."""
    loads = sorted(set(concurrencies or CONCURRENCIES))
    wanted = sorted(set(sampled)) if sampled else [count for count in SAMPLED if count in loads]
    for count in wanted:
        if count not in loads:
            raise BenchError(f"--sample {count} is none of the concurrencies: {', '.join(map(str, loads))}")
    return VisitPlan(choose_categories(texts, categories or []), loads, wanted, limit, tokens, seed)


def read_policy_options(config: Path | None, most_running: int) -> EngineOptions:
    """Return the options of a target for so many requests at once. Raises what reading a configuration raises, and
    BenchError where it drafts nothing from the text itself."""
    options = with_suffix_alone(read_configured(config)[1])
    return msgspec.structs.replace(options, max_running=max(most_running, options.max_running))
