"""The daemon's side: whose answers help whom, what a request waits for, and what damaged values cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.draft_store import DraftStoreOptions
from orchestrator.daemon.draft_store.breaker import Breaker
from orchestrator.daemon.draft_store.codec import MAX_ENTRY_TOKENS, DamagedValue, decode_answer, encode_answer
from orchestrator.daemon.draft_store.port import Entry, StoreFailed
from orchestrator.daemon.draft_store.service import MIN_TOKENS, MOST_TOKENS, DraftStoreService
from orchestrator.daemon.draft_store.sketch import SKETCH_BLOCKS, count_least_shared, sketch_prompt
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.packed_tokens import unpack_tokens
from tests.api.support import READY
from tests.support.ready import change_ready

SCOPE = b"scope"


class Shelf:
    """A store in memory that can be made to wait or to fail; its rules are those of the port."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails = False
        self.asked = 0

    async def find_answers(self, blocks: Sequence[str], least: int, most: int) -> list[bytes]:
        self.asked += 1
        await self.open.wait()
        if self.fails:
            raise StoreFailed("gone")
        shared = {entry.entry_id: len({*entry.blocks} & {*blocks}) for entry in self.entries}
        found = [entry for entry in self.entries if shared[entry.entry_id] >= least]
        return [entry.value for entry in sorted(found, key=lambda entry: -shared[entry.entry_id])][:most]

    async def keep(self, entry: Entry) -> None:
        await self.open.wait()
        if self.fails:
            raise StoreFailed("gone")
        self.entries.append(entry)

    async def close(self) -> None:
        pass


def service_of(shelf: Shelf, *, shared: bool = False, wait_s: float = 30.0) -> DraftStoreService:
    options = DraftStoreOptions(shared=shared, wait_ms=wait_s * 1000.0)
    return DraftStoreService(shelf, "disk", "a shelf", options, SystemClock())


PROMPT = list(range(100, 140))
ANSWER = list(range(500, 540))


def ask(owner: str = "", prompt: Sequence[int] = tuple(PROMPT)) -> Submit:
    return Submit("r", [*prompt], 10, owner=owner)


async def wait_written(service: DraftStoreService) -> None:
    async with asyncio.timeout(30):
        while not service.view().written:  # noqa: ASYNC110 -- a count has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("shared", "others"), [(False, 0), (True, 1)])
async def test_answers_help_their_key_and_others_only_where_that_is_wanted(shared: bool, others: int):
    service = service_of(Shelf(), shared=shared)
    service.remember(service.sketch(ask("ann"), READY), PROMPT, ANSWER)
    await wait_written(service)
    mine = await service.recall(service.sketch(ask("ann"), READY))
    assert [unpack_tokens(one) for one in mine] == [[*PROMPT[-8:], *ANSWER]]
    assert len(await service.recall(service.sketch(ask("bob"), READY))) == others
    await service.close()


@pytest.mark.parametrize("field", ["source", "model_digest", "vocabulary_fingerprint", "class_fingerprint", "weights"])
async def test_another_model_revision_or_class_shares_nothing(field: str):
    service = service_of(Shelf(), shared=True)
    other = change_ready(READY, **{field: "other"})
    assert not {*service.sketch(ask(), READY)} & {*service.sketch(ask(), other)}
    await service.close()


async def test_a_slow_store_is_not_waited_for_and_a_failing_one_is_left_alone():
    shelf = Shelf()
    service = service_of(shelf, wait_s=0.01)
    blocks = service.sketch(ask(), READY)
    shelf.open.clear()
    assert await service.recall(blocks) == []
    assert service.view().late == 1
    shelf.open.set()
    shelf.fails = True
    patient = service_of(shelf)
    for _ in range(10):
        assert await patient.recall(blocks) == []
    view = patient.view()
    assert (view.state, view.problem, view.errors) == ("away", "gone", 3)
    assert view.skipped == 7
    await patient.close()
    await service.close()


async def test_a_full_queue_drops_and_counts():
    shelf = Shelf()
    shelf.open.clear()
    service = service_of(shelf)
    blocks = service.sketch(ask(), READY)
    for number in range(300):
        service.remember(blocks, PROMPT, [*ANSWER, number])
    assert service.view().dropped == 300 - 256
    service.remember(blocks, PROMPT, ANSWER[: MIN_TOKENS - 1])
    assert service.view().dropped == 300 - 256
    shelf.open.set()
    await service.close()
    assert len(shelf.entries) == 256


async def test_a_lookup_that_closing_cuts_short_costs_drafts_alone_and_a_closed_store_keeps_nothing():
    shelf = Shelf()
    service = service_of(shelf)
    blocks = service.sketch(ask(), READY)
    shelf.open.clear()
    waiting = asyncio.create_task(service.recall(blocks))
    async with asyncio.timeout(30):
        while not shelf.asked:  # noqa: ASYNC110 -- a count has no event
            await asyncio.sleep(0.01)
    await service.close()
    assert await waiting == []
    assert service.view().skipped == 1
    shelf.open.set()
    service.remember(blocks, PROMPT, ANSWER)
    assert service.view().waiting == 0
    assert await service.recall(blocks) == []
    assert (shelf.asked, shelf.entries) == (1, [])


async def test_a_request_is_given_no_more_than_its_share():
    shelf = Shelf()
    service = service_of(shelf)
    blocks = service.sketch(ask(), READY)
    for number in range(6):
        shelf.entries.append(Entry(str(number), blocks, encode_answer([number] * 900)))
    shelf.entries.insert(0, Entry("bad", blocks, b"OD1 but no answer"))
    found = [unpack_tokens(one) for one in await service.recall(blocks)]
    assert sum(map(len, found)) == MOST_TOKENS
    assert service.view().damaged == 1
    await service.close()


def test_prompts_that_are_mostly_the_same_share_blocks_and_strangers_do_not():
    draw = random.Random(3)
    prompt = [draw.randrange(50_000) for _ in range(200)]
    alike = [*prompt[:150], *(draw.randrange(50_000) for _ in range(20)), *prompt[150:]]
    stranger = [draw.randrange(50_000) for _ in range(200)]
    mine = {*sketch_prompt(prompt, SCOPE)}
    assert len(mine) == SKETCH_BLOCKS
    assert len(mine & {*sketch_prompt(alike, SCOPE)}) >= count_least_shared([*mine])
    assert not mine & {*sketch_prompt(stranger, SCOPE)}
    assert sketch_prompt([], SCOPE) == []
    assert len(sketch_prompt([1, 2], SCOPE)) == 1
    assert sketch_prompt([1, 2], SCOPE) != sketch_prompt([1, 3], SCOPE)


def test_a_value_comes_back_whole_or_not_at_all():
    value = encode_answer([*range(3000)])
    assert unpack_tokens(decode_answer(value)) == [*range(MAX_ENTRY_TOKENS)]
    for damaged in (b"", value[:-1], b"XX1" + value[3:], value[:20] + bytes([value[20] ^ 1]) + value[21:]):
        with pytest.raises(DamagedValue):
            decode_answer(damaged)


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


def test_a_breaker_lets_one_try_after_a_while_that_grows():
    clock = HandClock()
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.may_ask()
        breaker.observe_failure("gone")
    waits = []
    for _ in range(9):
        started_s = clock.now_s
        while not breaker.may_ask():
            clock.now_s += 0.5
        assert not breaker.may_ask()  # one tries for all
        waits.append(clock.now_s - started_s)
        breaker.observe_failure("gone")
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 30.0
    breaker.observe_success()
    assert breaker.may_ask()
    assert breaker.why == ""
