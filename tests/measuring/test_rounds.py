"""Several decode loops that take turns on one loaded model."""

from itertools import pairwise

import pytest

from orchestrator.clock import SystemClock
from orchestrator.errors import OutriderError
from orchestrator.protocol.commands import Submit
from orchestrator.worker.measuring.rounds import Decoding, in_turns
from orchestrator.worker.measuring.watched import WatchedModel
from tests.support.loops import loop_over, suffix, toy

PROMPT = list(range(20, 50))


def decoding(model, first_slot, number, *, drafts=False, running=2):
    watched = WatchedModel(model, first_slot)
    submits = [Submit(f"{one}", [*PROMPT, number, one], 10 + one) for one in range(4)]
    loop = loop_over(watched, suffix() if drafts else None, running=running, prefix_reuse=False)
    return Decoding(loop, watched, submits, SystemClock())


def test_each_says_what_it_says_alone():
    alone = []
    for number in range(3):
        one = decoding(toy(), 0, number, drafts=number == 1)
        one.advance()
        alone.append(one.outputs)
    model = toy()
    together = [decoding(model, 2 * number, number, drafts=number == 1) for number in range(3)]
    parts = []
    for part in in_turns(together, 5):
        parts.append(part)
        said = [sum(map(len, one.outputs.values())) for one in together]
        assert max(said) - min(said) <= 2 * 13  # a round of two sequences, at most
    assert parts == [1, 2, 3, 4, 5]
    assert [one.outputs for one in together] == alone
    assert all(one.done for one in together)
    assert model.free_blocks() == model.capabilities.total_blocks


def test_rounds_are_told_apart_by_what_they_are_of():
    one = decoding(toy(), 0, 0)
    one.advance()
    wanted = sum(10 + number for number in range(4))
    assert sum(round_.tokens for round_ in one.rounds) == wanted
    assert sum(round_.ended for round_ in one.rounds) == 4
    assert sum(round_.prompt_rows for round_ in one.rounds) == 4 * (len(PROMPT) + 2)
    first, *others = one.rounds
    assert (first.sequences, first.rows) == (0, 0)
    plain = [round_ for round_ in others if not round_.prompt_rows]
    assert {round_.sequences for round_ in plain} == {1, 2}
    for before, now in pairwise(others):
        if not (before.prompt_rows or now.prompt_rows):
            assert now.changed == (before.sequences != now.sequences)
    assert all(round_.whole_ms >= round_.ms > 0.0 for round_ in one.rounds)


def test_what_is_refused_is_said():
    with pytest.raises(OutriderError, match="request 0"):
        Decoding(loop_over(toy(), None), WatchedModel(toy()), [Submit("0", [], 5)], SystemClock())
