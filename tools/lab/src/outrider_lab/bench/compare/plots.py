"""PNG plots of a comparison: speeds, the same by category, and speed against quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider_lab.bench.compare.figures import CONTROL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120
_OURS, _THEIRS = "tab:blue", "tab:orange"


def draw_comparison(directory: Path, rows: Sequence[dict[str, Any]]) -> list[tuple[str, Path]]:
    """Write all plots that there is something for; return title and file of each. `directory` exists."""
    drawn = [("tokens/s, one request at a time", _draw_bars(directory / "alone.png", rows, "tok_s"))]
    together = [row for row in rows if row["at_once_tok_s"]]
    if together:
        drawn.append(("tokens/s, several at a time", _draw_bars(directory / "together.png", together, "at_once_tok_s")))
    drawn.append(("tokens/s by category / Outrider plain", _draw_categories(directory / "categories.png", rows)))
    scored = [row for row in rows if row["perplexity_ratio"] and row["mode"] != CONTROL]
    if scored:
        drawn.append(("speed against quality", _draw_quality(directory / "quality.png", scored)))
    return drawn


def _draw_bars(path: Path, rows: Sequence[dict[str, Any]], figure_name: str) -> Path:
    figure, axes = _figure(1.2 + 0.35 * len(rows))
    bars = axes.barh(
        [_name(row) for row in rows],
        [row[figure_name] for row in rows],
        color=[_OURS if row["engine"] == "outrider" else _THEIRS for row in rows],
    )
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.invert_yaxis()
    axes.set(xlabel="output tokens/s, prompts included")
    return _save(figure, axes, path)


def _draw_categories(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    names = sorted({name for row in rows for name in row["categories"]})
    figure, axes = _figure(4.0)
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        heights = [row["categories"].get(name, {}).get("tok_s_vs_outrider", 0.0) for name in names]
        axes.bar(np.arange(len(names)) + number * width, heights, width, label=_name(row))
    axes.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, rotation=20)
    axes.axhline(1.0, linewidth=0.8, color="gray")
    axes.set(ylabel="tokens/s / Outrider plain's")
    axes.legend(fontsize="x-small", ncols=3)
    return _save(figure, axes, path)


def _draw_quality(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    figure, axes = _figure(4.0)
    for place, row in enumerate(sorted(rows, key=lambda one: float(one["tok_s"]))):
        at = row["perplexity_ratio"], row["tok_s"]
        axes.scatter(*at, color=_OURS if row["engine"] == "outrider" else _THEIRS)
        shift, side = ((6, -3), "left") if place % 2 else ((-6, -3), "right")
        axes.annotate(_name(row), at, xytext=shift, ha=side, textcoords="offset points", fontsize=8)
    axes.margins(x=0.3)
    axes.set(
        xlabel="perplexity / float32's (1: nothing lost)", ylabel="output tokens/s, one at a time", ylim=(0.0, None)
    )
    return _save(figure, axes, path)


def _figure(height: float) -> tuple[Figure, Axes]:
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=_DPI)
    return path


def _name(row: dict[str, Any]) -> str:
    return f"{row['engine']} {row['mode']}"
