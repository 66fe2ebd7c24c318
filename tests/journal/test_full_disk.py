"""A disk that others fill stops nothing that fits into the reserve, and what does not fit is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.daemon.journal.standing import choose_bodies
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from tests.journal.test_book import Hand, book_in, bound_journal, let_pass, open_answer, recover_all
from tests.support.small_disk import keep_full, small_disk

pytestmark = pytest.mark.asyncio

KIB = 1024
LIMITS = bound_journal(memory=64 * KIB * KIB, reserve=512 * KIB)
LARGE = LIMITS.reserve * 7 // 200  # tokens: they take 35 % of a segment


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 4 MiB."""
    with small_disk(tmp_path / "disk", 4) as path:
        yield path


def list_kinds(book: AnswerBook) -> list[str]:
    return [one.kind for one in book.view().problems]


def open_large(book: AnswerBook, name: str, tokens: int = LARGE):
    """An answer whose prompt has so many tokens of 5 bytes each."""
    submit = Submit(name, [2**31 + number for number in range(tokens)], max_tokens=9)
    answer = book.open(name, [submit], key="", owner="me", body="", created_s=0)
    assert answer is not None
    return answer


async def test_what_begins_on_a_full_disk_is_there_for_the_next_daemon_on_a_full_disk(disk):
    book = book_in(disk / "journal", limits=LIMITS)
    book.recover()
    before = open_answer(book, "a")
    with keep_full(disk):
        book.record(before, 0, Delta("", [1]))
        answer = open_answer(book, "b")
        for number in range(8000):  # more than a segment holds: several begin while the disk is full
            book.record(before, 0, Delta("", [number, number]))
            book.record(answer, 0, Delta("", [number]))
            book.flush()
        late = open_answer(book, "c")
        assert list_kinds(book) == []
        for _ in range(2):
            found = recover_all(disk / "journal")
            assert found["a"].choices[0].tokens == before.choices[0].tokens
            assert found["b"].choices[0].tokens == answer.choices[0].tokens
            assert found["c"].choices[0].submit == late.choices[0].submit


async def test_a_disk_that_is_full_at_the_start_is_told_and_tried_again(disk, caplog):
    clock = Hand()
    with keep_full(disk):
        book = book_in(disk / "journal", clock, LIMITS)
        book.recover()
        answer = open_answer(book, "a")
        book.record(answer, 0, Delta("", [1]))
        book.flush()
        assert list_kinds(book) == ["not_written", "reserve"]
        await let_pass(book, clock, 7)
        assert list_kinds(book) == ["not_written", "reserve"]
        assert "make room" in caplog.text
    await let_pass(book, clock, 6)
    assert list_kinds(book) == []
    assert book.view().allocated_bytes == LIMITS.reserve
    assert recover_all(disk / "journal")["a"].choices[0].tokens == [1]


@pytest.mark.parametrize("free_kib", [140, 300, 600])
async def test_where_the_whole_reserve_is_not_there_a_part_of_it_serves(disk, free_kib):
    """The disk is full but for so much when the daemon starts; then that is gone, too."""
    (disk / "others").write_bytes(b"x" * (4096 - free_kib) * KIB)
    book = book_in(disk / "journal", limits=LIMITS.model_copy(update={"reserve": 2048 * KIB}))
    book.recover()
    assert list_kinds(book) == ["reserve"]
    with keep_full(disk):
        answer = open_answer(book, "a")
        for number in range(3000):
            book.record(answer, 0, Delta("", [number]))
            book.flush()
        assert list_kinds(book) == ["reserve"]
        assert recover_all(disk / "journal")["a"].choices[0].tokens == list(range(3000))


@pytest.mark.parametrize("wanted_kib", [512, 8192], ids=["as-before", "raised"])
async def test_a_reserve_that_cannot_be_had_costs_nothing_of_what_the_last_daemon_left(disk, wanted_kib):
    """The daemon allocates before it reads, as preparing a model may fill the disk."""
    with keep_full(disk) as filler:
        os.truncate(filler, 4 * KIB * KIB - 300 * KIB)
        short = book_in(disk / "journal", limits=LIMITS)
        short.reserve()
        short.recover()
        assert short.view().allocated_bytes < LIMITS.reserve
        answer = open_answer(short, "a")
        short.record(answer, 0, Delta("", [1, 2, 3]))
        short.flush()
        assert "not_written" not in list_kinds(short)
        for _ in range(2):
            book = book_in(disk / "journal", limits=LIMITS.model_copy(update={"reserve": wanted_kib * KIB}))
            book.reserve()
            assert [one.choices[0].tokens for one in book.recover()] == [[1, 2, 3]]


async def test_on_a_full_disk_the_oldest_ended_answers_give_way_and_come_back(disk):
    clock = Hand()
    book = book_in(disk / "journal", clock, LIMITS)
    book.recover()
    with keep_full(disk):
        for name in ("a", "b"):
            ended = open_large(book, name, LARGE)
            book.record(ended, 0, Delta("", [1], "stop"))
        running = open_large(book, "c")
        book.record(running, 0, Delta("", [7]))
        book.flush()
        assert list_kinds(book) == []  # what gave way has been told whole, and its client is likely to be gone
        assert find_written(disk) == {"b", "c"}
        assert book.find_answer(request_id="a", owner="me") is not None  # this daemon has it in memory
    await let_pass(book, clock, 6)
    assert set(recover_all(disk / "journal")) == {"a", "b", "c"}


def find_written(disk: Path) -> set[str]:
    """What the next daemon would find, while this one goes on."""
    with small_disk(disk.with_name("copy"), 8) as other:
        copy = other / "journal"
        copy.mkdir()
        for file in (disk / "journal").iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        return set(recover_all(copy))


async def test_running_answers_that_do_not_fit_are_told_before_anybody_misses_them(disk, caplog):
    clock = Hand()
    book = book_in(disk / "journal", clock, LIMITS)
    book.recover()
    with keep_full(disk):
        answers = [open_large(book, name) for name in ("a", "b", "c")]
        for answer in answers:
            book.mark_busy(answer)
            book.record(answer, 0, Delta("", [5]))
        book.flush()
        assert list_kinds(book) == ["left_out"]
        assert book.view().left_out == 3 - len(find_written(disk))
        assert "running answers do not fit" in caplog.text
        assert "a" in find_written(disk)
    await let_pass(book, clock, 6)
    assert list_kinds(book) == []
    found = recover_all(disk / "journal")
    assert {name: one.choices[0].tokens for name, one in found.items()} == {"a": [5], "b": [5], "c": [5]}


async def test_with_room_more_is_kept_than_the_reserve_and_the_disk_has_it_back(disk):
    clock = Hand()
    book = book_in(disk / "journal", clock, LIMITS)
    book.recover()
    answers = [open_large(book, name) for name in ("a", "b", "c")]
    assert list_kinds(book) == []
    assert find_written(disk) == {"a", "b", "c"}
    for answer in answers:
        book.forget(answer)
    await let_pass(book, clock, 130)
    taken = sum(file.stat().st_blocks * 512 for file in (disk / "journal").iterdir())
    assert taken == LIMITS.reserve


async def test_a_memory_that_is_full_of_running_answers_is_told_for_a_minute():
    clock = Hand()
    book = AnswerBook(LIMITS.model_copy(update={"memory": 4000}), clock)
    book.mark_busy(open_answer(book, "a"))
    assert book.open("b", [Submit("b", [1], max_tokens=1)], key="", owner="me", body="", created_s=0) is None
    assert list_kinds(book) == ["memory"]
    await let_pass(book, clock, 61)
    assert list_kinds(book) == []


@given(sizes=st.lists(st.integers(0, 300), max_size=12), room=st.integers(0, 2000), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_what_is_chosen_fits_and_nothing_dearer_that_would_have_fitted_is_left(sizes, room, data):
    bodies = [bytes(size) for size in sizes]
    wanted = data.draw(st.permutations(range(len(sizes))))
    kept = choose_bodies(bodies, wanted, room)
    taken = [8 + sizes[index] for index in kept]
    assert sum(taken) <= room
    for place, index in enumerate(wanted):
        if index not in kept:
            dearer = sum(8 + sizes[other] for other in wanted[:place] if other in kept)
            assert dearer + 8 + sizes[index] > room
