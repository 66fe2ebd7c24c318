"""PNG plots of a measurement. matplotlib is an extra: without it, the error is the command that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.traffic.figures import TrafficRun, latencies_ms, output_over_time, running_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "ttft_ms": "time to first token (TTFT), ms",
    "tpot_ms": "time per output token of a request (TPOT), ms",
    "itl_ms": "gap between events with text (ITL), ms",
    "e2e_ms": "latency of a request, ms",
}
BINS = 60
DPI = 120


def open_directory(directory: Path) -> None:
    """Make the directory that `--plots` names. Raises BenchError where that, or any plot, would fail."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ModuleNotFoundError as error:
        raise BenchError(f"--plots needs {error.name}: pip install 'outrider-lab[plots]'") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--plots {directory}: cannot be made: {error.strerror}") from error


def draw_traffic_plots(directory: Path, runs: Sequence[tuple[str, TrafficRun]]) -> list[Path]:
    """Write a distribution for each measured latency, and the load over time; returns the files."""
    written = []
    title, runs = _split_labels(runs)
    for name, axis in TITLES.items():
        samples = [(label, latencies_ms(run.outcomes)[name]) for label, run in runs]
        if any(values for _, values in samples):
            figure, (axes,) = _figure(1, title)
            for label, values in samples:
                _cumulative(axes, label, values)
            axes.set(xlabel=axis, ylabel="share that is no slower", xlim=(0.0, None), ylim=(0.0, 1.0))
            written.append(_save(figure, [axes], directory / f"{name.removesuffix('_ms')}.png"))
    written.append(_draw_load(directory / "load.png", title, runs))
    return written


def _split_labels(runs: Sequence[tuple[str, TrafficRun]]) -> tuple[str, list[tuple[str, TrafficRun]]]:
    """Return the first words that all labels share, as a title, and the runs under the words that tell them apart."""
    words = [label.split(" ") for label, _ in runs]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))
    legend = [" ".join(one[shared:]) or "as configured" for one in words]
    title = " ".join(words[0][:shared]).removesuffix(" at")
    return title, [(label, run) for label, (_, run) in zip(legend, runs, strict=True)]


def _draw_load(path: Path, title: str, runs: Sequence[tuple[str, TrafficRun]]) -> Path:
    figure, (above, below) = _figure(2, title)
    for label, run in runs:
        times_s, running = running_over_time(run.outcomes)
        below.step([0.0, *times_s], [0, *running], where="post", label=label, linewidth=1.0)
        if run.wall_s and any(outcome.generated for outcome in run.outcomes):
            above.plot(*output_over_time(run.outcomes, BINS, run.wall_s), label=label, linewidth=1.0)
    above.set(ylabel="output tokens/s\n(a request's spread over its events)", ylim=(0.0, None))
    below.set(ylabel="running requests", xlabel="time since the start, s", ylim=(0.0, None))
    return _save(figure, [above, below], path)


def _figure(rows: int, title: str) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.0 + 2.0 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, list(np.atleast_1d(figure.subplots(rows, 1, sharex=True)))


def _cumulative(axes: Axes, label: str, values: list[float]) -> None:
    if values:
        axes.ecdf(values, label=f"{label} (median {np.median(values):.1f} ms)")


def _save(figure: Figure, axes: list[Axes], path: Path) -> Path:
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return path
