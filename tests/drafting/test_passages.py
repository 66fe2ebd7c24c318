"""Stores of documents: what is found is what is there, damaged files are refused, and useless stores rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.worker.drafting.index import IndexDrafter
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.passages import MATCH, SEAM, Passages, order_places, write_passages
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft, DraftHints
from policies.sampling import Sampling

GREEDY = Sampling()
VOCABULARY = "words"
DOCUMENT = [*range(100, 160), *range(200, 230)]


def store_of(directory: Path, *documents: Sequence[int]) -> Path:
    path = directory / "handbook.drafts"
    write_passages(path, documents, vocabulary=VOCABULARY, source="a directory")
    return path


def drafter_over(path: Path) -> IndexDrafter:
    return IndexDrafter(path, "handbook", SystemClock(), name="index-handbook", vocabulary=VOCABULARY)


def ask(drafter: IndexDrafter, key: str = "a", *, round_ms: float = 0.0, fixed: bool = True) -> Draft:
    return drafter.propose([Ask(key, 6, round_ms=round_ms, fixed=fixed)])[0]


def longest_match(documents: Sequence[Sequence[int]], context: Sequence[int]) -> tuple[int, set[tuple[int, ...]]]:
    """The length of the longest match of the context's end, and what follows its occurrences, by looking everywhere."""
    best = 0
    follow: set[tuple[int, ...]] = set()
    for text in documents:
        for place in range(1, len(text) + 1):
            length = 0
            while length < min(place, len(context), MATCH) and text[place - length - 1] == context[-length - 1]:
                length += 1
            if length > best:
                best, follow = length, set()
            if length == best:
                follow.add(tuple(text[place : place + 3]))
    return best, follow


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=50),
)
def test_the_longest_match_is_found_as_by_looking_everywhere(tmp_path_factory, documents, context):
    passages = Passages(store_of(tmp_path_factory.mktemp("store"), *documents), VOCABULARY)
    length, follow = longest_match(documents, context)
    found = passages.find_matches(context, 16, 1)
    passages_read = {tuple(passages.read(one.place, 3)) for one in found}
    passages.close()
    assert {one.length for one in found} == ({length} if length else set())
    assert passages_read <= follow
    assert bool(found) == bool(length)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_places_are_in_the_order_of_the_tokens_before_them(tokens):
    ordered = order_places(np.array(tokens, np.uint32)).tolist()
    keys = [tokens[max(0, place - MATCH) : place][::-1] for place in ordered]
    assert sorted(ordered) == list(range(1, len(tokens) + 1))
    assert keys == sorted(keys)


def test_a_quoted_passage_is_drafted_up_to_the_end_of_its_document(tmp_path):
    drafter = drafter_over(store_of(tmp_path, DOCUMENT, [7, 8, 9]))
    drafter.begin("a", [1, 2, 100, 101, 102], GREEDY)
    assert ask(drafter).tokens == tuple(range(103, 109))
    drafter.extend("a", [227, 228])
    assert ask(drafter).tokens == (229,)
    drafter.extend("a", [229])
    assert ask(drafter) == NOTHING
    drafter.extend("a", [500, 501])
    assert ask(drafter) == NOTHING
    drafter.end("a", keep=True)
    assert ask(drafter) == NOTHING


def test_a_request_names_the_stores_that_it_is_drafted_from(tmp_path):
    drafter = drafter_over(store_of(tmp_path, DOCUMENT))
    for key, stores, drafted in (("a", None, True), ("b", [], False), ("c", ["handbook"], True), ("d", ["x"], False)):
        drafter.begin(key, [100, 101, 102], GREEDY, DraftHints(stores=stores))
        assert bool(ask(drafter, key).tokens) == drafted


def test_a_store_that_brings_nothing_is_asked_seldom_until_it_does(tmp_path):
    drafter = drafter_over(store_of(tmp_path, DOCUMENT))
    drafter.begin("a", [1, 2], GREEDY)

    def count_looks(rounds: int, taken: Sequence[int]) -> int:
        before = drafter.states()[0].rounds
        for _ in range(rounds):
            ask(drafter, round_ms=0.05, fixed=False)
            drafter.extend("a", taken)
        return drafter.states()[0].rounds - before

    count_looks(2000, [500])
    assert count_looks(160, [500]) == 10
    drafter.begin("b", DOCUMENT[:3], GREEDY)
    before = drafter.states()[0].rounds
    for token in DOCUMENT[3:] * 8:
        ask(drafter, "b", round_ms=50.0, fixed=False)
        drafter.extend("b", [token])
    assert drafter.states()[0].rounds - before > 4 * len(DOCUMENT)


def test_what_is_no_store_of_this_vocabulary_is_refused_with_a_way_out(tmp_path):
    path = store_of(tmp_path, DOCUMENT)
    whole = path.read_bytes()
    with pytest.raises(MappedFileUnusable, match=r"another vocabulary.*outrider drafts index"):
        Passages(path, "other words")
    for damaged in (b"", b"OUTRIDX1", whole[:-4], whole + b"more", b"text" + whole, whole.replace(b"{", b"[", 1)):
        path.write_bytes(damaged)
        with pytest.raises(MappedFileUnusable, match="outrider drafts index"):
            Passages(path, VOCABULARY)
    with pytest.raises(MappedFileUnusable, match="No such file"):
        Passages(tmp_path / "missing", VOCABULARY)


def test_a_store_is_replaced_whole_and_what_is_mapped_stays(tmp_path):
    path = store_of(tmp_path, DOCUMENT)
    mapped = Passages(path, VOCABULARY)
    store_of(tmp_path, [1, 2, 3])
    assert mapped.read(1, 4) == DOCUMENT[1:5]
    assert mapped.header.tokens == len(DOCUMENT) + 1
    assert Passages(path, VOCABULARY).read(0, 9) == [1, 2, 3]
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert SEAM not in mapped.read(0, 10_000)


class HandClock(SystemClock):
    """Time that goes on by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


def test_a_store_that_was_made_anew_is_taken_as_a_sequence_begins_and_a_worse_one_never_is(tmp_path):
    clock = HandClock()
    path = store_of(tmp_path, DOCUMENT)
    drafter = IndexDrafter(path, "handbook", clock, name="index-handbook", vocabulary=VOCABULARY, most_bytes=4096)

    def draft_behind(tokens: Sequence[int]) -> tuple[int, ...]:
        clock.now_s += 2.0
        drafter.begin("a", tokens, GREEDY)
        return ask(drafter).tokens

    assert draft_behind([100, 101]) == (102, 103, 104, 105, 106, 107)
    store_of(tmp_path, [7, 8, 100, 101, 40, 41])
    assert draft_behind([100, 101]) == (40, 41)
    assert drafter.memory_bytes() == drafter.states()[0].memory_bytes == Passages(path, VOCABULARY).size_bytes
    write_passages(path, [[100, 101, 50, 51]], vocabulary="other words", source="")
    assert draft_behind([100, 101]) == (40, 41)
    write_passages(path, [[100, 101, *range(1000)]], vocabulary=VOCABULARY, source="")  # more than 4096 bytes
    assert draft_behind([100, 101]) == (40, 41)
    path.write_bytes(b"damaged")
    assert draft_behind([100, 101]) == (40, 41)
    path.unlink()
    assert draft_behind([100, 101]) == (40, 41)
