"""The suffix drafter: finds what repeats, stays within its memory, forgets what it should."""

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.protocol.packed_tokens import pack_tokens
from orchestrator.worker.drafting.port import Ask, Draft, DraftHints
from orchestrator.worker.drafting.suffix import BYTES_PER_TOKEN, SuffixDrafter
from policies.sampling import Sampling

TOKENS = st.integers(0, 5)
GREEDY = Sampling()


def drafter(memory: int = 1 << 20) -> SuffixDrafter:
    return SuffixDrafter(max_match=16, memory_bytes=memory, clock=SystemClock())


def ask(d: SuffixDrafter, key: str, limit: int) -> Draft:
    return d.propose([Ask(key, limit)])[0]


def test_a_repeated_passage_is_continued_to_its_end():
    d = drafter()
    d.begin("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 50, 1, 2, 3], GREEDY)
    assert ask(d, "a", 6).tokens == (4, 5, 6, 7, 8, 9)
    assert ask(d, "a", 2).tokens == (4, 5)
    d.extend("a", [99])
    assert ask(d, "a", 4).tokens == ()


def test_the_longer_match_wins_over_the_newer_one():
    d = drafter()
    d.begin("a", [1, 2, 3, 4, 70, 9, 3, 4, 80, 0, 1, 2, 3, 4], GREEDY)
    assert ask(d, "a", 1).tokens == (70,)


def test_agreement_makes_a_draft_surer():
    agreed, split = drafter(), drafter()
    agreed.begin("a", [1, 2, 7, 1, 2, 7, 1, 2, 7, 5, 1, 2], GREEDY)
    split.begin("a", [1, 2, 7, 1, 2, 8, 1, 2, 9, 5, 1, 2], GREEDY)
    assert ask(agreed, "a", 1).confidences[0] > ask(split, "a", 1).confidences[0]


def test_an_earlier_output_helps_a_later_request_and_prompts_are_not_kept():
    d = drafter()
    d.begin("a", [500, 501, 502], GREEDY)
    d.extend("a", [10, 11, 12, 13, 14])
    d.end("a", keep=True)
    d.begin("b", [7, 10, 11], GREEDY)
    assert ask(d, "b", 3).tokens == (12, 13, 14)
    d.begin("c", [500, 501], GREEDY)
    assert ask(d, "c", 3).tokens == ()


def test_a_draft_never_runs_over_the_seam_of_two_outputs():
    d = drafter()
    for key, output in (("a", [10, 11, 12]), ("b", [20, 21, 22])):
        d.begin(key, [1], GREEDY)
        d.extend(key, output)
        d.end(key, keep=True)
    d.begin("c", [10, 11], GREEDY)
    assert ask(d, "c", 5).tokens == (12,)


def test_dropped_requests_and_a_memory_of_nothing_are_not_kept():
    for d, keep in ((drafter(), False), (drafter(0), True)):
        d.begin("a", [1], GREEDY)
        d.extend("a", [10, 11, 12])
        d.end("a", keep=keep)
        d.begin("b", [10, 11], GREEDY)
        assert ask(d, "b", 3).tokens == ()
        assert d.memory_bytes() == 0


@given(st.lists(st.lists(TOKENS, max_size=300), max_size=40), st.integers(0, 200))
@settings(max_examples=50)
def test_the_store_stays_within_its_memory(outputs, tokens_of_memory):
    d = drafter(tokens_of_memory * BYTES_PER_TOKEN)
    for index, output in enumerate(outputs):
        d.begin(str(index), [1], GREEDY)
        d.extend(str(index), output)
        d.end(str(index), keep=True)
        assert d.memory_bytes() <= tokens_of_memory * BYTES_PER_TOKEN


@given(
    st.lists(TOKENS, min_size=1, max_size=60),
    st.lists(st.lists(TOKENS, max_size=5), max_size=10),
    st.integers(0, 9),
)
def test_drafts_are_bounded_and_their_tokens_have_been_seen(prompt, more, limit):
    d = drafter()
    d.begin("a", prompt, GREEDY)
    seen = list(prompt)
    for tokens in more:
        d.extend("a", tokens)
        seen += tokens
        draft = ask(d, "a", limit)
        assert len(draft.tokens) == len(draft.confidences) <= limit
        assert all(0.0 <= c <= 1.0 for c in draft.confidences)
        assert set(draft.tokens) <= set(seen)


def test_an_unknown_request_is_ignored():
    d = drafter()
    d.extend("x", [1])
    d.end("x", keep=True)
    assert ask(d, "x", 4).tokens == ()


def test_what_a_store_found_helps_its_request_alone_and_from_the_first_token_on():
    d = drafter()
    found = [pack_tokens([8, 9, 10, 11, 12, 13]), pack_tokens([8, 9, 77, 78, 79])]
    d.begin("a", [7, 8, 9], GREEDY, DraftHints(recalled=found))
    d.begin("b", [7, 8, 9], GREEDY)
    assert ask(d, "a", 4).tokens == (10, 11, 12, 13)  # the likeliest goes first
    assert ask(d, "b", 4).tokens == ()
    d.extend("a", [77])
    assert ask(d, "a", 4).tokens == (78, 79)
    d.end("a", keep=False)
    d.begin("a", [7, 8, 9], GREEDY)
    assert ask(d, "a", 4).tokens == ()
