"""Predicts configurations, then runs them all in turn, and compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track

from orchestrator.bootstrap import EngineOptions, engine_options, load_target
from orchestrator.bootstrap.profile_work import Work, profile_store
from orchestrator.cli.bench_prompts import BenchError
from orchestrator.cli.plan_bench.figures import row_of
from orchestrator.cli.plan_bench.predicted import Planned, planned
from orchestrator.cli.plan_bench.runs import Configuration, Load, Measured, Runner, prompts
from orchestrator.config.model import ClusterConfig
from orchestrator.planning.proposal import asked_by_config

_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be run: `works` names a place of the target for each runtime, `visits` how often everything is run."""

    config: ClusterConfig
    base: Path
    works: tuple[Work, ...]
    configurations: tuple[Configuration, ...]
    visits: int
    output_tokens: int

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a row for each configuration and one for each load. All is predicted before anything is run."""
        options = engine_options(self.config, self.base)
        runtimes = {one.runtime for one in self.configurations}
        works = [work for work in self.works if work.job.model.adapter in runtimes]
        with ExitStack() as stack:
            runners = {}
            for work in works:
                runners[work.job.model.adapter] = runner = _runner(options, work)
                stack.callback(runner.close)
            plans = self._plans(works, runners)
            predicted = {one: plans[one.load].predicted(one) for one in self.configurations}
            measured = self._measured(runners)
        rows = [row_of(one, predicted[one], measured[one]) for one in self.configurations]
        return rows, [_load_row(plans[load], measured) for load in plans]

    def _plans(self, works: Sequence[Work], runners: Mapping[str, Runner]) -> dict[Load, Planned]:
        asked, store = asked_by_config(self.config, self.base), profile_store(self.config)
        if not (asked.suffix and asked.depth_bound):
            raise BenchError(
                "the configuration has no drafts from the text itself (`suffix`): there is no depth to try"
            )
        places = {(work.job.model.adapter, work.threads) for work in works}
        tokenizer = next(iter(runners.values())).tokenizer
        found = {}
        for load in dict.fromkeys(one.load for one in self.configurations):
            lengths = [len(prompt) for visit in range(self.visits) for prompt in prompts(tokenizer, load, visit)]
            found[load] = planned(asked, store, load, (round(mean(lengths)), self.output_tokens), places)
        return found

    def _measured(self, runners: Mapping[str, Runner]) -> dict[Configuration, Measured]:
        found = {one: Measured() for one in self.configurations}
        for runtime, runner in runners.items():  # let runtimes compile their shapes
            for one in [one for one in self.configurations if one.runtime == runtime][-2:]:
                runner.visit(one, self.visits, min(self.output_tokens, _WARM_TOKENS))
        for visit, one in self._in_turn():
            found[one].add(runners[one.runtime].visit(one, visit, self.output_tokens))
        return found

    def _in_turn(self) -> Iterator[tuple[int, Configuration]]:
        """Yield every configuration so often, each other time in the opposite order: a drift of the machine meets
        all."""
        order = [
            (visit, one)
            for visit in range(self.visits)
            for one in (self.configurations if visit % 2 == 0 else reversed(self.configurations))
        ]
        yield from track(order, description="running", console=Console(stderr=True), transient=True)


def _runner(options: EngineOptions, work: Work) -> Runner:
    model = work.job.model
    here = options.with_model(adapter=model.adapter, device=model.device, threads=model.threads)
    with Console(stderr=True).status(f"loading the target on {model.adapter}"):
        return Runner(here, load_target(here, lambda stage, fraction: None))


def _load_row(plan: Planned, measured: Mapping[Configuration, Measured]) -> dict[str, Any]:
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
