"""What benchmarks do with a result: the machine beside it, a file, tables for people, and a refusal."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.plain_table import print_table, wide_console
from outrider_lab.bench.errors import BenchError


def check_json_path(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before anything is measured. Raises BenchError."""
    if path is not None and not path.resolve().parent.is_dir():
        raise BenchError(f"{option} {path}: there is no such directory")


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1), encoding="utf-8")


def describe_machine() -> dict[str, Any]:
    from adapters.hardware import processor

    return {
        "outrider": version("outrider"),
        "python": platform.python_version(),
        "processor": processor().name,
        "cpus": os.cpu_count(),
    }


def finish_comparison(result: dict[str, Any], json_out: Path | None, show: Callable[[dict[str, Any]], None]) -> None:
    """Add the environment, write and show a result. Raises BenchError where its outputs are not identical."""
    result["environment"] = describe_machine()
    write_json(json_out, result)
    show(result)
    if not result["summary"]["identical"]:
        raise BenchError("outputs differ from the target's own")


def print_rows(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table. `columns`: the heading of each, and a format of a row's values, as in `{ready_s:.1f} s`. "-"
    stands for what was not measured."""
    cells = ([_format_cell(shape, row) for shape in columns.values()] for row in rows)
    print_table(list(columns), cells, title=title, numbers=True)


def _format_cell(shape: str, row: Mapping[str, Any]) -> str:
    try:
        return shape.format_map(row)
    except TypeError:  # None has no format
        return "-"


def print_summary(result: Mapping[str, Any], bound: str = "at least") -> None:
    """Print `summary` beside its `bars`, and the `formulas` where there are any. `bound`: what a bar is that is a mere
    number."""
    bars = result["bars"]
    rows = []
    for name, value in result["summary"].items():
        number, kind = bars[name] if isinstance(bars.get(name), tuple) else (bars.get(name), bound)
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        rows.append({"name": name, "value": shown, "bar": "" if number is None else f"{kind} {number:g}"})
    print_rows("", {"figure": "{name}", "value": "{value}", "bar": "{bar}"}, rows)
    print_formulas(result.get("formulas", {}))


def print_formulas(formulas: Mapping[str, str]) -> None:
    """Print how each figure comes about."""
    console = wide_console()
    for name, formula in formulas.items():
        console.print(f"{name} = {formula}", style="dim", highlight=False, markup=False)
