"""The prediction drafter: follows the text that it was given, and finds its place again after an edit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.protocol.packed_tokens import pack_tokens
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft, DraftHints
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.drafting.suffix import SuffixDrafter
from policies.sampling import Sampling

GREEDY = Sampling()
PROMPT = [900, 901]


def drafter_of(prediction: Sequence[int], output: Sequence[int] = ()) -> PredictionDrafter:
    """A drafter of one request `a` that has said `output` before."""
    drafter = PredictionDrafter(SystemClock())
    hints = DraftHints(prediction=pack_tokens(prediction), generated=len(output))
    drafter.begin("a", [*PROMPT, *output], GREEDY, hints)
    return drafter


def ask(drafter: PredictionDrafter, limit: int = 8) -> Draft:
    return drafter.propose([Ask("a", limit)])[0]


def count_rounds(drafter: PredictionDrafter, output: Sequence[int], limit: int = 16) -> int:
    """How many rounds an output takes where each one brings the right tokens of a draft and one more."""
    done = rounds = 0
    while done < len(output):
        draft = ask(drafter, limit).tokens
        right = 0
        while right < min(len(draft), len(output) - done - 1) and draft[right] == output[done + right]:
            right += 1
        taken = output[done : done + right + 1]
        drafter.extend("a", taken)
        done += len(taken)
        rounds += 1
    return rounds


def words(count: int, seed: int = 0, vocabulary: int = 40) -> list[int]:
    """A text in which every token occurs often, as in a program."""
    drawn = random.Random(seed)  # a text, not a secret
    return [drawn.randrange(vocabulary) for _ in range(count)]


def test_a_text_that_is_followed_is_drafted_from_its_first_token_to_its_last():
    text = words(200)
    drafter = drafter_of(text)
    assert ask(drafter).tokens == tuple(text[:8])
    drafter.extend("a", text[:150])
    assert ask(drafter, 64).tokens == tuple(text[150:])
    drafter.extend("a", text[150:])
    assert ask(drafter) == NOTHING


def test_a_draft_is_the_surer_the_longer_the_text_was_followed():
    drafter = drafter_of(words(100))
    before = ask(drafter)
    drafter.extend("a", words(100)[:20])
    after = ask(drafter)
    assert list(before.confidences) == sorted(before.confidences)
    assert after.confidences[0] > before.confidences[0]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda text: [*text[:100], 77, *text[101:]], id="a token for another"),
        pytest.param(lambda text: [*text[:100], 77, 78, 79, *text[103:]], id="three tokens for others"),
        pytest.param(lambda text: [*text[:100], 77, 78, 79, 80, *text[100:]], id="inserted"),
        pytest.param(lambda text: [*text[:100], *text[120:]], id="deleted"),
        pytest.param(lambda text: [77, 78, 79, *text], id="put in front"),
        pytest.param(lambda text: [*text[:100], *text[40:60], *text[100:]], id="copied from before"),
    ],
)
def test_an_edit_costs_a_few_rounds(edit):
    text = words(240)
    output = edit(text)
    unedited = count_rounds(drafter_of(text), text)
    new = sum(token > 40 for token in output)
    assert count_rounds(drafter_of(text), output) <= unedited + new + 6


def test_text_that_was_never_predicted_brings_no_drafts_but_for_guesses():
    drafter = drafter_of(words(200, vocabulary=40))
    drafted = 0
    for token in range(100, 160):
        drafter.extend("a", [token])
        drafted += len(ask(drafter).tokens)
    assert drafted == 0


def test_a_sequence_that_is_begun_again_drafts_as_if_it_had_gone_on():
    text = words(120)
    output = [*text[:50], 77, *text[51:70]]
    went_on = drafter_of(text)
    for token in output:
        went_on.extend("a", [token])
    assert ask(drafter_of(text, output)).tokens == ask(went_on).tokens == tuple(text[70:78])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6)))
def test_whatever_comes_drafts_are_pieces_of_the_text_within_the_limit(text, rounds):
    drafter = drafter_of(text)
    for taken in rounds:
        drafter.extend("a", taken)
        draft = ask(drafter, 5)
        assert len(draft.tokens) == len(draft.confidences) <= 5
        places = range(len(text) - len(draft.tokens) + 1)
        assert any(tuple(text[at : at + len(draft.tokens)]) == draft.tokens for at in places)


def test_sequences_without_a_prediction_are_not_asked_about():
    suffix = SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock())
    predictions = PredictionDrafter(SystemClock())
    chain = ChainDrafter([suffix], predictions)
    chain.begin("b", [1, 2, 3, 1, 2], GREEDY)
    assert chain.propose([Ask("b", 4)])[0].drafter == "suffix"
    assert [state.name for state in chain.states()] == ["suffix"]
    chain.begin("a", [1, 2, 3, 1, 2], GREEDY, DraftHints(prediction=pack_tokens([7, 8, 9])))
    ours, other = chain.propose([Ask("a", 4), Ask("b", 4)])
    assert (ours.drafter, ours.tokens) == ("prediction", (7, 8, 9))
    assert other.drafter == "suffix"
    assert {state.name: state.rounds for state in chain.states()} == {"prediction": 1, "suffix": 2}
    chain.end("a", keep=False)
    assert not predictions.busy


def test_the_requests_own_text_drafts_where_the_prediction_is_no_longer_followed():
    suffix = SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock())
    chain = ChainDrafter([suffix], PredictionDrafter(SystemClock()))
    repeated = [10, 11, 12, 13, 14, 15]
    chain.begin("a", repeated * 3, GREEDY, DraftHints(prediction=pack_tokens([70, 71, 72])))
    chain.extend("a", repeated[:3])
    draft = chain.propose([Ask("a", 3)])[0]
    assert (draft.drafter, draft.tokens) == ("suffix", (13, 14, 15))


def test_an_operator_who_lets_nobody_draft_means_predictions_too():
    chain = ChainDrafter(
        [SuffixDrafter(max_match=4, memory_bytes=0, clock=SystemClock())], PredictionDrafter(SystemClock())
    )
    chain.begin("a", PROMPT, GREEDY, DraftHints(prediction=pack_tokens([7, 8, 9])))
    chain.choose([])
    assert chain.propose([Ask("a", 4)]) == [NOTHING]
    chain.choose(["suffix"])
    assert chain.propose([Ask("a", 4)])[0].tokens == (7, 8, 9)
