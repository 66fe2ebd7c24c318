"""The guard of draft models counts what they bring beyond cheaper drafts, and what they really add to a round."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.cache import DraftSequence
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.gate import DraftGate
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Ask, Draft
from policies.sampling import Sampling
from tests.support.loops import suffix, toy

ROUND_MS, STEP_MS = 10.0, 4.0
WISH = Ask("a", 8, round_ms=ROUND_MS, row_ms=0.5, free=1, fixed=False)


def count_asks(wish: Ask, *, gained: int, took_ms: float, rounds: int) -> int:
    """In how many of so many rounds drafts are made, where three tokens take `took_ms` and so many are gained."""
    guard, known = DraftGate(lambda _: 0.0), DraftSequence("a", [1] * 20, Sampling(), 10, False, None)
    draft, made = Draft((1, 2, 3), (1.0, 1.0, 1.0)), 0
    for _ in range(rounds):
        if guard.choose_asks([wish], {"a": known}, STEP_MS):
            made += 1
            guard.observe_drafts(took_ms, [(known.sampling.rule, wish, draft)], reading=False)
            guard.observe_gain(known.sampling.rule, gained)
    return made


@pytest.mark.parametrize(
    ("wish", "gained", "goes_on"),
    [
        (WISH, 3, True),  # 3 tokens for 20 ms and two rows, where a round takes 10
        (WISH, 2, False),  # the text itself has one of them right, for nothing
        (replace(WISH, last_ms=ROUND_MS + 5.0), 3, True),
        (replace(WISH, last_ms=ROUND_MS + 12.0), 3, False),  # the target takes longer than its rows say
    ],
)
def test_drafts_go_on_while_they_pay_beyond_what_is_there(wish, gained, goes_on):
    made = count_asks(wish, gained=gained, took_ms=20.0, rounds=200)
    assert made == 200 if goes_on else 0 < made < 40  # a tenth of a round is lost in each


@pytest.mark.parametrize(("took_ms", "rests"), [(20.0, False), (90.0, True)])
def test_a_guard_says_that_its_drafter_rests_once_a_trial_did_not_pay(took_ms, rests):
    guard, known = DraftGate(lambda _: 0.0), DraftSequence("a", [1] * 20, Sampling(), 10, False, None)
    draft = Draft((1, 2, 3), (1.0, 1.0, 1.0))
    assert not guard.rests, "nothing was tried"
    for _ in range(40):
        if guard.choose_asks([WISH], {"a": known}, STEP_MS):
            guard.observe_drafts(took_ms, [(known.sampling.rule, WISH, draft)], reading=False)
            guard.observe_gain(known.sampling.rule, 3)
    assert guard.rests is rests


class Asked(ModelDrafter):
    """Keeps what it was asked."""

    asks: ClassVar[list[Ask]] = []

    def propose(self, asks):
        self.asks.extend(asks)
        return super().propose(asks)


def test_a_chain_tells_what_the_cheaper_draft_is():
    tokens = [60, 32, 101, 60, 32]
    chain = ChainDrafter(
        [suffix(), Asked(toy(), DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=50.0)]
    )
    chain.begin("a", tokens, Sampling())
    chain.propose([replace(WISH, limit=2)])
    assert list(Asked.asks[0].cheaper) == [101, 60]
    chain.begin("a", [1, 2, 3], Sampling())
    chain.propose([WISH])
    assert Asked.asks[1].cheaper == ()


@pytest.mark.parametrize(
    ("cheaper", "committed", "gain"),
    [
        ((), "tt5", 2),
        ((7, 7), "tt5", 2),
        ("t", "tt5", 1),
        ("t6", "t65", 0),  # the cheaper draft was verified: the model cost its time, and nothing else
        ("t6", "t6", -1),  # the model's was, and the cheaper one has the target's own token right, too
        ("tt", "t5", 0),
        ((7,), "5", 0),
    ],
)
def test_a_draft_gains_what_it_has_right_beyond_the_cheaper_one(monkeypatch, cheaper, committed, gain):
    """`t`: a token of the model's draft, which has two."""
    drafter = ModelDrafter(toy(), DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=50.0)
    drafter.begin("a", [1, 2, 3], Sampling())
    own = drafter.propose([Ask("a", 2)])[0].tokens
    drafter.begin("b", [1, 2, 3], Sampling())

    def spell(text) -> list[int]:
        return [own[at] if letter == "t" else int(letter) for at, letter in enumerate(text)]

    gains: list[int] = []
    monkeypatch.setattr(DraftGate, "observe_gain", lambda self, rule, tokens: gains.append(tokens))
    drafter.propose([Ask("b", 2, cheaper=tuple(spell(cheaper)))])
    drafter.extend("b", spell(committed))
    assert gains == [gain]


class Texts:
    """A gate, and rounds of sequences that all go alike: each draft has one token, which takes `took_ms` together."""

    def __init__(self, took_ms: float) -> None:
        self.gate, self.took_ms = DraftGate(lambda _: 0.0), took_ms
        self.known: dict[str, DraftSequence] = {}

    def begin(self, *keys: str) -> None:
        self.known = {key: DraftSequence(key, [1] * 20, Sampling(), 10, False, None) for key in keys}
        self.gate.observe_sequence_start()

    def run(self, rounds: int, *, right: bool) -> int:
        """Return in how many of so many rounds drafts were made."""
        wishes = [replace(WISH, key=key) for key in self.known]
        made = 0
        for _ in range(rounds):
            asks = self.gate.choose_asks(wishes, self.known, STEP_MS)
            if asks:
                made += 1
                drafts = [(self.known[ask.key].sampling.rule, ask, Draft((1,), (1.0,))) for ask in asks]
                self.gate.observe_drafts(self.took_ms, drafts, reading=False)
                for ask in asks:
                    self.gate.observe_gain(self.known[ask.key].sampling.rule, int(right))
        return made


def test_what_was_won_pays_for_another_text_and_not_for_the_same() -> None:
    texts = Texts(STEP_MS)
    texts.begin("good")
    assert texts.run(100, right=True) == 100
    texts.begin("bad")
    assert texts.run(100, right=False) < 20
    assert texts.run(100, right=False) == 0, "the same text is tried again"
    texts.begin("good again")
    assert texts.run(100, right=True) == 100


def test_what_a_batch_shows_is_not_believed_of_one_sequence() -> None:
    texts = Texts(STEP_MS)
    texts.begin("a")
    assert texts.run(50, right=True) == 50
    texts.begin(*"bcdefgh")
    assert texts.run(50, right=False) < 20
    texts.known = dict([*texts.known.items()][:1])
    assert texts.run(50, right=True) == 50


@pytest.mark.parametrize(("reading_ms", "first", "granted"), [(5.0, True, 0), (5.0, False, 1), (0.0, True, 1)])
def test_a_text_is_read_behind_the_first_token(reading_ms: float, first: bool, granted: int) -> None:
    known = {"a": DraftSequence("a", [1] * 20, Sampling(), 10, False, None)}
    gate = DraftGate(lambda _: reading_ms)
    assert len(gate.choose_asks([replace(WISH, first=first)], known, STEP_MS)) == granted
