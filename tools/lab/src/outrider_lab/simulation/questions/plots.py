"""PNG plots of answers. matplotlib is an extra: without it, the error is the command that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider_lab.simulation.questions.answer import Plot
from outrider_lab.simulation.run import SimulationError

_DPI = 80


def open_directory(directory: Path) -> None:
    """Make the directory. Raises SimulationError where that, or any plot, would fail."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ModuleNotFoundError as error:
        raise SimulationError(f"--plots needs {error.name}: pip install 'outrider-lab[plots]'") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(f"--plots {directory}: cannot be made: {error.strerror}") from error


def draw_plots(directory: Path, plots: Sequence[Plot]) -> list[Path]:
    """Write one file for each plot; return them."""
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib.figure import Figure

    written = []
    for plot in plots:
        figure = Figure(figsize=(7.0, 4.0), layout="constrained")
        axes = figure.subplots()
        for label, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label, ylim=(0.0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        path = directory / f"{plot.name}.png"
        figure.savefig(path, dpi=_DPI)
        written.append(path)
    return written
