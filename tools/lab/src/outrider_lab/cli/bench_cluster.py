"""`outrider bench cluster`: what plans over hosts predict beside what they do, and hosts that join and leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, describe_machine, print_rows, print_summary, write_json

_COLUMNS = {
    "hosts": "{names}",
    "at once": "{concurrency}",
    "used": "{uses}",
    "predicted tokens/s": "{predicted_tokens_per_s:.1f}",
    "measured": "{measured_tokens_per_s:.1f}",
    "error": "{error:+.1%}",
    "ready s": "{ready_s:.1f}",
}


def cluster(
    cores: Annotated[
        list[str] | None,
        typer.Option(help="The cores of a host, as in 0,1 (`all`: every core); once for each. Else three hosts."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model's source, as in cluster.yaml. Else the default model, or a simulated one."),
    ] = None,
    adapter: Annotated[str, typer.Option(help="Its runtime; `auto` chooses, with --mixed all of them.")] = "simulated",
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Measure a pool of members that are not alike, and break each in turn.")
    ] = False,
    faults: Annotated[int, typer.Option(min=0, help="With --mixed: how often a member is killed or stopped.")] = 40,
    seed: Annotated[int, typer.Option(help="With --mixed: of the faults and of the requests meanwhile.")] = 0,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; may be repeated. Else 1, 4 and 12 (or 16).")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="How long each configuration is under load.")] = 12.0,
    store: Annotated[
        Path | None, typer.Option(help="Keep models and profiles here. Else they go with the run.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Make hosts of network namespaces with real Ray nodes, and run a real daemon over them (Linux, as root)."""
    import tempfile

    from rich.console import Console

    from outrider_lab.bench.cluster.hosts import make_hosts
    from outrider_lab.bench.cluster.run import BARS, ClusterBench, ClusterLoad
    from outrider_lab.chaos.mixed import BARS as MIXED_BARS
    from outrider_lab.chaos.mixed import SIMULATED, MixedBench, list_members
    from outrider_lab.chaos.service import DEFAULT_SOURCE

    check_json_path(json_out)
    sets = [_read_cores(one) for one in cores or (["all"] * 3 if mixed else _default_cores())]
    if len(sets) < 2:
        raise BenchError("--cores: a cluster has two hosts at least; give it once for each")
    simulated = SIMULATED if mixed else "simulated:toy?base_ms=2&row_ms=4"
    model = model or (simulated if adapter == "simulated" else DEFAULT_SOURCE)
    requests = tuple(sorted(set(concurrency or (1, 4, 16 if mixed else 12))))
    load = ClusterLoad({"source": model, "adapter": adapter}, requests, output_tokens, seconds)
    console = Console(stderr=True)

    def tell(line: str) -> None:
        console.print(line, highlight=False)

    with tempfile.TemporaryDirectory(prefix="outrider-bench-store-") as scratch, make_hosts(sets) as hosts:
        members = list_members(adapter, hosts) if mixed else []
        for number in range(len(sets)):
            with console.status(f"start Ray on host {number + 1} of {len(sets)}"):
                hosts.join(number)
        kept = store or Path(scratch)
        bench: ClusterBench | MixedBench = ClusterBench(hosts, load, kept, tell)
        if mixed:
            bench = MixedBench(hosts, members, load, kept, faults, seed, tell)
        result = bench.run()
    result["environment"] = {**describe_machine(), "cores": [list(one) for one in sets], "model": model}
    result = {**result, "bars": MIXED_BARS if mixed else BARS}
    write_json(json_out, result)
    if mixed:
        print_summary(result)
        return
    for row in result["configurations"]:
        row["names"], row["uses"] = ", ".join(row["hosts"]), ", ".join(row["used"])
    print_rows("", _COLUMNS, result["configurations"])
    print_summary(result)
    if failed := [name for name in ("shift", "join") if "failed" in result[name]]:
        raise BenchError(f"not measured: {', '.join(failed)}")


def _default_cores() -> list[str]:
    """Return two equal hosts, and a third that shares the machine with them."""
    usable = sorted(os.sched_getaffinity(0))
    half = max(1, len(usable) // 2)
    return [",".join(map(str, usable[:half])), ",".join(map(str, usable[half:] or usable)), "all"]


def _read_cores(text: str) -> tuple[int, ...]:
    if text == "all":
        return ()
    try:
        cores = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise BenchError(f"--cores {text!r}: is no list of numbers, as in 0,1") from None
    if missing := set(cores) - os.sched_getaffinity(0):
        raise BenchError(f"--cores {text}: this machine has no core {min(missing)} for it")
    return cores
