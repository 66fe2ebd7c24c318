"""PNG plots of a measurement. matplotlib is an extra: without it, the error is the command that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.bench.prompts import BenchError
from orchestrator.bench.traffic.figures import Run, latencies_ms, output_over_time, running_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "ttft_ms": "TTFT (first text - start), ms",
    "tpot_ms": "TPOT ((latency - TTFT) / (n - 1)), ms",
    "itl_ms": "ITL (gap between events with text), ms",
    "e2e_ms": "latency, ms",
}
BINS = 60
DPI = 120


def open_directory(directory: Path) -> None:
    """Make the directory. Raises BenchError where that, or any plot, would fail."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ModuleNotFoundError as error:
        raise BenchError(f"--plots needs {error.name}: pip install 'outrider[bench]'") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--plots {directory}: cannot be made: {error.strerror}") from error


def draw(directory: Path, runs: Sequence[tuple[str, Run]]) -> list[Path]:
    """Write a distribution for each latency that was measured, and the course of the load; returns the files."""
    written = []
    for name, title in TITLES.items():
        samples = [(label, latencies_ms(run.outcomes)[name]) for label, run in runs]
        if any(values for _, values in samples):
            figure, (axes,) = _figure(1)
            for label, values in samples:
                _cumulative(axes, label, values)
            axes.set(xlabel=title, ylabel="share of samples at most this", ylim=(0.0, 1.0))
            written.append(_save(figure, [axes], directory / f"{name.removesuffix('_ms')}.png"))
    written.append(_course(directory / "load.png", runs))
    return written


def _course(path: Path, runs: Sequence[tuple[str, Run]]) -> Path:
    figure, (above, below) = _figure(2)
    for label, run in runs:
        times_s, running = running_over_time(run.outcomes)
        below.step([0.0, *times_s], [0, *running], where="post", label=label, linewidth=1.0)
        if run.wall_s and any(outcome.generated for outcome in run.outcomes):
            above.plot(*output_over_time(run.outcomes, BINS, run.wall_s), label=label, linewidth=1.0)
    above.set(ylabel="output tokens/s\n(a request's spread over its events)", ylim=(0.0, None))
    below.set(ylabel="running requests", xlabel="s", ylim=(0.0, None))
    return _save(figure, [above, below], path)


def _figure(rows: int) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.0 + 2.0 * rows), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(rows, 1, sharex=True)))


def _cumulative(axes: Axes, label: str, values: list[float]) -> None:
    if values:
        axes.ecdf(values, label=f"{label} (median {np.median(values):.1f})")


def _save(figure: Figure, axes: list[Axes], path: Path) -> Path:
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return path
