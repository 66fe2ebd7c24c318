"""What the journal keeps, and what is left of it when writing was cut short."""

from __future__ import annotations

import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.config.model import JournalSection
from orchestrator.daemon.journal.book import AnswerBook, KeptAnswer
from orchestrator.daemon.journal.records import (
    HEAD_BYTES,
    Committed,
    CommittedTokens,
    Head,
    Opened,
    Record,
    decode_segment,
    encode_records,
)
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, RequestStats

pytestmark = pytest.mark.asyncio


def bound_journal(**bounds: int) -> JournalSection:
    """Return a journal's section with these bounds of bytes. What has ended is kept for a minute."""
    return JournalSection(ended_s=60.0, detached_s=1.0).model_copy(update=bounds)


STATS = RequestStats(3, 4, 2, 1, 1, 0.5, 1.5)
KIB = 1024
LIMITS = bound_journal(memory=4 * KIB * KIB, reserve=256 * KIB)
SALT = 7


@dataclass
class Hand:
    """A clock that is moved by hand."""

    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000.0


def book_in(directory: Path | None, clock: Hand | None = None, limits: JournalSection = LIMITS) -> AnswerBook:
    return AnswerBook(limits, clock or Hand(), directory)


def open_answer(book: AnswerBook, name: str, choices: int = 1, key: str = "", owner: str = "me") -> KeptAnswer:
    submits = [Submit(f"{name}-{index}", [1, 2, 3], max_tokens=100) for index in range(choices)]
    found = book.open(name, submits, key=key, owner=owner, body="digest", created_s=7)
    assert found is not None
    return found


def list_told(answer: KeptAnswer, choice: int = 0, split_at: int = 0) -> list[tuple[list[int], str]]:
    """All that a reader is told from the first token on."""
    found: list[tuple[list[int], str]] = []
    taken = 0
    while (delta := answer.choices[choice].tell(taken, split_at)) is not None:
        taken += len(delta.tokens)
        found.append((delta.tokens, delta.finish))
        if delta.finish:
            break
    return found


def recover_all(directory: Path) -> dict[str, KeptAnswer]:
    """What the next daemon finds."""
    book = book_in(directory)
    book.recover()
    found = {
        name: one for name in ("a", "b", "c") if (one := book.find_answer(request_id=name, owner="me")) is not None
    }
    book.close()
    return found


async def test_the_next_daemon_tells_the_same_in_the_same_pieces(tmp_path):
    book = book_in(tmp_path)
    book.recover()
    first, second = open_answer(book, "a", choices=2, key="k"), open_answer(book, "b")
    book.record(first, 0, Delta("", [5, 6]))
    book.record(first, 1, Delta("", [7]))
    book.record(first, 0, Delta("", [8], "stop", STATS))
    book.record(second, 0, Delta("", [9]))
    book.record(second, 0, Delta("", [], "deadline", STATS))
    book.flush()
    found = recover_all(tmp_path)  # the first one was not closed: it was killed
    assert list_told(found["a"], 0) == [([5, 6], ""), ([8], "stop")]
    assert list_told(found["a"], 1) == [([7], "")]
    assert list_told(found["b"]) == [([9], ""), ([], "deadline")]
    assert found["a"].choices[0].stats == STATS
    assert (found["a"].key, found["a"].created_s, found["a"].complete) == ("k", 7, False)
    assert found["b"].complete
    assert {one: list_told(answer) for one, answer in recover_all(tmp_path).items()} == {
        one: list_told(answer) for one, answer in found.items()
    }


async def test_a_reader_in_the_middle_of_a_piece_is_told_its_rest():
    book = book_in(None)
    answer = open_answer(book, "a")
    book.record(answer, 0, Delta("", [1, 2, 3, 4], "stop", STATS))
    assert list_told(answer, split_at=3) == [([1, 2, 3], ""), ([4], "stop")]


async def test_a_text_that_ended_wants_no_more_tokens(tmp_path):
    book = book_in(tmp_path)
    book.recover()
    answer = open_answer(book, "a")
    book.record(answer, 0, Delta("", [1, 2]))
    book.cut(answer, 0)
    book.flush()
    assert answer.complete
    assert recover_all(tmp_path)["a"].complete


async def test_answers_are_their_owners(tmp_path):
    book = book_in(None)
    mine, theirs = open_answer(book, "a", key="k"), open_answer(book, "b", key="k", owner="other")
    assert book.find_answer(key="k", owner="me") is mine
    assert book.find_answer(key="k", owner="other") is theirs
    assert book.find_answer(request_id="b", owner="me") is None


async def let_pass(book: AnswerBook, clock: Hand, seconds: int) -> None:
    """A daemon that runs looks every second."""
    for _ in range(seconds):
        clock.now_s += 1.0
        await book.tend()


async def test_what_nobody_asks_for_is_forgotten_in_time_and_leaves_the_disk(tmp_path):
    clock = Hand()
    book = book_in(tmp_path, clock)
    book.recover()
    read, unread = open_answer(book, "a"), open_answer(book, "b")
    book.mark_busy(read)
    book.record(unread, 0, Delta("", [424_242]))
    book.flush()
    await let_pass(book, clock, 61)
    assert book.find_answer(request_id="b", owner="me") is None
    assert book.find_answer(request_id="a", owner="me") is read
    await let_pass(book, clock, 61)
    assert not any(b"\xce\x00\x06\x79\x32" in file.read_bytes() for file in tmp_path.iterdir())  # 424242
    assert set(recover_all(Path(shutil.copytree(tmp_path, tmp_path.with_name("copy"))))) == {"a"}
    book.mark_idle(read)
    await let_pass(book, clock, 61)
    book.close()
    assert not any(any(file.read_bytes()) for file in tmp_path.iterdir())


async def test_time_in_which_the_machine_slept_lets_nothing_expire(tmp_path):
    clock = Hand()
    book = book_in(tmp_path, clock)
    book.recover()
    answer = open_answer(book, "a")
    await let_pass(book, clock, 30)
    for asleep_s in (61.0, 86_400.0):
        clock.now_s += asleep_s
        assert book.find_answer(request_id="a", owner="me") is answer
        await book.tend()
        assert book.find_answer(request_id="a", owner="me") is answer
    await let_pass(book, clock, 29)
    assert book.find_answer(request_id="a", owner="me") is answer
    await let_pass(book, clock, 2)
    assert book.find_answer(request_id="a", owner="me") is None


async def test_files_are_for_their_user_alone_and_take_their_reserve_and_no_more(tmp_path):
    limits = bound_journal(memory=64 * KIB, reserve=256 * KIB)
    book = book_in(tmp_path, limits=limits)
    book.recover()
    for number in range(400):
        answer = open_answer(book, f"r{number}")
        for _ in range(100):
            book.record(answer, 0, Delta("", list(range(1000, 1010))))
            book.flush()
        book.mark_idle(answer)
    files = list(tmp_path.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert sum(file.stat().st_blocks * 512 for file in files) <= 256 * KIB + 16 * KIB  # and what the file system adds
    assert len(book) < 10


async def test_without_room_a_request_is_served_all_the_same(tmp_path):
    book = book_in(tmp_path, limits=bound_journal(memory=5_000, reserve=KIB * KIB))
    book.recover()
    book.mark_busy(open_answer(book, "a"))
    book.mark_busy(open_answer(book, "b"))
    assert book.open("c", [Submit("c", [1], max_tokens=1)], key="", owner="me", body="", created_s=0) is None


def records_of(rounds: list[list[list[int]]]) -> list[Record]:
    """Two requests with these rounds."""
    records: list[Record] = [
        Opened(number, "ab"[number], "", "me", "", 0, [Submit("s", [1], max_tokens=9)]) for number in range(2)
    ]
    for tokens in rounds:
        records.append(Committed([CommittedTokens(number, 0, each) for number, each in enumerate(tokens)]))
    return records


def segment_of(records: list[Record], number: int = 1, snapshot: int = 0) -> tuple[bytes, list[int]]:
    """A segment of these, which began with the first `snapshot` of them, and where its head and its records end."""
    data = Head(number, SALT, len(encode_records(records[:snapshot], SALT))).encode()
    ends = [len(data)]
    for record in records:
        data += encode_records([record], SALT)
        ends.append(len(data))
    return data, ends


ROUNDS = st.lists(st.lists(st.lists(st.integers(0, 2**31), max_size=4), min_size=2, max_size=2), max_size=6)


@given(rounds=ROUNDS, torn=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_torn_segment_replays_all_but_the_torn_record(rounds, torn):
    whole = records_of(rounds)
    data, ends = segment_of(whole)
    assert decode_segment(data) == whole
    cut = torn.draw(st.integers(0, len(data)))
    told = decode_segment(data[:cut])
    assert told == (None if cut < HEAD_BYTES else whole[: sum(end <= cut for end in ends) - 1])
    assert decode_segment(data[:cut] + bytes(100)) == told  # what was allocated behind it is no record
    changed = bytearray(data)
    at = torn.draw(st.integers(0, len(data) - 1))
    changed[at] ^= torn.draw(st.integers(1, 255))
    assert decode_segment(bytes(changed)) == (None if at < HEAD_BYTES else whole[: sum(end <= at for end in ends) - 1])


@given(rounds=ROUNDS, last=ROUNDS, data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_nothing_of_a_files_last_use_counts(rounds, last, data):
    """Also where a record of it begins just where the new ones end."""
    old, new = records_of(last), records_of(rounds)
    salts = data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=2, max_size=2, unique=True))
    head = Head(2, salts[1], 0).encode()
    used_again = head + encode_records(new, salts[1]) + encode_records(old, salts[0])
    assert decode_segment(used_again) == new


async def test_torn_at_every_byte_of_its_last_record_the_journal_loses_that_one_alone(tmp_path):
    data, ends = segment_of(records_of([[[1], [2]], [[3, 4], [5]], [[6], []]]))
    for cut in range(ends[-2], ends[-1]):
        directory = tmp_path / str(cut)
        directory.mkdir()
        (directory / "0.segment").write_bytes(data[:cut])
        found = recover_all(directory)
        assert [found[name].choices[0].tokens for name in "ab"] == [[1, 3, 4], [2, 5]]
        # What follows is written where it can be read again.
        assert [recover_all(directory)[name].choices[0].tokens for name in "ab"] == [[1, 3, 4], [2, 5]]


@pytest.mark.parametrize("slot", [0, 1])
async def test_a_daemon_killed_while_it_begins_a_segment_loses_nothing(tmp_path, slot):
    data, _ = segment_of(records_of([[[1], [2]]]), number=4)
    snapshot, _ = segment_of(
        [Opened(0, "a", "", "me", "", 0, [Submit("s", [1], max_tokens=9)], [CommittedTokens(0, 0, [1], bounds=[1])])],
        number=5,
        snapshot=1,
    )
    for cut in range(0, len(snapshot), 3):
        directory = tmp_path / str(cut)
        directory.mkdir()
        (directory / f"{slot}.segment").write_bytes(data + bytes(50))
        (directory / f"{1 - slot}.segment").write_bytes(snapshot[:cut] + bytes(50))
        for _ in range(2):
            found = recover_all(directory)
            assert [found[name].choices[0].tokens for name in "ab"] == [[1], [2]]


async def test_what_is_recorded_while_another_answer_begins_a_segment_is_told_once(tmp_path):
    """The new segment has all of it, so the write that was due is not to bring it again."""
    book = book_in(tmp_path)
    book.recover()
    first = open_answer(book, "a")
    for number in range(40):  # whichever of them fills the segment
        book.record(first, 0, Delta("", [number]))
        answer = book.open(
            f"r{number}", [Submit("s", [1] * 30_000, max_tokens=1)], key="", owner="me", body="", created_s=0
        )
        assert answer is not None
        book.forget(answer)
        book.flush()
    assert recover_all(tmp_path)["a"].choices[0].tokens == list(range(40))


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond this: what a full disk does to a write, a short one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


async def test_where_nothing_can_be_written_answers_go_on_and_are_written_again_when_there_is_room(tmp_path, caplog):
    book = book_in(tmp_path)
    book.recover()
    answer = open_answer(book, "a")
    book.record(answer, 0, Delta("", [1]))
    book.flush()
    with small_files(HEAD_BYTES - 20):
        for token in range(2, 12):
            book.record(answer, 0, Delta("", [token] * 10))
            book.flush()
        assert [one.kind for one in book.view().problems] == ["not_written"]
        assert answer.choices[0].tokens[:11] == [1] + [2] * 10
        await book.tend()
        assert book.view().problems
    assert sum("the journal cannot be written" in one.message for one in caplog.records) == 1
    await book.tend()
    assert book.view().problems == ()
    assert "the journal is written again" in caplog.text
    assert recover_all(tmp_path)["a"].choices[0].tokens == answer.choices[0].tokens
