"""`outrider bench plan`: what plans predict beside what decoding does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import ConfigFile
from orchestrator.worker.measuring.canary_aside import leave_out_canary
from orchestrator.worker.measuring.prompts import spread
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import describe_machine, write_json
from outrider_lab.bench.selection import select_by_name

if TYPE_CHECKING:  # loaded where something is measured
    from orchestrator.config.model import ClusterConfig
    from orchestrator.planning.profiling.work import Work
    from outrider_lab.bench.plan.runs import Configuration


def plan(
    runtime: Annotated[
        list[str] | None, typer.Option(help="A runtime; may be repeated. Else openvino_rt and onnx_rt.")
    ] = None,
    depth: Annotated[
        list[str] | None, typer.Option(help="0, a fixed depth, or policy; may be repeated. Else 0, 4 and policy.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; may be repeated. Else 1 and 4.")
    ] = None,
    only: Annotated[str, typer.Option(help="Configurations whose name this regular expression finds.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Use this many configurations, spread evenly; 0: all.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each configuration that count.")] = 12,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 96,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the profiles again first.")] = False,
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Run configurations, and compare them with their predictions and with what the plan chooses."""
    from orchestrator.config.load import default_config_path, load_config
    from outrider_lab.bench.plan.compare import PlanComparison
    from outrider_lab.bench.plan.figures import BARS, FORMULAS, summarise_plan_comparison
    from outrider_lab.bench.plan.table import print_comparison

    path = config or default_config_path()
    loaded = leave_out_canary(load_config(path))
    works = _works(loaded, path, runtime)
    every = configurations([work.job.model.adapter for work in works], depth, concurrency)
    chosen = select_by_name(only, every)
    chosen = spread(chosen, min(limit, len(chosen)) or len(chosen))
    profile_s = _profile_missing(works, loaded, path, refresh=refresh)
    base = path.resolve().parent
    rows, loads, paces = PlanComparison(loaded, base, tuple(works), tuple(chosen), requests, output_tokens).rows()
    result: dict[str, Any] = {
        "configurations": rows,
        "workloads": loads,
        "pace": paces,
        "environment": {
            **describe_machine(),
            "target": works[0].job.model.source,
            "requests": requests,
            "output_tokens": output_tokens,
        },
    }
    result = {"summary": summarise_plan_comparison(result, profile_s), "bars": BARS, "formulas": FORMULAS, **result}
    write_json(json_out, result)
    print_comparison(result)


def configurations(
    runtimes: Sequence[str], depths: Sequence[str] | None, concurrencies: Sequence[int] | None
) -> list[Configuration]:
    """Return all that these come to, load by load. Raises BenchError for a depth that is none."""
    from outrider_lab.bench.plan.runs import PLAIN, POLICY, Configuration, RunLoad

    wanted = list(dict.fromkeys(depths or (PLAIN, "4", POLICY)))
    for one in wanted:
        if one != POLICY and not one.isdecimal():
            raise BenchError(f"--depth is a number or {POLICY}, not {one!r}")
    return [
        Configuration(runtime, depth, RunLoad(count, long))
        for count in dict.fromkeys(concurrencies or (1, 4))
        for long in (False, True)
        for depth in wanted
        for runtime in dict.fromkeys(runtimes)
    ]


def _works(loaded: ClusterConfig, path: Path, runtimes: list[str] | None) -> list[Work]:
    """Return the target on a device of each runtime. Raises Unsupported for a runtime that is not here."""
    from orchestrator.planning.profiling.work import list_work

    wanted = runtimes or ([] if loaded.model.source.startswith("simulated:") else ["openvino_rt", "onnx_rt"])
    works: dict[str, Work] = {}
    for work in list_work(loaded, path.resolve().parent, wanted):
        if work.job.role == "target":
            works.setdefault(work.job.model.adapter, work)
    return list(works.values())


def _profile_missing(works: Sequence[Work], loaded: ClusterConfig, path: Path, *, refresh: bool) -> float:
    """Measure what has no profile yet, or all of it.

    Return the seconds that measuring all of it takes, by the clock where it was done here, else as they are stored.
    """
    from orchestrator.cli.profile import profile
    from orchestrator.planning.profiling.work import profile_store

    store = profile_store(loaded)
    missing = [work for work in works if refresh or not work.is_known(store)]
    began = time.perf_counter()
    if missing:
        profile([f"{work.job.model.adapter}:{work.job.model.device}" for work in missing], refresh=refresh, config=path)
    took_s = time.perf_counter() - began
    known = [work.find_model_profile(store) for work in works if work not in missing]
    return (took_s if missing else 0.0) + sum(one.took_s for one in known if one is not None)
