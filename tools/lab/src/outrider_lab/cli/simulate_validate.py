"""`outrider simulate --validate`: the simulator beside real runs on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from outrider_lab.bench.result import check_json_path, describe_machine, print_rows, print_summary, write_json

_MAX_TOKENS, _PROFILE_S = 64, 30.0


def validate_simulator(only: str, prompts: Path | None, store: Path | None, json_out: Path | None) -> None:
    """Make real runs, simulate each, and print how far apart they are. Raises OutriderError."""
    from rich.console import Console

    from outrider_lab.bench.selection import select_by_name
    from outrider_lab.bench.validation.run import ValidationPlan, validate
    from outrider_lab.bench.validation.runs import RUNS

    check_json_path(json_out)
    console = Console(stderr=True)
    runs = select_by_name(only, RUNS)
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
    write_json(json_out, result)
    print_validation(result)


def print_validation(result: dict[str, Any]) -> None:
    """Print each run with its errors, and the summary beside its bars."""
    from orchestrator.plain_table import print_lines

    names = ("output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms", "goodput_per_s", "pause_ms", "changed_group")
    rows = [
        {"name": row["name"]}
        | {name: f"{row['real'][name]:,.1f} {error:+.0%}" for name, error in row["errors"].items() if name in names}
        for row in result["runs"]
    ]
    rows = [dict.fromkeys(names, "") | row for row in rows]
    print_rows("", {"run": "{name}"} | {name: f"{{{name}}}" for name in names}, rows)
    print_lines("Each cell: the real figure, and how far the simulated one is from it.")
    print_summary(result, "at most")
    print_lines(*(f"left out: {line}" for line in result["left_out"]))
