"""`outrider bench serve`: load on any OpenAI-compatible endpoint, measured at the client."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.worker.measuring.prompts import read_texts, spread
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, write_json

if TYPE_CHECKING:  # httpx and numpy are loaded only where something is measured
    from outrider_lab.bench.traffic.client import Endpoint
    from outrider_lab.bench.traffic.drive import TrafficLoad
    from outrider_lab.bench.traffic.figures import TrafficRun

INTERRUPTED_EXIT = 130
FIXED_FIELDS = {"n", "best_of", "stream", "stream_options"}


def serve(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns` (the first is used) or `prompt`.")],
    url: Annotated[str, typer.Option(help="Base of the API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="The model's name; else the first that is served.")] = "",
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="Which route.")] = "chat",
    requests: Annotated[
        int, typer.Option(min=0, help="How many; prompts are used again in turn. 0: one for each prompt.")
    ] = 0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: this many at a time (1 where --rate is not given).")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, whatever the server does.")] = None,
    arrival: Annotated[Literal["poisson", "constant"], typer.Option(help="How an open loop's gaps vary.")] = "poisson",
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of the gaps; below 1 is burstier than Poisson.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals, and of the first request; each next has the next.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.")] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement, thrown away.")] = 1,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    header: Annotated[list[str] | None, typer.Option(help="`Name: value`, again for more.")] = None,
    body: Annotated[str, typer.Option(help="JSON object merged into each request.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds a request may take from its sending.")] = 600.0,
    slo: Annotated[str, typer.Option(help="Objectives in ms for the goodput: ttft=500,tpot=50,e2e=9000.")] = "",
    compare: Annotated[str, typer.Option(help="Base of a second API, measured in turns with --url.")] = "",
    compare_model: Annotated[str, typer.Option(help="The model there; else as for --url.")] = "",
    compare_body: Annotated[str, typer.Option(help="As --body, there; alone it compares two bodies at --url.")] = "",
    price_per_hour: Annotated[
        float, typer.Option(min=0.0, help="What the devices at --url cost an hour. 0: as its /metrics say.")
    ] = 0.0,
    compare_price_per_hour: Annotated[
        float, typer.Option(min=0.0, help="As --price-per-hour, of what is compared.")
    ] = 0.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this directory.")] = None,
    record_trace: Annotated[
        Path | None, typer.Option(help="Write the requests of --url as a trace, for `outrider simulate --trace`.")
    ] = None,
) -> None:
    """Send requests in a closed loop (--concurrency) or an open one (--rate); print latencies, rates and goodput."""
    from outrider_lab.bench.traffic.drive import TrafficLoad
    from outrider_lab.bench.traffic.outcome import parse_slo

    _check_loop(concurrency, rate, arrival, burstiness, timeout)
    objectives = parse_slo(slo)
    texts = read_texts(prompts)
    load = TrafficLoad(
        prompts=spread(texts, requests or len(texts)),
        fields={"max_tokens": max_tokens, "temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {}),
        seed=seed,
        timeout_s=timeout,
        warmup=warmup,
        concurrency=concurrency or 1,
        rate=rate,
        arrival=arrival,
        burstiness=burstiness,
    )
    _check_outputs(json_out, plots, record_trace)
    headers = _headers(header or [], api_key)
    endpoints = [_endpoint(url, model, endpoint, headers, body, "--body")]
    if compare or compare_body:
        there = _endpoint(
            compare or url, compare_model or model, endpoint, headers, compare_body or "{}", "--compare-body"
        )
        endpoints.append(there)
    result, runs = measure_served_load(endpoints, load, objectives, (price_per_hour, compare_price_per_hour))
    if record_trace is not None:
        write_trace(runs[0], record_trace)
    _report(result, runs, endpoints, json_out, plots)


def _check_loop(concurrency: int | None, rate: float | None, arrival: str, burstiness: float, timeout: float) -> None:
    if rate is not None and concurrency is not None:
        raise BenchError("--concurrency is a closed loop and --rate an open one: give one of them")
    for name, value in (("--rate", rate), ("--burstiness", burstiness), ("--timeout", timeout)):
        if value is not None and not 0.0 < value < math.inf:
            raise BenchError(f"{name} {value}: must be a finite number above 0")
    if burstiness != 1.0 and (rate is None or arrival == "constant"):
        raise BenchError("--burstiness shapes Poisson arrivals: give --rate, and --arrival poisson")


def write_trace(run: TrafficRun, path: Path) -> None:
    """Write the requests whose tokens were counted as a trace, from the first arrival on. Raises TraceError."""
    from outrider_lab.simulation.trace import TracedRequest, save_requests

    counted = [one for one in run.outcomes if one.prompt_tokens and one.generated]
    first_s = min((one.arrival_s for one in counted), default=0.0)
    save_requests(
        [
            TracedRequest(one.arrival_s - first_s, one.prompt_tokens or 1, one.generated or 1, category=one.category)
            for one in sorted(counted, key=lambda one: one.arrival_s)
        ],
        path,
    )


def _check_outputs(json_out: Path | None, plots: Path | None, record_trace: Path | None = None) -> None:
    """What cannot be written is said before the measurement, not after it."""
    check_json_path(json_out)
    if record_trace is not None and (record_trace.suffix != ".jsonl" or not record_trace.absolute().parent.is_dir()):
        raise BenchError(f"--record-trace {record_trace}: name a .jsonl file in a directory that is there")
    if plots is not None:
        from outrider_lab.bench.traffic.plots import open_directory

        open_directory(plots)


def _headers(given: list[str], api_key: str) -> dict[str, str]:
    found = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for one in given:
        name, colon, value = one.partition(":")
        if not colon or not name.strip() or not one.isascii():
            raise BenchError(f"--header {one!r}: write it as 'Name: value'")
        found[name.strip()] = value.strip()
    return found


def _endpoint(
    url: str, model: str, kind: Literal["chat", "completions"], headers: dict[str, str], body: str, option: str
) -> Endpoint:
    """Return what to measure, after seeing that it is there."""
    from outrider_lab.bench.traffic.client import Endpoint, fetch_model_names

    try:
        fields = json.loads(body)
    except ValueError as error:
        raise BenchError(f"{option}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BenchError(f'{option}: must be a JSON object, as in {{"top_p": 0.9}}')
    if fixed := sorted(fields.keys() & FIXED_FIELDS):
        raise BenchError(f"{option}: {', '.join(fixed)} cannot be set: one streamed answer a request is measured")
    base = url.rstrip("/")
    served = fetch_model_names(base, headers)
    if not model and not served:
        raise BenchError(f"{base}/models names no model: give --model, and see that the base ends as in .../v1")
    if model and served and model not in served:
        raise BenchError(f"{base} serves no model '{model}'; it serves {', '.join(served)}")
    return Endpoint(base, model or (served or [""])[0], kind, headers, fields)


def measure_served_load(
    endpoints: list[Endpoint], load: TrafficLoad, slo: dict[str, float], prices_per_hour: Sequence[float] = (0.0, 0.0)
) -> tuple[dict[str, Any], list[TrafficRun]]:
    """Measure and return the whole result (`summary`, `runs`, `environment`, `formulas`) and what it is made of.
    `prices_per_hour`: of each endpoint, 0 where its own word counts."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from outrider_lab.bench.traffic.drive import measure_endpoints
    from outrider_lab.bench.traffic.figures import FORMULAS, build_request_rows, compare_endpoints, summarise_traffic
    from outrider_lab.bench.traffic.outcome import Outcome

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"))
    # Drawing costs the generator's CPU: twice a second is enough.
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=len(load.prompts) * len(endpoints), failed=0)

        def advance_bar(outcome: Outcome) -> None:
            failed = bar.tasks[0].fields["failed"] + bool(outcome.error)
            bar.update(task, advance=1, failed=failed)

        runs = asyncio.run(measure_endpoints(endpoints, load, advance_bar))
    summaries = [
        summarise_traffic(run, load.rate, slo, price) for run, price in zip(runs, prices_per_hour, strict=False)
    ]
    result = {
        "summary": summaries[0] | (compare_endpoints(runs, summaries) if len(runs) > 1 else {}),
        "runs": [
            {
                "label": endpoint.label,
                "url": endpoint.url,
                "model": endpoint.model,
                "body": endpoint.body,
                "requests": build_request_rows(run),
            }
            for endpoint, run in zip(endpoints, runs, strict=True)
        ],
        "environment": _environment(endpoints[0], load, slo),
        "formulas": FORMULAS,
    }
    return result, runs


def _environment(endpoint: Endpoint, load: TrafficLoad, slo: dict[str, float]) -> dict[str, Any]:
    opened = {"arrival": load.arrival, "burstiness": load.burstiness, "rate_per_s": load.rate}
    return {
        "outrider": version("outrider"),
        "python": platform.python_version(),
        "client_cpus": os.cpu_count(),
        "endpoint": endpoint.kind,
        "loop": "closed" if load.rate is None else "open",
        **({"concurrency": load.concurrency} if load.rate is None else opened),
        **load.fields,
        "seed": load.seed,
        "prompts": len({prompt.text for prompt in load.prompts}),
        "warmup": load.warmup,
        "timeout_s": load.timeout_s,
        "slo_ms": slo,
    }


def _report(
    result: dict[str, Any], runs: list[TrafficRun], endpoints: list[Endpoint], json_out: Path | None, plots: Path | None
) -> None:
    """Write and print everything; exits 130 after an interruption, 1 where every request failed."""
    from outrider_lab.bench.traffic.table import print_serve

    write_json(json_out, result)
    if plots is not None:
        from outrider_lab.bench.traffic.plots import draw_traffic_plots

        draw_traffic_plots(plots, [(endpoint.label, run) for endpoint, run in zip(endpoints, runs, strict=True)])
    print_serve(result)
    if any(summary["interrupted"] for summary in summaries_of(result)):
        raise typer.Exit(INTERRUPTED_EXIT)
    for summary, endpoint in zip(summaries_of(result), endpoints, strict=True):
        if not summary["completed"]:
            kind, message = next(iter(summary["error_examples"].items()))
            raise BenchError(f"every request to {endpoint.url} failed; {kind}: {message}")


def summaries_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    summary = result["summary"]
    return [summary, summary["compare"]] if "compare" in summary else [summary]
