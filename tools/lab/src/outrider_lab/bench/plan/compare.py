"""Predicts configurations, then runs them all in turns, and compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track

from adapters.contract import silent
from orchestrator.config.model import ClusterConfig
from orchestrator.fitting.worker_options import engine_options
from orchestrator.planning.profiling.work import Work, profile_store
from orchestrator.planning.wanted import build_request_from_config
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.measuring.rounds import in_turns
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.plan.figures import row_of
from outrider_lab.bench.plan.predicted import PlannedLoad, plan_load
from outrider_lab.bench.plan.runs import Configuration, LoopRunner, RunLoad, RunMeasurement, prompts, select_full_rounds

_WARM_TOKENS = 16
_PARTS = 24


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """What is to be run: `works` names a place of the target for each runtime, `requests` how many of each
    configuration are counted."""

    config: ClusterConfig
    base: Path
    works: tuple[Work, ...]
    configurations: tuple[Configuration, ...]
    requests: int
    output_tokens: int

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        """Return a row for each configuration, one for each load, and each runtime's pace.

        The pace is how many times as long the control's forward took, while all was run, as was predicted. All is
        predicted before anything is run.
        """
        options = engine_options(self.config, self.base)
        runtimes = {one.runtime for one in self.configurations}
        works = [work for work in self.works if work.job.model.adapter in runtimes]
        with ExitStack() as stack:
            runners = {}
            for work in works:
                slots = 1 + sum(one.load.concurrency for one in self._of(work.job.model.adapter))
                runners[work.job.model.adapter] = runner = _runner(options, work, slots)
                stack.callback(runner.close)
            plans = self._plans(works, runners)
            predicted = {one: plans[one.load].predict_configuration(one) for one in self.configurations}
            measured, control = self._run_configurations(runners)
        any_plan = next(iter(plans.values()))
        paces = {runtime: mean(control[runtime]) / any_plan.control_ms(runtime) for runtime in control}
        rows = [
            row_of(one, predicted[one], measured[one], paces[one.runtime], plans[one.load].price_per_hour(one))
            for one in self.configurations
        ]
        return rows, [_load_row(plans[load], measured) for load in plans], paces

    def _of(self, runtime: str) -> list[Configuration]:
        return [one for one in self.configurations if one.runtime == runtime]

    def _plans(self, works: Sequence[Work], runners: Mapping[str, LoopRunner]) -> dict[RunLoad, PlannedLoad]:
        asked, store = build_request_from_config(self.config, self.base), profile_store(self.config)
        if not (asked.suffix and asked.depth_bound):
            raise BenchError(
                "the configuration has no drafts from the text itself (`suffix`): there is no depth to try"
            )
        places = {(work.job.model.adapter, work.threads) for work in works}
        tokenizer = next(iter(runners.values())).tokenizer
        found = {}
        for load in dict.fromkeys(one.load for one in self.configurations):
            lengths = [len(prompt) for prompt in prompts(tokenizer, load, load.requests(self.requests))]
            found[load] = plan_load(asked, store, load, (round(mean(lengths)), self.output_tokens), places)
        return found

    def _run_configurations(
        self, runners: Mapping[str, LoopRunner]
    ) -> tuple[dict[Configuration, RunMeasurement], dict[str, list[float]]]:
        """Run everything in turns, each the same share of its work at a time: a machine that changes its pace changes
        it for all. Between, see what the pace is."""
        for runtime, runner in runners.items():  # let runtimes compile their shapes
            for one in self._of(runtime)[-2:]:
                runner.warm(one, min(self.output_tokens, _WARM_TOKENS))
        # By runtime: each other's threads and caches are met as rarely as may be.
        order = sorted(self.configurations, key=lambda one: one.runtime)
        requests = {one: one.load.requests(self.requests) for one in order}
        begun = {one: runners[one.runtime].begin(one, requests[one], self.output_tokens) for one in requests}
        control: dict[str, list[float]] = {runtime: [] for runtime in runners}
        parts = in_turns(list(begun.values()), _PARTS)
        console = Console(stderr=True)
        for _ in track(parts, description="running", console=console, total=_PARTS, transient=True):
            for runtime, runner in runners.items():
                control[runtime].append(runner.control_ms())
        rounds = {one: select_full_rounds(decoding.rounds, one.load, requests[one]) for one, decoding in begun.items()}
        return {one: RunMeasurement(found) for one, found in rounds.items()}, control


def _runner(options: EngineOptions, work: Work, slots: int) -> LoopRunner:
    model = work.job.model
    here = options.with_model(adapter=model.adapter, device=model.device, threads=model.threads)
    with Console(stderr=True).status(f"loading the target on {model.adapter}"):
        return LoopRunner(here, load_target(here, silent, slots=slots))


def _load_row(plan: PlannedLoad, measured: Mapping[Configuration, RunMeasurement]) -> dict[str, Any]:
    """Return what was chosen for a load beside the best of what was run; a choice that was not run has no figure."""
    rates = {one: found.tokens_per_s for one, found in measured.items() if one.load == plan.load}
    best, chosen = max(rates, key=lambda one: rates[one]), plan.chosen
    workload, found = plan.proposal.wanted.workload, plan.proposal.plan
    return {
        "load": plan.load.name,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "chosen": chosen.name,
        "planned_depth": found.replicas[0].depth,
        "planned_tokens_per_s": found.goodput_tokens_per_s,
        "best": best.name,
        "best_tokens_per_s": rates[best],
        "chosen_tokens_per_s": rates.get(chosen),
        "chosen_vs_best": rates[chosen] / rates[best] if chosen in rates else None,
    }
