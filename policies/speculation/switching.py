"""Whether drafters that take time, and that no gate guards, are asked: by what rounds with them won (`trial_account`).

What counts is the measured gain of a round: the tokens that it made, beyond those that plain decoding makes in its
time. A drafter that reads a text first has no draft until it has. Such rounds say what reading takes and not what
drafts bring; what they lost is paid before the next trial.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.running_mean import update_mean
from policies.speculation.trial_account import (
    STAKE,
    TrialAccount,
    begin_trial,
    end_trust,
    observe_rounds,
    observe_win,
    release_held_back,
    spend,
)


class SpeculationSwitch(NamedTuple):
    """`lost`: how much a round with speculation lost at the last, which a trial is expected to lose again, in rounds of
    plain decoding. `read`: what was lost to reading since the last trial began, or the last request in one."""

    account: TrialAccount = TrialAccount(credit=STAKE, trusted=True)
    lost: float = 0.0
    read: float = 0.0


ON = SpeculationSwitch()


def active(switch: SpeculationSwitch) -> bool:
    return switch.account.trusted


def observe_speculative_round(switch: SpeculationSwitch, won: float, *, reading: bool = False) -> SpeculationSwitch:
    """Take in a round with speculation, which won so many rounds of plain decoding (below 0: lost). `reading`: there
    was no draft yet, as a text is being read."""
    lost = max(0.0, -won)
    if reading:
        return switch._replace(read=switch.read + lost)
    account = end_trust(observe_win(switch.account, won))
    return SpeculationSwitch(account, update_mean(switch.lost, lost, 0.5), switch.read)


def observe_plain_rounds(switch: SpeculationSwitch, rounds: float = 1.0) -> SpeculationSwitch:
    account = begin_trial(observe_rounds(switch.account, rounds), switch.read + switch.lost)
    if not account.trusted:
        return switch._replace(account=account)
    return switch._replace(account=spend(account, switch.read), read=0.0)


def observe_start(switch: SpeculationSwitch) -> SpeculationSwitch:
    """A request begins: its text may be one that is drafted better."""
    return switch._replace(account=release_held_back(switch.account), read=0.0 if active(switch) else switch.read)
