"""What users were answered of late: whose it is, how much is kept, and for how long."""

from __future__ import annotations

from orchestrator.daemon.draft_store.codec import MAX_ENTRY_TOKENS
from orchestrator.daemon.draft_store.recent import KEPT_S, MOST_USERS, RecentOutputs, join_answers
from orchestrator.daemon.draft_store.service import MIN_TOKENS, MOST_ANSWERS, MOST_TOKENS
from orchestrator.protocol.packed_tokens import pack_tokens, unpack_tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


def answer(number: int, length: int = MIN_TOKENS) -> list[int]:
    return [number] * length


def test_answers_are_the_users_of_one_key_newest_first_and_bounded():
    recent = RecentOutputs(Clock())
    for number in range(MOST_ANSWERS + 2):
        recent.keep("key", "ann", answer(number))
    recent.keep("key", "ann", answer(99, MIN_TOKENS - 1))
    recent.keep("key", "", answer(98))
    found = [unpack_tokens(one)[0] for one in recent.find_answers("key", "ann")]
    assert found == [5, 4, 3, 2], "too short ones are not kept, and the oldest go"
    assert (
        recent.find_answers("other key", "ann")
        == recent.find_answers("key", "bob")
        == recent.find_answers("key", "")
        == []
    )
    assert recent.view().given == 1
    recent.keep("key", "ann", answer(7, 3 * MAX_ENTRY_TOKENS))
    assert len(unpack_tokens(recent.find_answers("key", "ann")[0])) == MAX_ENTRY_TOKENS


def test_those_who_asked_last_are_remembered_and_not_for_ever():
    clock = Clock()
    recent = RecentOutputs(clock)
    for number in range(MOST_USERS + 1):
        recent.keep("", f"user {number}", answer(number))
    assert recent.view().users == MOST_USERS
    assert recent.find_answers("", "user 0") == []
    assert recent.find_answers("", "user 1") == [pack_tokens(answer(1))]
    clock.now_s = KEPT_S + 1
    assert recent.find_answers("", "user 1") == []
    assert recent.view().users == MOST_USERS - 1


def test_a_request_is_given_as_much_as_from_the_store_alone():
    long = [pack_tokens(answer(number, MAX_ENTRY_TOKENS)) for number in range(6)]
    found = join_answers(long[:3], [long[2], *long[3:]])
    assert sum(len(unpack_tokens(one)) for one in found) == MOST_TOKENS
    short = [pack_tokens(answer(number)) for number in range(9)]
    joined = join_answers(short[:3], [short[2], *short[4:]])
    assert [unpack_tokens(one)[0] for one in joined] == [2, 4, 0, 1]
    assert join_answers(short[:2], []) == short[:2]
    assert join_answers([], short[:5]) == short[:MOST_ANSWERS]
