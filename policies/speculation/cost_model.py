"""What a forward costs, as measured, and corrected by what rounds really take.

A fit made once (device_profiles.cost.StepCost) is off when the machine is busy, warm or another one. So three
corrections of log time are learned from every round. One is for all of them, one by number of rows (linear in log2 of
the rows between knots), and one for just this number of rows. The last is there because kernels take a step where a row
more needs another pass. The latter two fade where they are not confirmed. A residual counts no more than CLIP, so that
a round in which something else ran teaches little. A first one is believed, so that a fit of the right shape is enough.
Where nearly all of the latest ones reach CLIP on the same side, the machine has turned (other programs came, or went),
and their mean is believed at once.

A draft model that ran on the target's processors slows the forward behind it: its threads still spin, and its weights
lie in the caches. That slowdown is learned apart, so that a plain round is still known while every round is drafted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, log2
from typing import NamedTuple

import numpy as np

from device_profiles.cost import US_PER_MS, StepCost
from policies.running_mean import update_mean

KNOTS = 10
"""Corrections are held at 1, 2, 4, ... 512 rows. ADR 0028. Without them 0.0 % in the mean, 1.3 % at most (ADR 0043)."""
_SINGLE = 64
"""Forwards of fewer rows each have a correction of their own. ADR 0037: between 2 and 3 rows kernels take a step. Worth
0.1 % in the mean, 1.3 % at most (ADR 0043)."""
# ADR 0036: one slow round is to teach little. Forwards vary by 17 to 21 % (ADR 0033), so a usual one is not clipped.
CLIP = 0.25
KNOWN_ROUNDS = 4
"""After so many rounds without drafts decisions may rest on what one takes. ADR 0016, 0045. Not tuned."""
# The same, where all have some. ADR 0045. Not tuned.
_KNOWN_DRAFTED_ROUNDS = 32
# Drafting that takes more than this share of a forward is a model's. ADR 0045.
_SLOWED = 0.05
REBUILD_EVERY = 16
"""The table is built again after so many rounds; the correction for all rounds counts at once. Not tuned: the policy is
to take 50 us a round (ADR 0039)."""
# Of the newest round, for all rounds together. ADR 0028. Not tuned: some 40 rounds; where a machine turns, `_TURNED` is
# faster.
_LEAST_WEIGHT = 0.05
# The same of the two knots beside its rows. Not tuned: slower than the correction for all rounds.
_KNOT_WEIGHT = 0.02
# Of the first round of just so many rows. ADR 0037.
_ROW_WEIGHT = 0.06
# After so many it is half of that: a number of rows that is often seen must not stand for all. ADR 0037.
_ROW_ROUNDS = 4.0
# ADR 0037: hardly at all after its first rounds, or other numbers seem cheap when the machine slows down.
_LEAST_ROW_WEIGHT = 0.003
# Of the newest residual in the means of the latest ones. ADR 0036: with it a machine that turned is believed after six
# rounds, and was after a hundred.
_LATEST_WEIGHT = 0.25
# Of CLIP: that far is the mean of the latest clipped residuals off where the machine has turned. ADR 0036, as above.
_TURNED = 0.8
# Of a correction, a round. ADR 0028. Not tuned: half is left after 350 rounds, some seconds.
_FADING = 0.002
TYPICAL = StepCost((1.0, 8.0, 16.0, 64.0, 128.0), (1.0, 1.5, 2.2, 6.0, 11.5))
"""The shape of a small model's step cost on a processor, for where nothing was measured yet; its unit is arbitrary."""


class CostModel(NamedTuple):
    """`table_ms[r]`: a forward of r rows of one sequence with nothing before them, before the correction for all
    rounds, `scale`. Never falling in r. `row_ms[r]`: what one more row adds to it, `least_ms[r]`: the least that any
    row beyond r adds. `log_of_row[r]`: the correction for r rows, learned in `seen_of_row[r]` rounds, of which
    `built_of_row[r]` is in the table. `seen` rounds were taken in, the last `stale` of them after the table was
    built. `uneven`: what a row adds does not follow from the rows alone (StepCost.serial, or rows that are padded).
    `clipped`, `latest`: means of the latest residuals, clipped and as they were. `log_slowdown`: of forwards behind a
    draft model. `plain` of the rounds had no drafts. Arrays are not changed in place: they
    are there since copies of tuples take much longer where a forward left little in the processor's caches."""

    fit: StepCost
    table_ms: tuple[float, ...]
    row_ms: tuple[float, ...]
    least_ms: tuple[float, ...]
    uneven: bool = False
    log_of_knot: array[float] = array("d", (0.0,) * KNOTS)
    log_of_row: array[float] = array("d", (0.0,) * (_SINGLE + 1))
    built_of_row: array[float] = array("d", (0.0,) * (_SINGLE + 1))
    seen_of_row: array[int] = array("l", (0,) * _SINGLE)
    log_scale: float = 0.0
    scale: float = 1.0
    seen: int = 0
    stale: int = 0
    clipped: float = 0.0
    latest: float = 0.0
    log_slowdown: float = 0.0
    plain: int = 0

    @property
    def known(self) -> bool:
        """Whether rounds have confirmed what one without drafts takes."""
        return self.plain >= KNOWN_ROUNDS or self.seen >= _KNOWN_DRAFTED_ROUNDS

    @property
    def slowdown(self) -> float:
        """How many times as long a forward takes behind a draft model."""
        return exp(self.log_slowdown)

    def ms(self, rows: float, sequences: int = 1, context_tokens: float = 0.0) -> float:
        """Return the time of a forward; see StepCost.ms."""
        fit = self.fit
        if self.uneven:
            return self._uneven_ms(rows, sequences, context_tokens)
        attention_us = (fit.position_us * sequences + fit.row_position_us * rows) * context_tokens
        return self.scale * (self._rows_ms(rows) + fit.sequence_ms * (sequences - 1) + attention_us / US_PER_MS)

    def _uneven_ms(self, rows: float, sequences: int, context_tokens: float) -> float:
        fit = self.fit
        rows = fit.count_run_rows(rows, sequences)
        calls = sequences if fit.serial else 1
        attention_us = (fit.position_us * sequences + fit.row_position_us * rows) * context_tokens
        rows_ms = calls * self._rows_ms(rows / calls)
        return self.scale * (rows_ms + fit.sequence_ms * (sequences - 1) + attention_us / US_PER_MS)

    def estimate_added_ms(self, rows: int, count: int, sequences: int = 1, context_tokens: float = 0.0) -> list[float]:
        """Return what each of `count` rows adds to a forward of `rows` rows, of so many sequences."""
        if self.uneven:
            times = [self._uneven_ms(rows + more, sequences, context_tokens) for more in range(count + 1)]
            return [after - before for before, after in pairwise(times)]
        scale = self.scale
        attention_ms = self.fit.row_position_us * context_tokens / US_PER_MS
        times_ms = [scale * (ms + attention_ms) for ms in self.row_ms[rows : rows + count]]
        if len(times_ms) < count:
            times_ms += [scale * (self.row_ms[-1] + attention_ms)] * (count - len(times_ms))
        return times_ms

    def least_added_ms(self, rows: int) -> float:
        """Return the least that any row adds to a forward of `rows` rows or more; 0 where that is not known."""
        return 0.0 if self.uneven else self.scale * self.least_ms[min(rows, len(self.least_ms) - 1)]

    def _rows_ms(self, rows: float) -> float:
        whole = min(int(rows), len(self.table_ms) - 1)
        return self.table_ms[whole] + (rows - whole) * self.row_ms[whole]


def is_slowed(draft_ms: float, forward_ms: float) -> bool:
    return draft_ms > _SLOWED * forward_ms


def start_cost_model(fit: StepCost, *, most_rows: int = 256) -> CostModel:
    """Return what is known before any round: the fit. `most_rows`: how far the table goes (2 or more)."""
    table = _tables(fit, (0.0,) * KNOTS, (0.0,) * (_SINGLE + 1), most_rows)
    uneven = fit.serial or fit.least_rows > 1 or fit.least_forward_rows > 1
    return CostModel(fit, *table, uneven)


def observe_forward(
    cost: CostModel,
    ms: float,
    *,
    rows: int,
    sequences: int,
    context_tokens: float,
    expected_ms: float = 0.0,
    slowed: bool = False,
    plain: bool = False,
) -> CostModel:
    """Take in that a forward took `ms` (> 0). `expected_ms`: what `cost.ms` says of it, where that is known already.
    `slowed`: it ran behind a draft model; `plain`: it had no drafts."""
    each = rows / sequences if cost.fit.serial else rows
    single = min(int(each), _SINGLE)
    pending = cost.log_of_row[single] - cost.built_of_row[single]
    residual = log(ms / (expected_ms or cost.ms(rows, sequences, context_tokens))) - pending
    residual -= cost.log_slowdown * slowed
    if cost.seen == 0:
        return cost._replace(log_scale=residual, scale=exp(residual), seen=1, plain=int(plain))
    latest = update_mean(cost.latest, residual, _LATEST_WEIGHT)
    residual = min(max(residual, -CLIP), CLIP)
    clipped = update_mean(cost.clipped, residual, _LATEST_WEIGHT)
    if abs(clipped) > _TURNED * CLIP:
        built = _rebuild_tables(cost)  # what was learned meanwhile is in it
        turn = latest * CLIP / abs(clipped)  # both means began at 0
        known = log(built.ms(rows, sequences, context_tokens) / cost.ms(rows, sequences, context_tokens))
        log_scale, log_slowdown = _correct_all(cost, turn - known + pending, slowed=slowed)
        turned = built._replace(log_scale=log_scale, scale=exp(log_scale), log_slowdown=log_slowdown)
        return turned._replace(seen=cost.seen + 1, clipped=0.0, latest=0.0, plain=cost.plain + plain)
    weight = max(1.0 / (cost.seen + 1), _LEAST_WEIGHT)
    log_scale, log_slowdown = _correct_all(cost, weight * residual, slowed=slowed)
    place = min(log2(max(each, 1)), KNOTS - 1.0)
    low = min(int(place), KNOTS - 2)
    log_of_knot, log_of_row, seen_of_row = cost.log_of_knot[:], cost.log_of_row, cost.seen_of_row
    log_of_knot[low] += _KNOT_WEIGHT * (low + 1 - place) * residual
    log_of_knot[low + 1] += _KNOT_WEIGHT * (place - low) * residual
    if single < _SINGLE:
        log_of_row, seen_of_row = log_of_row[:], seen_of_row[:]
        weight = max(_LEAST_ROW_WEIGHT, _ROW_WEIGHT / (1.0 + seen_of_row[single] / _ROW_ROUNDS))
        log_of_row[single] += weight * residual
        seen_of_row[single] += 1
    fixed = (cost.fit, cost.table_ms, cost.row_ms, cost.least_ms, cost.uneven)
    by_rows = (log_of_knot, log_of_row, cost.built_of_row, seen_of_row)
    seen, stale = cost.seen + 1, cost.stale + 1
    means = (clipped, latest, log_slowdown, cost.plain + plain)
    learned = CostModel(*fixed, *by_rows, log_scale, exp(log_scale), seen, stale, *means)
    return _rebuild_tables(learned) if learned.stale >= REBUILD_EVERY else learned


def _correct_all(cost: CostModel, change: float, *, slowed: bool) -> tuple[float, float]:
    """Return `log_scale` and `log_slowdown` after a change for all numbers of rows. A forward behind a draft model
    tells of plain ones only where it took less than they are thought to."""
    if not slowed:
        return cost.log_scale + change, cost.log_slowdown
    log_slowdown = cost.log_slowdown + change
    return cost.log_scale + min(0.0, log_slowdown), max(0.0, log_slowdown)


def _rebuild_tables(cost: CostModel) -> CostModel:
    kept = (1.0 - _FADING) ** cost.stale
    knots, logs = (array("d", [kept * value for value in values]) for values in (cost.log_of_knot, cost.log_of_row))
    table_ms, row_ms, least_ms = _tables(cost.fit, knots, logs, len(cost.table_ms) - 1)
    return cost._replace(
        table_ms=table_ms,
        row_ms=row_ms,
        least_ms=least_ms,
        log_of_knot=knots,
        log_of_row=logs,
        built_of_row=logs,
        stale=0,
    )


def _tables(
    fit: StepCost, log_of_knot: Sequence[float], log_of_row: Sequence[float], most_rows: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return `table_ms`, `row_ms` and `least_ms`. The last row adds as much as the second half on the average."""
    rows = np.arange(most_rows + 1, dtype=np.float64)
    rows[0] = 1.0
    times = np.interp(rows, fit.row_knots, fit.row_ms)
    if len(fit.row_knots) > 1:
        slope = (fit.row_ms[-1] - fit.row_ms[-2]) / (fit.row_knots[-1] - fit.row_knots[-2])
        times += np.maximum(rows - fit.row_knots[-1], 0.0) * slope
    times *= np.exp(np.interp(np.log2(rows), np.arange(KNOTS), log_of_knot))
    times[:_SINGLE] *= np.exp(log_of_row[: min(_SINGLE, most_rows + 1)])
    times = np.maximum.accumulate(times)
    half = most_rows // 2
    added = np.append(np.diff(times), (times[-1] - times[half]) / (most_rows - half))
    least = np.minimum.accumulate(added[::-1])[::-1]
    return tuple(times.tolist()), tuple(added.tolist()), tuple(least.tolist())
