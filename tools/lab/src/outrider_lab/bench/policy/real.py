"""The part that runs: the target is loaded, what forwards cost is measured, everything is visited, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from adapters.borrowed_slots import cut_slots
from adapters.tokenizer import load_tokenizer
from device_profiles.cost import StepCost
from orchestrator.clock import SystemClock
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.run import environment_of
from orchestrator.worker.loading.engine import first_cost
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.policy.arms import ADAPTIVE
from outrider_lab.bench.policy.recorder import measure_replay_costs, record_drafts, with_rounds
from outrider_lab.bench.policy.requests import MIX, Requests, requests_of
from outrider_lab.bench.policy.runs import VisitRunner
from outrider_lab.bench.policy.session import ComparisonResult, PolicyComparison, PolicyVariant, VisitPlan
from outrider_lab.replay.recorded import Costs
from outrider_lab.simulation.recording import Recording


@dataclass(frozen=True, slots=True)
class Real:
    """What was run, and what was recorded of it."""

    plan: VisitPlan
    found: ComparisonResult
    recording: Recording


def measure_real(options: EngineOptions, texts: Sequence[PromptText], plan: VisitPlan, costs_s: float) -> Real:
    """Load, measure, visit, record; a progress bar goes to standard error. Raises what loading and forwards raise."""
    with ExitStack() as stack:
        bar = stack.enter_context(_progress())
        told = _show_stages(bar)
        target = load_target(options, told, slots=2 * options.max_running)
        stack.callback(target.model.close)
        known = first_cost(target, options).cost
        costs = measure_replay_costs(target.model, SystemClock(), told, costs_s)
        requests = requests_of(
            texts, plan.categories, load_tokenizer(target.tokenizer_dir), count=plan.requests, max_tokens=plan.tokens
        )
        targets = _halves(target, options.max_running)
        found = _run_visits(bar, plan, requests, targets, options, known)
        visits = [
            pair for (_, arm), pairs in found.pairs.items() if arm == PolicyVariant(ADAPTIVE, "good") for pair in pairs
        ]
        costs = with_rounds(costs, *([one for pair in visits for one in pair[side].rounds] for side in range(2)))
        return Real(plan, found, _record_drafts(bar, plan, requests, found, options, target, costs, known))


def _progress() -> Progress:
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=1)


def _show_stages(bar: Progress) -> Callable[[str, float], None]:
    """Return what hears of stages; a negative fraction is not known."""
    task = bar.add_task("", total=None)

    def show_stage(stage: str, fraction: float) -> None:
        bar.update(task, description=stage, total=1.0 if fraction >= 0.0 else None, completed=max(0.0, fraction))

    return show_stage


def _halves(target: LoadedSource, slots: int) -> list[LoadedSource]:
    """Return a target that was loaded with twice as many `slots` as two, for decode loops in turns. Two copies would
    do as well, if one were not faster than the other by 2 %."""
    return [replace(target, model=cut_slots(target.model, first, slots)) for first in (0, slots)]


def _run_visits(
    bar: Progress,
    plan: VisitPlan,
    requests: Requests,
    targets: Sequence[LoadedSource],
    options: EngineOptions,
    known: StepCost,
) -> ComparisonResult:
    """`targets`: two halves."""
    task = bar.add_task("running", total=1.0)
    done_weight, size, began_s = 0.0, 0.0, bar.get_time()
    expected_tokens = 1

    def show_visit(what: str, weight: float, tokens: int) -> None:
        nonlocal done_weight, size, expected_tokens
        before, done_weight = done_weight, done_weight + size
        size, expected_tokens = weight, tokens
        bar.update(task, description=what, completed=done_weight)
        shares = [int(10.0 * done / session.total) for done in (before, done_weight)]
        if not bar.console.is_terminal and shares[0] < shares[1] < 10:  # behind that, doubtful ones are run again
            left_min = (bar.get_time() - began_s) / 60.0 * (session.total / done_weight - 1.0)
            bar.console.print(f"{shares[1]}0 %, about {left_min:.1f} minutes left: {what}", highlight=False)

    def advance_bar(tokens: int) -> None:
        bar.advance(task, size * tokens / expected_tokens)

    plain, runner = (VisitRunner(target, options, advance_bar) for target in targets)
    session = PolicyComparison(plan, requests, plain, runner, options, known, show_visit)
    bar.update(task, total=session.total)
    return session.run()


def _record_drafts(
    bar: Progress,
    plan: VisitPlan,
    requests: Requests,
    found: ComparisonResult,
    options: EngineOptions,
    target: LoadedSource,
    costs: Costs,
    known: StepCost,
) -> Recording:
    outputs: dict[str, list[int]] = {}
    for (cell, _), pairs in found.pairs.items():
        if cell.category != MIX:
            for key, tokens in pairs[0].plain.outputs.items():
                outputs[key] = max(outputs.get(key, []), tokens, key=len)
    submits = requests.all()
    task = bar.add_task("recording drafts", total=len(submits))
    kinds = record_drafts(submits, outputs, options, target, lambda: bar.advance(task))
    return Recording(
        kinds=kinds,
        costs=costs,
        known=known,
        most=options.max_depth,
        limit=plan.limit,
        concurrencies=list(plan.concurrencies),
        environment=_environment(target, options, plan),
    )


def _environment(target: LoadedSource, options: EngineOptions, plan: VisitPlan) -> dict[str, Any]:
    return {
        **environment_of(target, options),
        "max_depth": options.max_depth,
        "tokens": plan.tokens,
        "limit": plan.limit,
        "seed": plan.seed,
    }
