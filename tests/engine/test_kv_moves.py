"""A request moves from one decode loop to another with its KV cache, and says what it would have said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from adapters.contract import CapacityError, LoadedModel
from adapters.kv_blocks import BlockPool
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Grammar, KvPages, Submit
from orchestrator.protocol.events import MovedIn, MovedOut
from orchestrator.protocol.shared_memory import SharedMemories, SharedMemoryFailed
from orchestrator.worker.engine.kv_transfer.intake import KvIntake, TakenPages
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.support.kv_moves import MovingLoop
from tests.support.loops import END, alone, decode, loop_over, suffix, toy

MOST = 1 << 30
FORMAT = "toy"
PLAIN = Submit("r", [60, 32, 101] * 9, 60, stop_tokens=[END])
SEEDED = msgspec.structs.replace(PLAIN, sampling=Sampling(0.9, top_p=0.95, seed=7))


@pytest.fixture
def memories() -> Iterator[SharedMemories]:
    kept = SharedMemories()
    yield kept
    kept.close()


def movable(model: LoadedModel, drafter=None, kv_format: str = FORMAT, **options) -> MovingLoop:
    return MovingLoop(loop_over(model, drafter, **options), kv_format)


@dataclass
class Moved:
    """What came of a move: both workers' words, and all tokens."""

    out: MovedOut
    into: list[MovedIn]
    tokens: list[int]
    forwards: int = 0


def run_until(loop: DecodeLoop, request: Submit, count: int, into: list[int]) -> None:
    """Decode until so many tokens have come, or for `-count` rounds."""
    rounds = 0
    while len(into) < count or rounds < -count:
        for delta in loop.run_round().deltas:
            if delta.request_id == request.request_id:
                into.extend(delta.tokens)
        rounds += 1


def take(second: MovingLoop, request: Submit) -> tuple[Submit, TakenPages | None, str]:
    assert request.pages is not None
    plain = msgspec.structs.replace(request, pages=None)
    try:
        data = second.mover.read(request.pages, [*request.prompt, *request.committed])
    except SharedMemoryFailed as error:
        return plain, None, str(error)
    return plain, second.take(request.pages.positions, data), ""


def move(first: MovingLoop, second: MovingLoop, request: Submit, count: int, memories: SharedMemories) -> Moved:
    """Decode `count` tokens at the first, and the rest at the second."""
    tokens = list(request.committed)
    assert first.loop.submit(request) is None
    run_until(first.loop, request, count, tokens)
    out = first.move_out(request.request_id, memories.create("k", MOST))
    assert first.loop.idle
    rest = msgspec.structs.replace(request, committed=tokens, pages=out.pages)
    taken = None
    if out.pages is not None:
        rest, taken, why = take(second, rest)
        assert not why
    memories.remove("k")
    assert second.loop.submit(rest, None, taken) is None
    forwards = 0
    while not second.loop.idle:
        done = second.loop.run_round()
        forwards += 1
        tokens = [*tokens, *done.deltas[0].tokens] if done.deltas else tokens
    return Moved(out, second.came, tokens, forwards)


@pytest.mark.parametrize("request_", [PLAIN, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("count", [1, 4, 5, 6, 21, 22, 37])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("length", [27, 48])
def test_a_moved_stream_says_what_an_undisturbed_one_says(request_, count, drafts, length, memories):
    """Prompts and answers end before, at and behind borders of blocks of 16; 27 tokens have rows that stand apart."""
    request = msgspec.structs.replace(request_, prompt=([60, 32, 101] * 16)[:length])
    first, second = (movable(toy(), suffix() if drafts else None) for _ in range(2))
    moved = move(first, second, request, count, memories)
    assert moved.tokens == alone([request])["r"]
    assert [one.why for one in moved.into] == [""]
    assert moved.out.pages is not None
    assert moved.out.pages.positions >= length + count - 1
    if not drafts:
        assert moved.forwards == len(moved.tokens) - count, "nothing was computed again"
    model = first.model
    assert model.free_blocks() == model.capabilities.total_blocks


def test_a_prompt_that_is_half_computed_goes_on_from_there(memories):
    request = msgspec.structs.replace(PLAIN, prompt=[60, 32, 101] * 100)
    moved = move(movable(toy(rows=64)), movable(toy(rows=64)), request, -2, memories)
    assert moved.out.pages is not None
    assert moved.out.pages.positions == 128
    assert moved.tokens == alone([request])["r"]
    assert moved.forwards == 3 + 59


def test_what_has_not_begun_and_what_nobody_knows_has_no_pages(memories):
    first = movable(toy())
    first.loop.submit(PLAIN)
    for key in ("r", "nobody"):
        out = first.move_out(key, memories.create(key, MOST))
        assert (out.pages, out.why) == (None, "nothing of it was computed")
    assert first.loop.idle


def test_a_prompt_that_is_being_scored_is_scored_again(memories):
    request = msgspec.structs.replace(PLAIN, prompt=[60, 32, 101] * 100, logprobs=1, prompt_logprobs=True)
    first = movable(toy(rows=64))
    first.loop.submit(request)
    first.loop.run_round()
    assert first.move_out("r", memories.create("k", MOST)).pages is None


def test_a_grammar_goes_on_behind_moved_pages(memories):
    request = msgspec.structs.replace(PLAIN, grammar=Grammar("regex", "[a-z ]{20,40}"))
    expected, _ = decode(loop_over(toy(), None), [request])
    assert move(movable(toy()), movable(toy()), request, 7, memories).tokens == expected["r"]


def test_streams_with_one_prompt_have_its_blocks_once_in_the_next_worker_too(memories):
    asks = [msgspec.structs.replace(PLAIN, request_id=f"r{n}", prompt=[60, 32, 101] * 100) for n in range(4)]
    first, second = movable(toy()), movable(toy())
    got: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
    for ask in asks:
        first.loop.submit(ask)
    while not all(len(tokens) >= 3 for tokens in got.values()):
        for delta in first.loop.run_round().deltas:
            got[delta.request_id].extend(delta.tokens)
    used = first.model.capabilities.total_blocks - first.model.free_blocks()
    for ask in asks:
        out = first.move_out(ask.request_id, memories.create("k", MOST))
        rest, taken, why = take(second, msgspec.structs.replace(ask, committed=got[ask.request_id], pages=out.pages))
        assert not why
        second.loop.submit(rest, None, taken)
    for delta in second.loop.run_round().deltas:
        got[delta.request_id].extend(delta.tokens)
    assert second.model.capabilities.total_blocks - second.model.free_blocks() <= used + 4
    while not second.loop.idle:
        for delta in second.loop.run_round().deltas:
            got[delta.request_id].extend(delta.tokens)
    assert got == alone(asks)


@pytest.mark.parametrize("obstacle", ["pages are short", "no blocks are left"])
def test_pages_that_cannot_be_taken_in_are_computed_again(obstacle, memories, monkeypatch):
    request = msgspec.structs.replace(PLAIN, prompt=[60, 32, 101] * 30)
    first, second = movable(toy()), movable(toy(kv_blocks=10))
    first.loop.submit(request)
    tokens: list[int] = []
    run_until(first.loop, request, 5, tokens)
    pages = first.move_out("r", memories.create("k", MOST)).pages
    rest, taken, _ = take(second, msgspec.structs.replace(request, committed=tokens, pages=pages))
    assert taken is not None
    if obstacle == "pages are short":
        taken = second.take(taken.positions, taken.data[:-8])
    else:  # admission sees to it that there are enough: nothing but a fault can take them
        monkeypatch.setattr(BlockPool, "extend", lambda *_: raise_capacity())
    second.loop.submit(rest, None, taken)
    while not second.loop.idle:
        tokens += [token for delta in second.loop.run_round().deltas for token in delta.tokens]
    (told,) = second.came
    assert told.length_bytes == 0
    assert ("bytes are not the pages" if obstacle == "pages are short" else "no blocks") in told.why
    assert tokens == alone([request])["r"]


def raise_capacity() -> int:
    raise CapacityError("no blocks are left")


def write_pages(memories: SharedMemories) -> tuple[KvPages, list[int]]:
    """Pages of a stream, and the tokens that it had."""
    first = movable(toy())
    first.loop.submit(PLAIN)
    tokens: list[int] = []
    run_until(first.loop, PLAIN, 20, tokens)
    pages = first.move_out("r", memories.create("k", MOST)).pages
    assert pages is not None
    return pages, [*PLAIN.prompt, *tokens]


def test_every_changed_byte_of_pages_is_noticed(memories):
    pages, tokens = write_pages(memories)
    mover = KvMover(toy(), FORMAT)
    assert len(mover.read(pages, tokens)) == pages.length_bytes
    file = memories._files["k"]
    for at in (0, 1, pages.length_bytes // 2, pages.length_bytes - 1):
        (before,) = os.pread(file, 1, at)
        os.pwrite(file, bytes([before ^ 16]), at)
        with pytest.raises(SharedMemoryFailed, match="checksum"):
            mover.read(pages, tokens)
        os.pwrite(file, bytes([before]), at)
    for other in ([*tokens[:3], 1, *tokens[4:]], [5, *tokens]):
        with pytest.raises(SharedMemoryFailed, match="checksum"):
            mover.read(pages, other)
    assert len(mover.read(pages, [*tokens, 5])) == pages.length_bytes


def test_pages_that_are_short_of_another_kind_or_gone_are_refused(memories):
    pages, tokens = write_pages(memories)
    mover = KvMover(toy(), FORMAT)
    with pytest.raises(SharedMemoryFailed, match="of 'toy', and here they are of 'other'"):
        KvMover(toy(), "other").read(pages, tokens)
    with pytest.raises(SharedMemoryFailed, match="cannot be moved"):
        KvMover(toy(), "").read(pages, tokens)
    with pytest.raises(SharedMemoryFailed, match="not of a sequence of"):
        mover.read(pages, tokens[: pages.positions])
    with pytest.raises(SharedMemoryFailed, match="are not the pages of"):
        mover.read(msgspec.structs.replace(pages, length_bytes=pages.length_bytes + 1), tokens)
    os.ftruncate(memories._files["k"], pages.length_bytes - 1)
    with pytest.raises(SharedMemoryFailed, match="bytes in the shared memory"):
        mover.read(pages, tokens)
    memories.remove("k")
    with pytest.raises(SharedMemoryFailed, match="cannot be used"):
        mover.read(pages, tokens)


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(memories, tmp_path):
    memory = memories.create("k", MOST)
    number = memories._files["k"]
    memories.remove("k")
    victim = tmp_path / "journal"
    victim.write_bytes(b"precious")
    file = os.open(victim, os.O_RDWR)
    if file != number:
        os.dup2(file, number)
    try:
        mover = KvMover(toy(), FORMAT)
        with pytest.raises(SharedMemoryFailed, match="not kept any more"):
            mover.write(0, [1], memory)
        assert victim.read_bytes() == b"precious"
    finally:
        for one in {number, file}:
            os.close(one)


def test_pages_stay_within_their_bound_and_leave_nothing_open(memories):
    before = len(os.listdir("/proc/self/fd"))
    first = movable(toy())
    first.loop.submit(PLAIN)
    run_until(first.loop, PLAIN, 20, [])
    out = first.move_out("r", memories.create("k", 512))
    assert out.pages is None
    assert "more than the 512 B allowed" in out.why
    memories.close()
    assert len(memories) == 0
    assert len(os.listdir("/proc/self/fd")) == before


class Intake:
    """A KvIntake over the simulated model, and what it has passed on and told."""

    def __init__(self) -> None:
        self.accepted: list[Submit] = []
        self.told: list[MovedIn] = []
        mover = KvMover(toy(), FORMAT)
        self.intake = KvIntake(mover, lambda one, _: self.accepted.append(one), self.told.append, SystemClock())

    def settle(self) -> None:
        self.intake._lane.submit(lambda: None).result(10.0)


def test_a_request_goes_on_whatever_came_of_its_pages(memories):
    pages, tokens = write_pages(memories)
    request = msgspec.structs.replace(PLAIN, committed=tokens[len(PLAIN.prompt) :], pages=pages)
    found = Intake()
    found.intake.add(request, 0.0)
    found.intake.add(msgspec.structs.replace(request, request_id="bad", committed=[1] * 30), 0.0)
    found.settle()
    assert [one.request_id for one in found.accepted] == ["r", "bad"]
    assert all(one.pages is None for one in found.accepted)
    assert [(one.request_id, one.length_bytes) for one in found.told] == [("bad", 0)]
    taken = found.intake.take("r")
    assert taken is not None
    assert np.array_equal(taken.data, KvMover(toy(), FORMAT).read(pages, tokens))
    assert found.intake.take("r") is None
    assert found.intake.take("bad") is None


def test_a_cancelled_request_leaves_no_pages_behind(memories):
    pages, tokens = write_pages(memories)
    request = msgspec.structs.replace(PLAIN, committed=tokens[len(PLAIN.prompt) :], pages=pages)
    found = Intake()
    found.intake.add(request, 0.0)
    found.settle()
    found.intake.cancel("r")
    assert found.intake.take("r") is None
    found.intake._lane.submit(found.intake.cancel, "later")
    found.intake.add(msgspec.structs.replace(request, request_id="later"), 0.0)
    found.intake.cancel("later")
    found.settle()
    assert found.intake.take("later") is None
    assert not found.intake._reading
