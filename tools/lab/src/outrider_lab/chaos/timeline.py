"""Draws a run: a lane for each client with its tokens, faults as they struck, errors in red, and recovery times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_lab.chaos.records import FaultRecord, StreamRecord, list_activity
from outrider_lab.chaos.service import ChaosError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
_LEAST_BAR_S = 0.05
_LANE_HEIGHT = 0.7
_STREAM_COLOUR = "0.35"
_ERROR_COLOUR = "red"
_REDS = (6, 7)
"""Of matplotlib's tab20: red is for errors alone."""


def check_library() -> None:
    """Raise ChaosError where no plot could be drawn at the end."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ModuleNotFoundError as error:
        raise ChaosError(f"--plot needs {error.name}: pip install 'outrider-lab[plots]'") from None


def draw_timeline(path: Path, title: str, faults: Sequence[FaultRecord], streams: Sequence[StreamRecord]) -> None:
    """Write the picture."""
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    injected = [fault for fault in faults if fault.began_s is not None]
    kinds = sorted({fault.kind for fault in injected})
    palette = [colormaps["tab20"](number) for number in range(20) if number not in _REDS]
    colours = {kind: palette[number % len(palette)] for number, kind in enumerate(kinds)}
    lanes = max((stream.lane for stream in streams), default=0) + 1
    figure = Figure(figsize=(12.0, 4.0 + 0.22 * lanes), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [max(2.0, 0.25 * lanes), 1.6]})
    _draw_lanes(above, lanes, streams)
    for fault in injected:
        for axes in (above, below):
            _draw_fault(axes, fault, colours[fault.kind])
    _draw_recoveries(below, injected, colours)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=DPI)


def _draw_lanes(axes: Axes, lanes: int, streams: Sequence[StreamRecord]) -> None:
    for stream in streams:
        stretches = list_activity(stream.times_s)
        bars = [(start, max(end - start, _LEAST_BAR_S)) for start, end in stretches]
        low = stream.lane - _LANE_HEIGHT / 2
        axes.broken_barh(bars, (low, _LANE_HEIGHT), facecolor=_STREAM_COLOUR, linewidth=0)
    failed = [stream for stream in streams if stream.error]
    differing = [stream for stream in streams if stream.difference]
    for found, marker, label in ((failed, "x", "client error"), (differing, "D", "wrong, lost or doubled tokens")):
        if found:
            ends, rows = [one.ended_s for one in found], [one.lane for one in found]
            axes.scatter(ends, rows, marker=marker, color=_ERROR_COLOUR, s=30, zorder=3, label=label)
    axes.set(ylabel="client (bars: tokens come)", ylim=(-1, lanes), yticks=range(0, lanes, max(1, lanes // 10)))


def _draw_fault(axes: Axes, fault: FaultRecord, colour: Any) -> None:
    start = fault.began_s or 0.0
    axes.axvline(start, color=colour, linewidth=1.2)
    if fault.healed_s is not None and fault.healed_s > start:
        axes.axvspan(start, fault.healed_s, color=colour, alpha=0.15, linewidth=0)


def _draw_recoveries(axes: Axes, faults: Sequence[FaultRecord], colours: dict[str, Any]) -> None:
    for kind, colour in colours.items():
        mine = [fault for fault in faults if fault.kind == kind]
        known = [(fault.began_s or 0.0, fault.recovery_s) for fault in mine if fault.recovery_s is not None]
        axes.scatter(
            [at for at, _ in known], [after for _, after in known], color=[colour], s=36, label=kind, edgecolors="0.2"
        )
    axes.set(
        xlabel="time since the first request under faults, s",
        ylabel="until every running stream\nhad its next token, s",
        ylim=(0.0, None),
    )
    axes.grid(alpha=0.3)
