"""`outrider simulate --validate`: the simulator beside real runs on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from outrider_lab.cli.bench_result import check_json_path, describe_machine

_MAX_TOKENS, _PROFILE_S = 64, 30.0


def validate_simulator(only: str, prompts: Path | None, store: Path | None, json_out: Path | None) -> None:
    """Make real runs, simulate each, and print how far apart they are. Raises OutriderError."""
    from rich.console import Console

    from outrider_lab.bench.validation.run import ValidationPlan, choose_runs, validate

    check_json_path(json_out)
    console = Console(stderr=True)
    runs = choose_runs(only)
    with tempfile.TemporaryDirectory(prefix="outrider-validate-store-") as scratch:
        plan = ValidationPlan(
            runs,
            prompts,
            _MAX_TOKENS,
            _PROFILE_S,
            store or Path(scratch),
            lambda line: console.print(line, highlight=False, markup=False),
        )
        result = validate(plan)
    result["environment"] = describe_machine()
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print_validation(result)


def print_validation(result: dict[str, Any]) -> None:
    """Print each run with its errors, and the summary beside its bars."""
    from rich.table import Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    names = ("output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms", "goodput_per_s", "pause_ms")
    table = Table("run", *names)
    for row in result["runs"]:
        cells = [
            f"{row['real'][name]:,.1f} {row['errors'][name]:+.0%}" if name in row["errors"] else "" for name in names
        ]
        add_row(table, row["name"], *cells)
    console.print(table)
    console.print("Each cell: the real figure, and how far the simulated one is from it.", highlight=False)
    figures = Table("figure", "value", "bar")
    for name, value in result["summary"].items():
        bar = result["bars"].get(name)
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        add_row(figures, name, shown, f"at most {bar:g}" if bar is not None else "")
    console.print(figures)
    for line in result["left_out"]:
        console.print(f"left out: {line}", style="yellow", highlight=False, markup=False)
