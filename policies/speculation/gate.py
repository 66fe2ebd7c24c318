"""Whether a draft that is made on the target's own time pays, and when to look again where it does not.

What drafting may lose is saved first, and a drafter is trusted while it seems to pay (`trial_account`). One that is not
is tried when the account covers what that takes at worst, its reading of the text included. A drafter whose step takes
nearly a round can win next to nothing whatever is accepted (see below): it is tried later, in case that the step was
measured wrong.

When drafting pays, whoever drafts.

Let T be the time of a round without drafts, c the time that drafts add to it and a the mean number of accepted drafts
per sequence. A round with drafts then yields 1 + a tokens per sequence in T + c, and one without yields 1 in T. Drafts
pay while (T + c) / (1 + a) < T, so while c < a T (the condition of Leviathan et al., arXiv 2211.17192, section 3.5, in
measured times). Within a draft, one token more pays while the chance that it is accepted, times T, is above what it
takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.running_mean import update_mean
from policies.speculation.trial_account import (
    FIRST_ROUNDS,
    TrialAccount,
    begin_trial,
    end_trust,
    observe_rounds,
    observe_win,
    spend,
)

TRIAL_ROUNDS = 4
"""So many rounds with drafts are made before their means say anything. ADR 0016."""
# Least weight of the newest round in running means. ADR 0134: only what reading a text may take goes by them, and a
# text that is refused by noise teaches nothing.
_NEWEST = 0.02
# A step that takes this part of a round. ADR 0016. Not tuned.
_DEAR = 0.8
# Are saved for, before such a drafter is tried. ADR 0016. Not tuned.
_DEAR_TRIALS = 2.0
# Of what is saved, reading a text may take whatever the means say. ADR 0134: without it drafts in texts that differ win
# 4.7 % and not 6.9, as a mean that was poor by chance stays as it is; an eighth to a half are alike.
_READING_SHARE = 0.25
# Accepted tokens of drafts of one token, as long as a trial has not said. ADR 0134: 0.65 is usual for a draft model of
# a third of the target. Without a bound a trial once read a text for 53 rounds, for 96 tokens.
_HOPED_ACCEPTED = 0.75


def worth_ms(accepted: float, round_ms: float) -> float:
    """Return what drafts with so many accepted tokens per sequence may add to a round of `round_ms` at most."""
    return accepted * round_ms


def token_price(step_ms: float, round_ms: float) -> float:
    """Return the chance of being accepted below which a further token is not worth what it takes (0 ms: unknown)."""
    return step_ms / round_ms if round_ms > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class GateState:
    """Running means over the rounds with drafts since the trial began, and the account.

    They are the accepted drafts per sequence, beyond those of cheaper drafts (so below 0 at times), and the time that
    drafting added to a round, in ms. `rounds` counts them.
    """

    account: TrialAccount = TrialAccount()  # noqa: RUF009 -- an immutable tuple
    rounds: int = 0
    accepted: float = 0.0
    cost_ms: float = 0.0

    @property
    def drafting(self) -> bool:
        return self.account.trusted


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What drafting is expected to take. `round_ms`: of a round without drafts, of so many `sequences`. `step_ms`: of
    one step of the drafter. `reading_ms`: of reading the text that it has to know for one of them. `rows_ms`: what a
    row more for each of them takes. 0: not measured."""

    round_ms: float
    step_ms: float
    reading_ms: float = 0.0
    sequences: int = 1
    rows_ms: float = 0.0

    @property
    def trial_rounds(self) -> float:
        """What a trial may lose beside its stake, in rounds without drafts; more where it is unlikely to end well."""
        worst = (self.reading_ms + self.step_ms) / self.round_ms
        return worst * _DEAR_TRIALS if self.step_ms >= _DEAR * self.round_ms else worst


def decide_drafting(worth: GateState, price: DraftCost, rounds: float = 1.0) -> GateState:
    """Return what is known one round later; `drafting` says whether to draft in this one. Nothing is risked while a
    round without drafts is not measured. `rounds`: what the account gets a share of."""
    account = end_trust(observe_rounds(worth.account, rounds))
    if price.round_ms <= 0.0:
        return replace(worth, account=account._replace(trusted=False))
    if account.trusted or worth.drafting:
        return replace(worth, account=account)
    account = begin_trial(account, price.trial_rounds)
    return GateState(account) if account.trusted else replace(worth, account=account)


def reads(worth: GateState, price: DraftCost, tokens_left: float) -> bool:
    """Return whether to read a text for its drafts, where `tokens_left` tokens are expected to come behind it."""
    saved_ms = worth.account.saved * price.round_ms
    tried = worth.rounds >= TRIAL_ROUNDS
    accepted = worth.accepted if tried else _HOPED_ACCEPTED
    won_ms = worth_ms(accepted, price.round_ms) - (worth.cost_ms if tried else price.step_ms + price.rows_ms)
    hoped_ms = won_ms / price.sequences * tokens_left / (1.0 + max(0.0, accepted))
    spare_ms = saved_ms if tried else max(0.0, saved_ms - FIRST_ROUNDS * price.round_ms)
    return price.reading_ms <= min(saved_ms, max(_READING_SHARE * spare_ms, hoped_ms))


def observe_drafted_round(
    worth: GateState, *, round_ms: float, accepted: float, cost_ms: float, reading: bool
) -> GateState:
    """Take in a round with drafts: how many were accepted, per sequence, and what it took beyond `round_ms` (> 0).

    Where it was (also) `reading`, what it took says nothing about the next."""
    won = (worth_ms(accepted, round_ms) - cost_ms) / round_ms
    if reading:
        return replace(worth, account=spend(worth.account, -won))
    return GateState(
        observe_win(worth.account, won),
        worth.rounds + 1,
        update_mean(worth.accepted, accepted, _NEWEST, worth.rounds),
        update_mean(worth.cost_ms, cost_ms, _NEWEST, worth.rounds),
    )
