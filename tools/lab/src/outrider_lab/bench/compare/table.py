"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from device_profiles.units import human_bytes
from outrider_lab.bench.compare.figures import CONTROL
from outrider_lab.peers.contract import NATIVE

if TYPE_CHECKING:
    from rich.console import Console

SPEED = (
    ("tokens/s", "tok_s", "{:.1f}"),
    ("TTFT ms", "ttft_ms", "{:.0f}"),
    ("TPOT ms", "tpot_ms", "{:.2f}"),
    ("together", "at_once_tok_s", "{:.1f}"),
    ("accepted a forward", "mean_acceptance_length", "{:.2f}"),
)
REST = (
    ("perplexity / float32", "perplexity_ratio", "{:.4f}"),
    ("choices", "choice_agreement", "{:.1%}"),
    ("agreement", "agreement", "{:.1%}"),
    ("= plain", "same_as_plain", "{:.0%}"),
    ("= again", "same_again", "{:.0%}"),
    ("= in company", "same_in_company", "{:.0%}"),
)
BESIDE = (("tokens/s", "tok_s"), ("TPOT", "tpot"), ("TTFT", "ttft"), ("together", "at_once_tok_s"))
ABSENT = "-"
_FILE_COLUMNS = 190
_MOST_NOISE = 0.05
_BUILD = "docs/benchmarks.md says how to build llama-server here"


def speed_cells(row: dict[str, Any]) -> list[str]:
    """Return a row's name and speeds, with the ratios of tokens/s to Outrider's plain mode and their
    spreads."""
    ratios = row.get("vs_outrider", {})
    cells = [format_figure(row.get(name), shape) for _, name, shape in SPEED]
    return [
        _name(row),
        *cells,
        format_figure(ratios.get("tok_s"), "{:.2f}"),
        _range(ratios, "tok_s_interval"),
        _range(ratios, "tok_s_quartiles"),
        format_figure(ratios.get("at_once_tok_s"), "{:.2f}"),
        _range(ratios, "at_once_tok_s_quartiles"),
    ]


def rest_cells(row: dict[str, Any]) -> list[str]:
    """Return a row's name, quality, determinism, memory, load time and energy."""
    peak = row.get("peak_bytes")
    return [
        _name(row),
        *(format_figure(row.get(name), shape) for _, name, shape in REST),
        human_bytes(peak) if peak else ABSENT,
        format_figure(row.get("load_s"), "{:.1f}"),
        format_figure(row.get("joules_per_token"), "{:.2f}"),
    ]


SPEED_HEADS = (
    "engine",
    *(name for name, _, _ in SPEED),
    "x Outrider plain",
    "95 %",
    "quartiles",
    "x together",
    "its quartiles",
)
REST_HEADS = ("engine", *(name for name, _, _ in REST), "peak memory", "load s", "J/token")


_NAME_HEADS = ("engine", "Outrider", "beside")
BESIDE_HEADS = ("Outrider", "beside", *(name for name, _ in BESIDE))


def beside_cells(one: dict[str, Any]) -> list[str]:
    """Return a mode of Outrider, another engine, and how many times its best mode that is, which is named."""
    cells = [f"{one[name]:.2f} ({one['best'][name]})" if name in one else ABSENT for _, name in BESIDE]
    return [one["mode"], one["engine"], *cells]


def list_figures(result: dict[str, Any]) -> list[str]:
    """Return a line for each figure of Outrider beside the best of all other engines."""
    return [
        f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in result["figures"].items()
    ]


def list_beside(result: dict[str, Any]) -> list[str]:
    """Return a line of ratios by category for each mode of Outrider and each other engine."""
    return [
        f"outrider {one['mode']} / {one['engine']} {one['best']['tok_s']}: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(one["categories"].items()))
        for one in result["beside_peers"]
        if one["categories"]
    ]


def format_figure(value: float | None, shape: str) -> str:
    return ABSENT if value is None else shape.format(value)


def list_notes(result: dict[str, Any]) -> list[str]:
    """Return what rows lack, and why."""
    notes = []
    for row in result["summary"]:
        if row.get("runs", {}).get(NATIVE, "").startswith("no"):
            notes.append(f"{_name(row)}: not built for this processor, so slower than it could be: {_BUILD}")
        if row["state"] != "measured":
            notes.append(f"{_name(row)}: {row['state']}: {row['reason']}")
        notes += [f"{_name(row)}: {figure}: {why}" for figure, why in row["notes"].items()]
        if row["mode"] == CONTROL and abs(row.get("vs_outrider", {}).get("tok_s", 1.0) - 1.0) > _MOST_NOISE:
            notes.append(f"{_name(row)}: off 1 by more than {_MOST_NOISE:.0%}: the machine was not quiet, run it again")
    return notes


def print_comparison(result: dict[str, Any]) -> None:
    from rich.console import Console

    console, about = Console(), result["environment"]
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    rows = [row for row in result["summary"] if row.get("tok_s")]
    title = (
        f"{about['prompts']} prompts, {about['max_tokens']} tokens, greedy, {about['threads']} threads, "
        f"{about['processor']}; together: {about['at_once']}"
    )
    _print_table(console, f"speed: {title}", SPEED_HEADS, map(speed_cells, rows))
    _print_table(console, "quality, determinism, memory", REST_HEADS, map(rest_cells, rows))
    if beside := result["beside_peers"]:
        _print_table(console, "times the other engine's best mode", BESIDE_HEADS, map(beside_cells, beside))
    for line in [*list_figures(result), *list_beside(result)]:
        console.print(line, markup=False, highlight=False)
    for row in rows:
        its = ", ".join(f"{name} {value}" for name, value in row["runs"].items())
        console.print(f"{_name(row)}: {its}", markup=False, highlight=False)
    for note in list_notes(result):
        console.print(note, markup=False, highlight=False)


def _print_table(console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table

    from orchestrator.plain_table import add_row

    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head in _NAME_HEADS else "right")
    for row in rows:
        add_row(table, *row)
    console.print(table)


def _range(ratios: dict[str, Any], name: str) -> str:
    return " to ".join(format_figure(one, "{:.2f}") for one in ratios.get(name, [None]))


def _name(row: dict[str, Any]) -> str:
    return f"{row['engine']} {row['mode']}"
