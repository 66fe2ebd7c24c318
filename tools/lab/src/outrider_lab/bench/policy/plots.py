"""PNG plots of `outrider bench policy`: depth, acceptance and tokens/s over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider_lab.bench.policy.arms import ADAPTIVE, CLIMBER, PLAIN, TABLE
from outrider_lab.bench.policy.figures import Mixes
from outrider_lab.bench.policy.recovery import HIGH, LOW, Recovery
from outrider_lab.bench.policy.replays import HINDSIGHT, STEPS
from outrider_lab.bench.policy.session import ComparisonResult
from outrider_lab.replay.run import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
_BINS = 80
_DPI = 120
_SHOWN = (PLAIN, TABLE, CLIMBER, HINDSIGHT, ADAPTIVE)


@dataclass(frozen=True, slots=True)
class Line:
    """One run, round by round; times in seconds."""

    label: str
    end_s: Sequence[float]
    seconds: Sequence[float]
    sequences: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    tokens: Sequence[int]


def draw_policy_plots(directory: Path, mixes: Mixes, found: ComparisonResult | None, recovered: Recovery) -> list[Path]:
    """Write all plots that there is something for; return the files. `directory` exists."""
    written = []
    for load, kind in _select_mixes(mixes):
        lines = [_build_line(name, mixes[load, kind]) for name in _SHOWN]
        name = "load-steps" if load == STEPS else f"{load}-at-once"
        title = f"replayed, {kind} drafts, " + ("load in steps" if load == STEPS else f"{load} request at once")
        written.append(_course(directory / f"replayed-{name}-{kind}.png", title, lines))
    real = _real(found) if found is not None else []
    if real:
        written.append(_course(directory / "real-load-steps-good.png", "real loop, good drafts, load in steps", real))
    return [*written, _recovery(directory / "recovery.png", recovered)]


def _select_mixes(mixes: Mixes) -> list[tuple[int | str, str]]:
    """The load that steps, and one request after another where drafts turn."""
    return [(load, kind) for load, kind in mixes if load == STEPS or (load == 1 and kind == "alternating")]


def _build_line(name: str, found: Mapping[str, Replay]) -> Line:
    steps = found[name].steps
    return Line(
        name,
        [(step.begin_ms + step.round_ms) / 1000.0 for step in steps],
        [step.round_ms / 1000.0 for step in steps],
        [step.sequences for step in steps],
        [step.drafted for step in steps],
        [step.accepted for step in steps],
        [step.tokens for step in steps],
    )


def _real(found: ComparisonResult) -> list[Line]:
    pairs = {arm.policy: pairs[0] for (cell, arm), pairs in found.pairs.items() if cell.steps}
    runs = {policy: pair.own for policy, pair in pairs.items()}
    if pairs:
        runs[PLAIN] = pairs[ADAPTIVE].plain
    return [
        Line(
            policy,
            [one.end_s for one in visit.rounds],
            [one.ms / 1000.0 for one in visit.rounds],
            [one.sequences for one in visit.rounds],
            [one.drafted for one in visit.rounds],
            [one.accepted for one in visit.rounds],
            [one.tokens for one in visit.rounds],
        )
        for policy, visit in runs.items()
    ]


def _course(path: Path, title: str, lines: Sequence[Line]) -> Path:
    figure, axes = _figure(4, title)
    end_s = max(max(line.end_s, default=0.0) for line in lines)
    edges = np.linspace(0.0, end_s, _BINS + 1)
    for line in lines:
        width = 1.6 if line.label == ADAPTIVE else 0.9
        sums = {
            name: np.histogram(line.end_s, edges, weights=np.asarray(values, float))[0]
            for name, values in (
                ("depth", line.drafted),
                ("accepted", line.accepted),
                ("tokens", line.tokens),
                ("sequences", line.sequences),
                ("seconds", line.seconds),
                ("rounds", np.ones(len(line.end_s))),
            )
        }
        middle = (edges[1:] + edges[:-1]) / 2
        axes[0].plot(middle, _ratio(sums["depth"], sums["sequences"]), linewidth=width, label=line.label)
        axes[1].plot(middle, _ratio(sums["accepted"], sums["depth"]), linewidth=width, label=line.label)
        axes[2].plot(middle, _ratio(sums["tokens"], sums["seconds"]), linewidth=width, label=line.label)
        axes[3].plot(middle, _ratio(sums["sequences"], sums["rounds"]), linewidth=width, label=line.label)
    for one, name in zip(
        axes, ("depth,\ndraft tokens", "acceptance rate", "output tokens/s", "requests at once"), strict=True
    ):
        one.set(ylabel=name, ylim=(0.0, None))
    axes[-1].set(xlabel="time since the start, s")
    return _save(figure, axes, path)


def _recovery(path: Path, found: Recovery) -> Path:
    figure, (axes,) = _figure(1, f"acceptance steps from {LOW} to {HIGH}, replayed on this machine's costs")
    axes.step(range(len(found.depths)), found.depths, where="post", label="depth")
    axes.axhline(found.best, linestyle="--", linewidth=0.9, color="gray", label=f"best at {HIGH}")
    axes.axvspan(found.turned, found.turned + 10, alpha=0.15, label="10 rounds")
    axes.set(xlabel="round", ylabel="depth, draft tokens", ylim=(0.0, None))
    return _save(figure, [axes], path)


def _ratio(upper: Floats, lower: Floats) -> Floats:
    found: Floats = np.full(len(upper), np.nan)
    np.divide(upper, lower, out=found, where=lower > 0.0)
    return found


def _figure(rows: int, title: str) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.4 + 1.8 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, list(np.atleast_1d(figure.subplots(rows, 1, sharex=True)))


def _save(figure: Figure, axes: Sequence[Axes], path: Path) -> Path:
    for one in axes:
        one.grid(alpha=0.3)
    axes[0].legend(fontsize="small", ncols=3)
    figure.savefig(path, dpi=_DPI)
    return path
