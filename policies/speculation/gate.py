"""Whether a draft that is made on the target's own time pays, and when to look again where it does not.

What drafting may lose is earned first. There is an account, in rounds without drafts: it begins with FIRST_ROUNDS,
grows by SHARE in every round, and by what each round with drafts won or lost. A drafter that is not known to pay is
tried when the account covers what that takes at worst, its reading of the text included. It is left alone again when
the trial says so, or the account is empty; then it begins from nothing. So all that drafting ever loses is at most
FIRST_ROUNDS, SHARE of the rounds, and what one round takes more than was expected of it. A drafter whose step takes
nearly a round can win next to nothing whatever is accepted (see below): it is tried later,
in case that the step was measured wrong.

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

TRIAL_ROUNDS = 4
"""A trial is judged after so many rounds with drafts. ADR 0016. The gate is worth up to 25 % (ADR 0043); its numbers
were not tuned apart."""
# ADR 0016: in rounds, what drafting may lose before it has won anything: two trials with steps of 0.8 rounds.
FIRST_ROUNDS = 8.0
# ADR 0016: of all rounds, and so what is lost at most to looking at drafts that never pay.
SHARE = 0.01
# Least weight of the newest round in running means. ADR 0016. Not tuned.
_NEWEST = 0.1
# A step that takes this part of a round. ADR 0016. Not tuned.
_DEAR = 0.8
# Are saved for, before such a drafter is tried. ADR 0016. Not tuned.
_DEAR_TRIALS = 2.0
# Of what drafts promise to win in the rest of a text, reading it may take. ADR 0016: half of what is hoped for covers a
# text that turns. Not tuned.
_HORIZON = 0.5


def worth_ms(accepted: float, round_ms: float) -> float:
    """Return what drafts with so many accepted tokens per sequence may add to a round of `round_ms` at most."""
    return accepted * round_ms


def token_price(step_ms: float, round_ms: float) -> float:
    """Return the chance of being accepted below which a further token is not worth what it takes (0 ms: unknown)."""
    return step_ms / round_ms if round_ms > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class GateState:
    """Running means over the rounds with drafts since the trial began.

    They are the accepted drafts per sequence, beyond those of cheaper drafts (so below 0 at times), and the time that
    drafting added to a round, in ms. `rounds` counts them. `account`: see the module.
    `drafting`: drafts are made.
    """

    account: float = FIRST_ROUNDS
    drafting: bool = False
    rounds: int = 0
    accepted: float = 0.0
    cost_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What drafting is expected to take. `round_ms`: of a round without drafts, of so many `sequences`. `step_ms`: of
    one step of the drafter. `reading_ms`: of reading the text that it has to know for one of them. 0: not measured."""

    round_ms: float
    step_ms: float
    reading_ms: float = 0.0
    sequences: int = 1

    @property
    def trial_rounds(self) -> float:
        """What is to be saved for a trial, in rounds without drafts: what it loses at worst, and more where it is
        unlikely to end well."""
        worst = (self.reading_ms + TRIAL_ROUNDS * self.step_ms) / self.round_ms
        return worst * _DEAR_TRIALS if self.step_ms >= _DEAR * self.round_ms else worst


def pays(worth: GateState, round_ms: float) -> bool:
    return worth.cost_ms < worth_ms(worth.accepted, round_ms)


def decide_drafting(worth: GateState, price: DraftCost) -> GateState:
    """Return what is known one round later; `drafting` says whether to draft in this one. Nothing is risked while a
    round without drafts is not measured."""
    worth = replace(worth, account=worth.account + SHARE)
    if price.round_ms <= 0.0:
        return replace(worth, drafting=False)
    if worth.drafting:
        lost = worth.account < 0.0 or (worth.rounds >= TRIAL_ROUNDS and not pays(worth, price.round_ms))
        return replace(worth, drafting=False, account=min(worth.account, 0.0)) if lost else worth
    if price.trial_rounds > worth.account:
        return worth
    return replace(worth, drafting=True, rounds=0, accepted=0.0, cost_ms=0.0)


def reads(worth: GateState, price: DraftCost, tokens_left: float) -> bool:
    """Return whether to read a text for its drafts, where `tokens_left` tokens are expected to come behind it."""
    if price.reading_ms > worth.account * price.round_ms:
        return False
    if worth.rounds < TRIAL_ROUNDS:
        return True  # it is what the trial is for
    won_ms = (worth_ms(worth.accepted, price.round_ms) - worth.cost_ms) / price.sequences
    return won_ms >= 0.0 and price.reading_ms <= _HORIZON * won_ms * tokens_left / (1.0 + max(0.0, worth.accepted))


def observe_drafted_round(
    worth: GateState, *, round_ms: float, accepted: float, cost_ms: float, reading: bool
) -> GateState:
    """Take in a round with drafts: how many were accepted, per sequence, and what it took beyond `round_ms` (> 0).

    Where it was (also) `reading`, what it took says nothing about the next."""
    account = worth.account + (worth_ms(accepted, round_ms) - cost_ms) / round_ms
    if reading:
        return replace(worth, account=account)
    return replace(
        worth,
        account=account,
        rounds=worth.rounds + 1,
        accepted=update_mean(worth.accepted, accepted, _NEWEST, worth.rounds),
        cost_ms=update_mean(worth.cost_ms, cost_ms, _NEWEST, worth.rounds),
    )
