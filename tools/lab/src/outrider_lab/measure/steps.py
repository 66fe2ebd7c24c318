"""What a decode step takes on several runtimes: forwards of few rows of one sequence, taken in turn in one process.

    python -m outrider_lab.measure.steps [--models openvino_rt,onnx_rt,torch_device,torch_device@int8] [--rows 1,2,5]
                                [--contexts 64,512] [--seconds S] [--config FILE]

Loads the model that cluster.yaml names, `exactness: bit`, in each way: ADAPTER[:ACTIVATIONS][@WEIGHTS]. A forward
continues a sequence that holds so many positions, all its rows are wanted. They use the single-row kernel where
those of the decode loop do. Medians; behind them the lower quartile, which disturbances hardly move.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from adapters.contract import LoadedModel, Segment
from device_profiles.units import MIB, MS_PER_S
from orchestrator.config.load import load_config
from orchestrator.loading.models import load_model, silent
from orchestrator.loading.options import ModelOptions, engine_options

MODELS = "openvino_rt,onnx_rt,torch_device,torch_device@int8"
CHUNK = 256


def tokens(model: LoadedModel, start: int, count: int) -> list[int]:
    """Return a part of a text that has no meaning."""
    return [(7 * i * i + 11 * i + 3) % model.spec.vocabulary_size for i in range(start, start + count)]


def parse_model_options(options: ModelOptions, name: str) -> ModelOptions:
    """Return the options of a model named ADAPTER[:ACTIVATIONS][@WEIGHTS]."""
    rest, _, weights = name.partition("@")
    adapter, _, activations = rest.partition(":")
    return msgspec.structs.replace(
        options,
        adapter=adapter,
        activations=activations or options.activations,
        weights=weights or "as_file",
        exactness="bit",
        kv_cache_bytes=128 * MIB,
    )


def fill(model: LoadedModel, slot: int, context: int) -> None:
    """Let a slot hold so many positions, as a prompt."""
    for start in range(0, context, CHUNK):
        model.forward([Segment(slot, start, tokens(model, start, min(CHUNK, context - start)), (0, 0))])


def step_ms(model: LoadedModel, slot: int, context: int, rows: int) -> float:
    """Return the time of one forward of `rows` rows behind `context` positions; the slot holds them already."""
    apart = context <= model.capabilities.apart_tokens
    segment = Segment(slot, context, tokens(model, context, rows), (0, rows), apart)
    started = time.perf_counter()
    model.forward([segment])
    return (time.perf_counter() - started) * MS_PER_S


def measure(
    models: dict[str, LoadedModel], contexts: list[int], widths: list[int], seconds: float
) -> dict[tuple[str, int, int], list[float]]:
    """Visit every model, context and number of rows in turn for so long; the first round is not counted."""
    for model in models.values():
        for slot, context in enumerate(contexts):
            fill(model, slot, context)
    times: dict[tuple[str, int, int], list[float]] = {
        (name, slot, rows): [] for slot in range(len(contexts)) for rows in widths for name in models
    }
    ends, counts = 0.0, False
    while not counts or time.perf_counter() < ends:
        for (name, slot, rows), found in times.items():
            step_ms(models[name], slot, contexts[slot], rows)  # finds nothing of its own in the caches
            took = step_ms(models[name], slot, contexts[slot], rows)
            if counts:
                found.append(took)
        if not counts:
            counts, ends = True, time.perf_counter() + seconds
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--rows", default="1,2,5")
    parser.add_argument("--contexts", default="64,512")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    arguments = parser.parse_args()
    widths = [int(rows) for rows in arguments.rows.split(",")]
    contexts = [int(context) for context in arguments.contexts.split(",")]
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent).model
    names = list(dict.fromkeys(arguments.models.split(",")))
    models = {name: load_model(parse_model_options(options, name), len(contexts), silent).model for name in names}
    times = measure(models, contexts, widths, arguments.seconds)
    heads = [f"{rows} at {context}" for context in contexts for rows in widths]
    table = Table("model", "weights", "activations", *heads)
    for name, model in models.items():
        caps = model.capabilities
        cells = [format_times(times[name, slot, rows]) for slot in range(len(contexts)) for rows in widths]
        table.add_row(name, caps.weights, caps.activations, *cells)
    Console(width=200).print(table)
    print(f"rows at context, ms: median (lower quartile) of {min(map(len, times.values()))} visits or more")
    for model in reversed(models.values()):  # OpenVINO wants its models closed in the reverse order
        model.close()


def format_times(times: list[float]) -> str:
    """Return the median, and the lower quartile."""
    return f"{statistics.median(times):.1f} ({sorted(times)[(len(times) - 1) // 4]:.1f})"


if __name__ == "__main__":
    main()
