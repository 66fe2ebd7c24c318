"""Drafts within a time and for what they are worth; drafts ahead that are there when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.worker.draft_server.lookahead import Branch, LookaheadSequence
from orchestrator.worker.draft_server.shared import DraftSession, SharedDrafter
from orchestrator.worker.drafting.port import Ask, Draft, Outcome
from orchestrator.worker.drafting.protocol import Begin, End, Extend, Update
from policies.sampling import Sampling
from tests.support.drafters import KnowingDrafter

TEXT = list(range(1, 60))
HELD = 5


@dataclass
class Clock:
    """Each look at it is `step_s` later: a step of drafting looks at it twice, and once more whether there is time."""

    step_s: float = 0.0
    now_s: float = 0.0

    def monotonic_s(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


@dataclass
class Alone:
    """A shared drafter with one target, asked as if it waited for each answer."""

    shared: SharedDrafter
    session: DraftSession

    def update(self, update: Update) -> None:
        self.shared.update(self.session, update)

    def answer(self, asks: Sequence[Ask], within_s: float, round_s: float = 0.0) -> list[Draft]:
        self.shared.ask(self.session, 1, asks, within_s, round_s)
        while not (found := self.shared.take_answers()):
            assert self.shared.run_pass()
        return found[0].drafts

    def step(self) -> bool:
        return self.shared.run_pass()


def ahead_of(step_s: float = 0.0, *, runs_ahead: bool = False) -> Alone:
    shared = SharedDrafter(KnowingDrafter([TEXT]), Clock(step_s))
    ahead = Alone(shared, shared.join(runs_ahead=runs_ahead))
    ahead.update(Begin("a", TEXT[:HELD], Sampling()))
    return ahead


def test_it_answers_with_what_there_is_in_time():
    assert ahead_of(0.001).answer([Ask("a", 12)], 10.0)[0].tokens == tuple(TEXT[5:17])
    in_time = ahead_of(0.001)
    in_time.answer([Ask("a", 1)], 10.0)  # now it knows how long a step takes
    in_time.update(Extend("a", [99]))  # no text goes on there
    assert in_time.answer([Ask("a", 12)], 10.0)[0].tokens == ()
    in_time.update(Begin("a", TEXT[:HELD], Sampling()))
    assert 0 < len(in_time.answer([Ask("a", 12)], 0.010)[0].tokens) < 6


def test_what_is_unlikely_is_not_drafted_where_the_target_waits_too_long_for_it():
    ahead = ahead_of(0.001)
    ahead.answer([Ask("a", 2)], 10.0)
    ahead.update(Extend("a", TEXT[5:7]))
    worth = ahead.answer([Ask("a", 12)], 10.0, round_s=0.0015)[0]  # a token costs two thirds of a round
    assert len(worth.tokens) == 4  # 0.9 ** 4 is less than that
    ahead.update(Extend("a", list(worth.tokens)))
    assert len(ahead.answer([Ask("a", 12)], 10.0, round_s=0.0005)[0].tokens) == 1


def test_what_was_guessed_is_there_before_it_is_asked_for():
    ahead = ahead_of(runs_ahead=True)
    while ahead.step():
        pass
    assert ahead.answer([Ask("a", 3)], 0.0)[0].tokens == tuple(TEXT[5:8])
    while ahead.step():
        pass
    ahead.update(Extend("a", TEXT[5:9]))
    assert ahead.answer([Ask("a", 3)], 0.0)[0].tokens == tuple(TEXT[9:12])
    assert (ahead.session.hits, ahead.session.misses) == (2, 0)
    ahead.update(Extend("a", [77]))
    ahead.answer([Ask("a", 3)], 0.0)
    assert (ahead.session.hits, ahead.session.misses) == (2, 1)


def test_it_does_not_draft_ahead_for_ever_nor_for_whom_it_does_not_know():
    ahead = ahead_of(runs_ahead=True)
    steps = 0
    while ahead.step():
        steps += 1
    assert steps == 5
    ahead.update(End("a", keep=False))
    assert not ahead.step()
    ahead.update(Extend("a", [1]))
    assert ahead.answer([Ask("a", 3)], 1.0)[0].tokens == ()


def test_branches_behind_what_is_accepted_stay_and_count_from_there() -> None:
    kept = Branch(Outcome(3, 70, 0.1), LookaheadSequence("x", guess=Draft((71,), (0.9,))))
    over = Branch(Outcome(1, 80, 0.2), LookaheadSequence("y"))
    sequence = LookaheadSequence("a", guess=Draft((1, 2, 3, 4, 5), (0.5,) * 5), branches=[over, kept])
    assert sequence.commit([1, 2]) == [over]
    (left,) = sequence.branches
    assert (left.outcome.accepted, left.outcome.token) == (1, 70)
    assert left.outcome.chance == 0.4, "the two tokens in front of it are certain now"
    assert sequence.has_news, "it is told again, as it belongs to other tokens"
    assert sequence.find_branch([3, 70]) is left
    assert sequence.commit([9]) == [left]
    assert not sequence.branches


def test_only_branches_that_have_grown_are_told_again() -> None:
    grown = Branch(Outcome(0, 7, 0.1), LookaheadSequence("x", guess=Draft((8,), (0.9,)), grown=True))
    still = Branch(Outcome(0, 9, 0.1), LookaheadSequence("y", guess=Draft((8,), (0.9,))))
    sequence = LookaheadSequence("a", guess=Draft((1,), (0.5,)), branches=[grown, still])
    assert sequence.has_news
    assert sequence.take_news() == [grown]
    assert sequence.take_news() == [], "it was told"
