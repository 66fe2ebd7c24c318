"""Statistics: what is looked up is what was written, damaged files are refused, and drafts merge both sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft
from orchestrator.worker.drafting.statistics import (
    MOST_CONTEXT,
    MOST_TOKEN,
    Entries,
    Guess,
    Statistics,
    StatisticsCard,
    pack_context,
    write_statistics,
)
from orchestrator.worker.drafting.suffix import SuffixDrafter, choose_guess
from policies.sampling import Sampling

VOCABULARY = "words"
CARD = StatisticsCard("broad", "2026-11-25", 3, 400, 40, {"own": 0.25})
Table = Mapping[tuple[int, ...], tuple[int, float]]

tokens = st.integers(0, 5)
tables = st.dictionaries(
    st.lists(tokens, min_size=1, max_size=MOST_CONTEXT).map(tuple),
    st.tuples(tokens, st.floats(0.0, 1.0)),
    max_size=40,
)


def write(path: Path, table: Table) -> Path:
    """Write a table, whatever order it has."""
    ordered = sorted(table, key=pack_context)
    entries = Entries(
        np.array([pack_context(context) for context in ordered], np.uint64),
        np.array([table[context][0] for context in ordered], np.uint32),
        np.array([table[context][1] for context in ordered], np.float32),
    )
    write_statistics(path, entries, model="toy", vocabulary=VOCABULARY, card=CARD)
    return path


def look(statistics: Statistics, *context: int) -> int:
    found = statistics.look(context)
    assert found is not None
    return found.token


def drafter(path: Path | None) -> SuffixDrafter:
    statistics = Statistics(path, VOCABULARY) if path is not None else None
    return SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock(), statistics=statistics)


def draft(one: SuffixDrafter, text: Sequence[int], limit: int = 6) -> Draft:
    one.begin("a", text, Sampling())
    return one.propose([Ask("a", limit)])[0]


@given(tables, st.lists(tokens, max_size=8))
def test_the_longest_known_context_answers(tmp_path_factory, table, context):
    statistics = Statistics(write(tmp_path_factory.mktemp("s") / "x", table), VOCABULARY)
    ends = [tuple(context[-length:]) for length in range(MOST_CONTEXT, 0, -1) if length <= len(context)]
    known = next((table[end] for end in ends if end in table), None)
    found = statistics.look(context)
    statistics.close()
    assert (found is None) == (known is None)
    if found is not None and known is not None:
        assert found.token == known[0]
        assert found.chance == pytest.approx(known[1], abs=1 / 255)


def test_the_largest_token_has_a_key_of_its_own(tmp_path):
    table = {(MOST_TOKEN, MOST_TOKEN, MOST_TOKEN): (1, 0.5), (MOST_TOKEN, MOST_TOKEN): (2, 0.5), (0, 0): (3, 0.5)}
    statistics = Statistics(write(tmp_path / "x", table), VOCABULARY)
    assert look(statistics, 0, MOST_TOKEN, MOST_TOKEN) == 2
    assert look(statistics, *[MOST_TOKEN] * 4) == 1
    assert statistics.look([9, 0]) is None
    assert look(statistics, 5, 0, 0) == 3


@given(tables, st.lists(tokens, min_size=1, max_size=30), st.integers(0, 8))
def test_every_token_of_a_merged_draft_is_what_one_of_both_says(tmp_path_factory, table, text, limit):
    merged, alone = drafter(write(tmp_path_factory.mktemp("s") / "x", table)), drafter(None)
    found = draft(merged, text, limit)
    alone.begin("a", text, Sampling())
    assert len(found.tokens) == len(found.confidences) <= limit
    assert all(0.0 < one <= 1.0 for one in found.confidences)
    statistics = Statistics(write(tmp_path_factory.mktemp("t") / "x", table), VOCABULARY)
    for place, token in enumerate(found.tokens):
        known = statistics.look([*text, *found.tokens[:place]])
        if known is None or known.token != token:  # then the text has it behind an occurrence of the last token
            whole = [*text, *found.tokens]
            before = whole[len(text) + place - 1]
            assert token in [text[at + 1] for at in range(len(text) - 1) if text[at] == before]
    if not table:
        assert found.tokens == alone.propose([Ask("a", limit)])[0].tokens[: len(found.tokens)]
    merged.close()
    statistics.close()


@given(st.builds(Guess, tokens, st.floats(0.0, 1.0)), st.builds(Guess, tokens, st.floats(0.0, 1.0)))
def test_the_surer_guess_is_taken_and_two_alike_are_surer_than_one(one, other):
    found = choose_guess(one, other)
    assert found is not None
    assert found.chance >= max(one.chance, other.chance) - 1e-9
    assert found.chance <= 1.0
    assert found.token in (one.token, other.token)
    assert choose_guess(one, None) == choose_guess(None, one) == one


def test_statistics_go_on_where_the_text_says_nothing_and_lead_back_into_it(tmp_path):
    table: Table = {(7,): (8, 0.9), (8,): (1, 0.9), (4,): (9, 0.2)}
    text = [1, 2, 3, 4, 5, 6, 7]
    assert draft(drafter(None), text) == NOTHING
    found = draft(drafter(write(tmp_path / "x", table)), text)
    assert found.tokens[:5] == (8, 1, 2, 3, 4)  # from the statistics 8 and 1, then as the text went on
    assert found.drafter == "suffix"


def test_status_names_the_statistics_and_counts_what_is_mapped(tmp_path):
    path = write(tmp_path / "toy.statistics", {(1,): (2, 0.5)})
    state = drafter(path).states()[0]
    assert (state.source, state.memory_bytes) == (f"{path} (400 tokens of toy)", 13)
    assert state.planned_memory_bytes == 13


def test_what_cannot_be_used_is_refused_with_a_way_out(tmp_path):
    path = write(tmp_path / "x", {(1,): (2, 0.5), (1, 2): (3, 0.5)})
    whole = path.read_bytes()
    with pytest.raises(MappedFileUnusable, match=r"another vocabulary.*outrider drafts build"):
        Statistics(path, "other words")
    for damaged in (b"", b"OUTRIDS1", whole[:-4], whole + b"more", b"text" + whole, whole.replace(b"{", b"[", 1)):
        path.write_bytes(damaged)
        with pytest.raises(MappedFileUnusable, match="outrider drafts build"):
            Statistics(path, VOCABULARY)
    with pytest.raises(MappedFileUnusable, match="No such file"):
        Statistics(tmp_path / "missing", VOCABULARY)


def test_statistics_are_replaced_whole_and_what_is_mapped_stays(tmp_path):
    path = write(tmp_path / "x", {(1,): (2, 0.5)})
    mapped = Statistics(path, VOCABULARY)
    write(path, {(1,): (3, 0.5)})
    assert look(mapped, 1) == 2
    assert look(Statistics(path, VOCABULARY), 1) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
