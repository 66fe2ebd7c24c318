"""Whether a worker hangs: by the rounds that it finishes, not by whether its process answers.

A worker with work says something at least every PULSE_S: what it has finished, or that it still is at it (a pulse).
No word at all means that the process is stopped, cut off, or held by native code. Pulses without a round are compared
with HUNG_AFTER times its predicted time. Where the process computes, its processor time is compared. So a machine that
is busy with something else makes rounds late, and is no hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from device_profiles.units import MS_PER_S

# ADR 0046: a quarter of FLOOR_S, so that a lost pulse is no silence.
PULSE_S: Final = 0.25
# ADR 0046. Not tuned apart: a hang is found after three predicted rounds and FLOOR_S.
HUNG_AFTER: Final = 3.0
COMPUTING_HUNG_AFTER: Final = 12.0
"""So many times, in processor time, where it computes: beside others the same work takes many times as long. ADR
0046: 4.4 times beside five busy processes, and over 6 times beside nine."""
FLOOR_S: Final = 1.0
"""Added to every bound: what a machine may lose to other things. ADR 0046. Not tuned: streams pause for it behind a
hang."""
_COMPUTES_FROM: Final = 0.05
"""Below this share of one core, whatever the worker waits for is not the processor. ADR 0046. Not tuned."""
_STARVED_AT_MOST: Final = 20.0
"""So many times its bound may a round take that has processor time, but less than it needs. ADR 0046. Not tuned."""
LOAD_SILENCE_S: Final = 300.0
"""While it loads, native code may hold the interpreter so long, and somebody may stop the process for a while. ADR
0046. Not tuned."""
LOAD_IDLE_S: Final = 120.0
"""A load may compute and move nothing for so long: it waits for a device. ADR 0107: not of its own processor time
alone, by which a conversion was ended five times."""
LOAD_STAGE_S: Final = 1800.0
"""A load may compute for so long, in processor time, without a further step. ADR 0107. The longest conversion seen took
270 s."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a worker says while it is at one step. `expected_ms`: the predicted time of the step, below 0 where there is
    no prediction (it loads). `quiet_ms`: since it last finished something; `cpu_ms`: the processor time that the whole
    process had since then, of `cores`. Where it loads, `cpu_ms` is with the processes that it started, and `idle_ms` is
    for how long none of them computed, read or wrote. Time in which the worker itself was stopped is not idle."""

    expected_ms: float
    quiet_ms: float
    cpu_ms: float
    cores: int
    idle_ms: float = 0.0


def bound_round_s(expected_ms: float) -> float:
    """Return after how long without a finished round a worker with work hangs, with the whole machine to itself."""
    return HUNG_AFTER * max(0.0, expected_ms) / MS_PER_S + FLOOR_S


def judge_silence(silent_s: float, *, expected_ms: float, loading: bool, patience_s: float = FLOOR_S) -> str:
    """Return why a worker that has said nothing for so long hangs; "" where it does not. `patience_s`: how late its
    words may come, from another host more than from this one."""
    bound_s = LOAD_SILENCE_S if loading else bound_round_s(expected_ms) + patience_s - FLOOR_S
    return f"it has said nothing for {silent_s:.1f} s, {bound_s:.1f} s are its bound" if silent_s > bound_s else ""


def judge_pulse(pulse: Pulse) -> str:
    """Return why a worker that says this hangs; "" where it does not."""
    quiet_s, cpu_s = pulse.quiet_ms / MS_PER_S, pulse.cpu_ms / MS_PER_S
    if pulse.expected_ms < 0.0:
        return _judge_load(min(quiet_s, cpu_s), pulse.idle_ms / MS_PER_S)
    computes = cpu_s >= _COMPUTES_FROM * quiet_s
    bound_s = bound_round_s(pulse.expected_ms)
    if computes and quiet_s <= _STARVED_AT_MOST * bound_s:
        computing_s = bound_round_s(pulse.expected_ms * COMPUTING_HUNG_AFTER / HUNG_AFTER)
        hangs = min(quiet_s, cpu_s / max(1, pulse.cores)) > computing_s
    else:
        hangs = quiet_s > bound_s
    if not hangs:
        return ""
    return f"a round takes {quiet_s:.1f} s, {max(0.0, pulse.expected_ms):.0f} ms were predicted"


def _judge_load(computing_s: float, idle_s: float) -> str:
    """A load is as long as its disk and its processor make it: only one that does nothing, or computes without end,
    hangs."""
    if idle_s > LOAD_IDLE_S:
        return f"its load computes, reads and writes nothing for {idle_s:.0f} s"
    return f"a step of its load computes for {computing_s:.0f} s" if computing_s > LOAD_STAGE_S else ""
