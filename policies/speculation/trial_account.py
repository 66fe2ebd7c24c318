"""What drafting may lose, in rounds without drafts: it is saved first, and won back.

A drafter that takes the target's time is *trusted* while it seems to pay. What it may lose comes from an account: it
begins with FIRST_ROUNDS, grows by SHARE of each round, and by what each round with drafts won or lost. So all that
drafting ever loses is at most FIRST_ROUNDS, SHARE of the rounds, and what one round takes beyond its price.

Whether it still pays is told by a cumulative sum (Page, Biometrika 41, 1954): the *credit* begins with STAKE, goes up
and down with what is won and lost, never above MOST_CREDIT, and trust ends below 0. A mean of the newest rounds is no
such test: one of ten rounds varies by a fifth, so it ends the trust in drafts that win a fifth within some dozens.
From its height the credit is lost by chance with exp(-2 MOST_CREDIT mu / sigma^2), where a round wins mu with a
deviation of sigma.

Where trust ends, what is saved is held back until another sequence begins, whose text may be drafted better. Without
that, drafts that pay in two texts of three win 1 % instead of 4 (ADR 0134).
"""

from __future__ import annotations

from typing import NamedTuple

# In rounds, what drafting may lose before it has won anything. ADR 0134: two trials, each behind some hundred tokens to
# read. With 8 a first text that happens to go badly is the only one that is tried for long.
FIRST_ROUNDS = 12.0
# Of all rounds, what is lost at most to looking at drafts that never pay. ADR 0134: 0.01 and 0.0025 find as much of
# what drafts bring within 0.5 %, and 0.01 loses twice as much where they bring nothing.
SHARE = 0.005
# In rounds: the credit at first. ADR 0134: drafts that win a fifth of a round lose it by chance once in 25 trials.
STAKE = 2.0
# In rounds. ADR 0134: 4 to 12 keep drafts that win a fifth of a round alike; 4 brings 2 % where texts differ.
MOST_CREDIT = 4.0


class TrialAccount(NamedTuple):
    """All in rounds without drafts. `saved`: may be lost; `held_back`: of it, until another sequence begins. `credit`:
    see the module. `trusted`: drafts are made."""

    saved: float = FIRST_ROUNDS
    held_back: float = 0.0
    credit: float = 0.0
    trusted: bool = False


def observe_rounds(account: TrialAccount, rounds: float = 1.0) -> TrialAccount:
    """So many rounds were run, or one begins: a share of their time is saved."""
    return account._replace(saved=account.saved + SHARE * rounds)


def begin_trial(account: TrialAccount, price_rounds: float) -> TrialAccount:
    """Trust the drafter if what is saved covers its price at worst: the stake, and what else it takes."""
    if account.saved - account.held_back < STAKE + price_rounds:
        return account
    return account._replace(trusted=True, held_back=0.0, credit=STAKE)


def observe_win(account: TrialAccount, rounds: float) -> TrialAccount:
    """Take in what a round with drafts won (below 0: lost)."""
    return account._replace(saved=account.saved + rounds, credit=min(MOST_CREDIT, account.credit + rounds))


def spend(account: TrialAccount, rounds: float) -> TrialAccount:
    """Take off what says nothing of later rounds: reading a text."""
    return account._replace(saved=account.saved - rounds)


def end_trust(account: TrialAccount) -> TrialAccount:
    """Leave a trusted drafter alone if its credit, or what is saved, is used up."""
    if not account.trusted or min(account.credit, account.saved) >= 0.0:
        return account
    return TrialAccount(account.saved, held_back=max(0.0, account.saved))


def release_held_back(account: TrialAccount) -> TrialAccount:
    """Another sequence begins: its text may be one that is drafted better."""
    return account._replace(held_back=0.0)
