"""Statistics that grow: counted for later workers, bounded, apart by owner, and never a failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.worker.drafting.grown import GrownFile, GrownStatistics
from orchestrator.worker.drafting.port import Ask, DraftHints
from orchestrator.worker.drafting.statistics import Entries, Guess, merge_entries
from orchestrator.worker.drafting.suffix import SuffixDrafter
from policies.sampling import Sampling

VOCABULARY = "words"
OUTPUT = [10, 11, 12, 13, 14, 15, 16, 17] * 20
entries_of = st.dictionaries(st.integers(1, 30), st.tuples(st.integers(0, 5), st.integers(0, 255)), max_size=20)


def open_grown(path: Path, *, shared: bool = False) -> GrownStatistics:
    return GrownStatistics(GrownFile(path, model="toy", vocabulary=VOCABULARY), SystemClock(), shared=shared)


def serve(path: Path, owner: str = "", *, outputs: int = 10, shared: bool = False) -> None:
    """Let a worker live and end, whose target said the same to one owner again and again."""
    grown = open_grown(path, shared=shared)
    for _ in range(outputs):
        grown.add(grown.find_scope(owner), [1, 2, 3, *OUTPUT], 3)
    grown.close()


def look(path: Path, owner: str, context: Sequence[int], *, shared: bool = False) -> Guess | None:
    grown = open_grown(path, shared=shared)
    guess = grown.statistics.look(context, grown.find_scope(owner)) if grown.statistics is not None else None
    grown.close()
    return guess


def table(entries: dict[int, tuple[int, int]]) -> Entries:
    keys = sorted(entries)
    return Entries(
        np.array(keys, np.uint64),
        np.array([entries[key][0] for key in keys], np.uint32),
        np.array([entries[key][1] / 255 for key in keys], np.float32),
    )


def test_the_next_worker_knows_what_this_ones_target_said(tmp_path):
    path = tmp_path / "x.grown"
    assert look(path, "", [10, 11]) is None
    serve(path)
    guess = look(path, "", [10, 11])
    assert guess is not None
    assert guess.token == 12
    assert guess.chance > 0.5
    assert path.stat().st_mode & 0o077 == 0


def test_a_draft_begins_with_what_an_earlier_worker_counted(tmp_path):
    serve(tmp_path / "x")
    grown = open_grown(tmp_path / "x")
    own = SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock(), grown=grown)
    own.begin("a", [90, 10], Sampling())
    assert own.propose([Ask("a", 3)])[0].tokens == (11, 12, 13)
    (state,) = own.states()
    assert "1600 tokens of toy" in state.source
    own.close()


def test_what_one_owner_is_answered_helps_no_other_unless_it_is_shared(tmp_path):
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    serve(apart, "key-1")
    serve(shared, "key-1", shared=True)
    assert look(apart, "key-1", [10, 11]) is not None
    for owner in ("key-2", ""):
        assert look(apart, owner, [10, 11]) is None
        assert look(shared, owner, [10, 11], shared=True) is not None


def test_a_drafter_looks_in_the_entries_of_its_requests_owner(tmp_path):
    serve(tmp_path / "x", "key-1")
    own = SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock(), grown=open_grown(tmp_path / "x"))
    for owner, tokens in (("key-1", (11, 12)), ("key-2", ())):
        own.begin(owner, [90, 10], Sampling(), DraftHints(owner=owner))
        assert own.propose([Ask(owner, 2)])[0].tokens == tokens
    own.close()


def test_lives_add_up_and_few_tokens_write_nothing(tmp_path):
    path = tmp_path / "x"
    serve(path, outputs=1)
    assert not path.exists()
    serve(path)
    serve(path, "key-1")
    assert look(path, "", [10, 11]) is not None
    assert look(path, "key-1", [10, 11]) is not None
    grown = open_grown(path)
    assert grown.statistics is not None
    assert grown.statistics.header.card.tokens == 2 * 10 * len(OUTPUT)
    grown.close()


def test_workers_that_end_together_lose_nothing(tmp_path):
    path = tmp_path / "x"
    lives = [threading.Thread(target=serve, args=(path, f"key-{number}")) for number in range(4)]
    for life in lives:
        life.start()
    for life in lives:
        life.join()
    assert all(look(path, f"key-{number}", [10, 11]) is not None for number in range(4))


def test_a_damaged_file_is_put_aside_with_a_line_and_grows_anew(tmp_path, capsys):
    path = tmp_path / "x"
    serve(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert look(path, "", [10, 11]) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert "is damaged" in line
    assert "put aside as x.damaged" in line
    assert (tmp_path / "x.damaged").exists()
    serve(path)
    assert look(path, "", [10, 11]) is not None


def test_a_place_that_cannot_be_written_costs_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("no directory")
    serve(tmp_path / "file" / "x")
    assert "statistics do not grow" in capsys.readouterr().out


@settings(deadline=None)
@given(st.lists(entries_of, min_size=1, max_size=4), st.integers(1, 25))
def test_of_several_tables_the_surest_entries_stay(tables, most):
    merged = merge_entries([table(entries) for entries in tables], most)
    every: dict[int, float] = {}
    for entries in tables:
        for key, (_, chance) in entries.items():
            every[key] = max(every.get(key, 0.0), float(np.float32(chance / 255)))
    keys = merged.keys.tolist()
    assert keys == sorted(set(keys))
    assert len(keys) == min(most, len(every))
    kept = dict(zip(keys, merged.chances.tolist(), strict=True))
    assert all(kept[key] == np.float32(every[key]) for key in keys)
    assert all(every[key] <= min(kept.values()) for key in set(every) - set(keys)) if kept else True
    for key, token in zip(keys, merged.tokens.tolist(), strict=True):
        assert any(entries.get(key, (None,))[0] == token for entries in tables)


def test_an_output_beyond_the_bound_pushes_out_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.worker.drafting.grown._MOST_TOKENS", 2_000)
    grown = open_grown(tmp_path / "x")
    for number in range(100):
        grown.add(0, [1, 2, 3, *[number] * 150], 3)
    assert grown.memory_bytes() <= 4 * 2_000
    grown.close()
    assert look(tmp_path / "x", "", [99, 99]) is not None
    assert look(tmp_path / "x", "", [5, 5]) is None
    assert os.listdir(tmp_path) in (["x", "x.lock"], ["x.lock", "x"])
