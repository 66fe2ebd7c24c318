"""What fixed shapes cost: forwards of the same rows on the paged model and in static graphs, taken in turn.

    python -m outrider_lab.measure.static [--contexts 1024,2048] [--held 120,900] [--rows 1,2,4,8] [--repeats N] [--config FILE]

Both load the model that cluster.yaml names, with `exactness: bit`. A forward continues one sequence that holds so many
positions, and all its rows are wanted; the last table is a whole prompt with one row wanted. Memory is what the process
grew by.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from adapters.contract import LoadedModel, Segment, StaticShapes
from orchestrator.config.load import load_config
from orchestrator.loading.models import load_model, silent
from orchestrator.loading.options import engine_options

PROMPT_TOKENS = 512
MIB = 1 << 20


def load_timed(arguments: argparse.Namespace, static: StaticShapes) -> tuple[LoadedModel, str]:
    """Return the model, and what loading it took."""
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    chosen = options.with_model(static=static, kv_cache_bytes=256 * MIB).model
    load_model(chosen, 1, silent).model.close()  # prepares it, and warms the file cache
    gc.collect()
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    model = load_model(chosen, 2, silent).model
    grown = (psutil.Process().memory_info().rss - before) / MIB
    return model, f"{time.perf_counter() - started:.1f} s, {grown:.0f} MiB"


def tokens(count: int) -> list[int]:
    """Return a text of common tokens."""
    return [(7 * i * i + 11 * i + 3) % 4000 + 100 for i in range(count)]


def step_ms(model: LoadedModel, held: int, rows: int) -> float:
    """Return the time of one forward of `rows` rows behind `held` positions; the slot holds them already."""
    segment = Segment(0, held, tokens(held + rows)[held:], (0, rows))
    started = time.perf_counter()
    model.forward([segment])
    return (time.perf_counter() - started) * 1000.0


def prompt_ms(model: LoadedModel) -> float:
    """Return the time of a whole prompt, of which the last row is wanted."""
    text = tokens(PROMPT_TOKENS)
    started = time.perf_counter()
    model.forward([Segment(1, 0, text, (len(text) - 1, len(text)))])
    taken = (time.perf_counter() - started) * 1000.0
    model.release(1)
    return taken


def report(models: dict[str, LoadedModel], held: Sequence[int], rows: Sequence[int], repeats: int) -> Table:
    """Measure every model in turn, and return the medians."""
    table = Table("model", *(f"{count} rows at {at}" for at in held for count in rows), f"prompt of {PROMPT_TOKENS}")
    times: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for at in held:
        for model in models.values():
            model.release(0)
            model.forward([Segment(0, 0, tokens(at), (0, 0))])
        for count in rows:
            for _ in range(repeats):
                for name, model in models.items():
                    times[name].setdefault(f"{count} {at}", []).append(step_ms(model, at, count))
    for _ in range(max(3, repeats // 4)):
        for name, model in models.items():
            times[name].setdefault("prompt", []).append(prompt_ms(model))
    for name, found in times.items():
        table.add_row(name, *(f"{statistics.median(values):.1f}" for values in found.values()))
    return table


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--contexts", default="1024,2048")
    parser.add_argument("--held", default="120,900")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    console = Console(width=200)
    held, rows = ([int(part) for part in text.split(",")] for text in (arguments.held, arguments.rows))
    models: dict[str, LoadedModel] = {}
    for name, static in [
        ("paged", StaticShapes()),
        *(
            (f"static, {text}", StaticShapes(on=True, context_tokens=int(text)))
            for text in arguments.contexts.split(",")
        ),
    ]:
        models[name], took = load_timed(arguments, static)
        console.print(f"{name}: loaded in {took}; widths {models[name].capabilities.static_widths}")
    console.print(report(models, held, rows, arguments.repeats))
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
