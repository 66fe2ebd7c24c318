"""Whether speculation is on, for an engine, a session or a request: hysteresis, and a cheap look now and then.

What counts is the measured gain of a round: the tokens that it made, against those that plain decoding makes in its
time. Speculation goes off when the mean gain of at least LEAST_ROUNDS is below 1 - OFF_MARGIN, and comes back when a
trial shows 1 + ON_MARGIN. Trials are paid from a share of the time spent without speculation. The loss that a trial may
make is saved up first, so that looking costs no more than PROBE_SHARE, whatever it costs.

A drafter that reads a text first has no draft until it has. Such rounds say what reading takes and not what drafts
bring, so they are no rounds of a trial. What they lose is saved up as well.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.running_mean import update_mean

# ADR 0028. The switch is worth 11 %, 42 % at most, and nothing behind a gate (ADR 0043); numbers not tuned apart.
OFF_MARGIN = 0.01
# ADR 0028: above OFF_MARGIN, so that it does not swing.
ON_MARGIN = 0.02
# ADR 0028. Not tuned: times of 8 rounds have an error of 7 % (ADR 0033).
LEAST_ROUNDS = 8
# ADR 0028. Not tuned.
TRIAL_ROUNDS = 4
# ADR 0028: what looking costs at most, whatever a trial costs.
PROBE_SHARE = 0.005
_NEWEST = 0.1  # weight of the newest round in the mean gain. Not tuned.


class SpeculationSwitch(NamedTuple):
    """`gain`: mean gain of the rounds with speculation since it went on; `rounds`: how many. `lost_ms`: how much a
    round with speculation lost at the last, which a trial is expected to lose again. `saved_ms`: saved up for a trial.
    `trial`: rounds left of one, 0 where there is none. `reading_ms`: what the last one lost to reading."""

    on: bool = True
    gain: float = 1.0
    rounds: int = 0
    lost_ms: float = 0.0
    saved_ms: float = 0.0
    trial: int = 0
    reading_ms: float = 0.0


ON = SpeculationSwitch()


def active(switch: SpeculationSwitch) -> bool:
    return switch.on or switch.trial > 0


def observe_speculative_round(
    switch: SpeculationSwitch, gain: float, round_ms: float, *, reading: bool = False
) -> SpeculationSwitch:
    """Take in a round with speculation: its gain (1: as plain decoding), and how long it took. `reading`: there was no
    draft yet, as a text is being read."""
    newest_ms = max(0.0, (1.0 - gain) * round_ms)
    if reading and not switch.on:
        return switch._replace(reading_ms=switch.reading_ms + newest_ms)
    lost_ms = update_mean(switch.lost_ms, newest_ms, 0.5)
    mean, rounds = update_mean(switch.gain, gain, _NEWEST, switch.rounds), switch.rounds + (not reading)
    if switch.on:
        if rounds >= LEAST_ROUNDS and mean < 1.0 - OFF_MARGIN:
            return SpeculationSwitch(False, mean, 0, lost_ms)
        return SpeculationSwitch(True, mean, rounds, lost_ms)
    left = switch.trial - 1
    if left > 0:
        return SpeculationSwitch(False, mean, rounds, lost_ms, 0.0, left, switch.reading_ms)
    return SpeculationSwitch(mean >= 1.0 + ON_MARGIN, mean, 0, lost_ms, reading_ms=switch.reading_ms)


def observe_plain_round(switch: SpeculationSwitch, round_ms: float) -> SpeculationSwitch:
    saved_ms = switch.saved_ms + PROBE_SHARE * round_ms
    if saved_ms >= switch.reading_ms + TRIAL_ROUNDS * max(switch.lost_ms, 0.1 * round_ms):
        return SpeculationSwitch(False, 1.0, 0, switch.lost_ms, 0.0, TRIAL_ROUNDS)
    return switch._replace(saved_ms=saved_ms)
