"""Where answers are kept: both kinds find, order, bound and forget alike, and survive what is done to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.draft_store import DraftStoreOptions
from orchestrator.daemon.draft_store.disk_store import DiskDraftStore
from orchestrator.daemon.draft_store.port import DraftStore, Entry, StoreFailed, StoreRefused
from orchestrator.daemon.draft_store.redis_store import PREFIX, RedisDraftStore, RedisPassword
from tests.support.redis_server import RedisServer, needs_redis, running_redis


def bound_store(**bounds: float) -> DraftStoreOptions:
    """Return options of a store that hold little, and wait long for Redis."""
    roomy = {"max_entries": 100, "max_size": 1 << 20, "expire_s": 600.0, "timeout_ms": 20_000.0}
    return DraftStoreOptions().model_copy(update=roomy | bounds)


ROOM = bound_store()
NO_PASSWORD = RedisPassword()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Kind:
    """Opens stores of one kind over the same place."""

    def __init__(self, name: str, server: RedisServer | None, directory: Path) -> None:
        self._name, self._server, self._directory = name, server, directory
        self.opened: list[DraftStore] = []

    def open(self, bounds: DraftStoreOptions = ROOM) -> DraftStore:
        store: DraftStore
        if self._server is None:
            store = DiskDraftStore(self._directory / "drafts.sqlite", bounds, SystemClock())
        else:
            store = RedisDraftStore(self._server.url, NO_PASSWORD, bounds)
        self.opened.append(store)
        return store


@pytest.fixture(params=["disk", pytest.param("redis", marks=needs_redis)])
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    server = request.getfixturevalue("redis_server") if request.param == "redis" else None
    if server is not None:
        with server.connect() as client:
            client.flushall()
    found = Kind(request.param, server, tmp_path)
    yield found
    for store in found.opened:
        await store.close()


async def test_those_that_share_most_come_first_then_the_latest(kind: Kind):
    store = kind.open()
    for number, blocks in enumerate((["a", "b"], ["a"], ["a", "b", "c"], ["a"], ["x"])):
        await store.keep(Entry(f"e{number}", blocks, b"%d" % number))
    assert await store.find_answers(["a", "b", "c"], 1, 4) == [b"2", b"0", b"3", b"1"]
    assert await store.find_answers(["a", "b", "c"], 2, 4) == [b"2", b"0"]
    assert await store.find_answers(["a", "b", "c"], 1, 1) == [b"2"]
    assert await store.find_answers(["nothing"], 1, 4) == []


async def test_an_answer_is_kept_once_and_is_the_latest_then(kind: Kind):
    store, later = kind.open(), kind.open()
    for entry in ("one", "two", "one"):
        await store.keep(Entry(entry, ["a"], entry.encode()))
    assert await later.find_answers(["a"], 1, 4) == [b"one", b"two"]


@pytest.mark.parametrize("bounds", [bound_store(max_entries=3), bound_store(max_size=35)])
async def test_the_oldest_go_where_there_are_too_many_or_too_large_ones(kind: Kind, bounds: DraftStoreOptions):
    store = kind.open(bounds)
    for number in range(8):
        await store.keep(Entry(f"e{number}", [f"b{number}", "all"], b"%010d" % number))
    found = [len(await store.find_answers([f"b{number}"], 1, 4)) for number in range(8)]
    assert found == [0, 0, 0, 0, 0, 1, 1, 1]
    assert len(await store.find_answers(["all"], 1, 8)) == 3


async def test_an_answer_expires(kind: Kind):
    store = kind.open(bound_store(expire_s=0.2))
    await store.keep(Entry("old", ["a"], b"old"))
    async with asyncio.timeout(30):
        while await store.find_answers(["a"], 1, 4):  # noqa: ASYNC110 -- time itself is waited for
            await asyncio.sleep(0.02)
    await store.keep(Entry("new", ["b"], b"new"))
    assert await kind.open().find_answers(["a"], 1, 4) == []


@needs_redis
async def test_redis_keeps_no_key_of_what_was_forgotten(redis_server: RedisServer):
    with redis_server.connect() as client:
        client.flushall()
        store = RedisDraftStore(redis_server.url, NO_PASSWORD, bound_store(max_entries=2))
        for number in range(6):
            await store.keep(Entry(f"e{number}", [f"b{number}"], b"0123456789"))
        await store.close()
        names = {bytes(key).decode().removeprefix(PREFIX) for key in client.scan_iter()}
        assert names == {"order", "known", "bytes", "a:e4", "a:e5", "b:b4", "b:b5"}
        assert client.get(f"{PREFIX}bytes") == b"20"
        assert all(0 < int(client.pttl(PREFIX + name)) <= 660_000 for name in names)


@needs_redis
async def test_redis_that_is_full_says_so_and_still_answers(redis_server: RedisServer):
    store = RedisDraftStore(redis_server.url, NO_PASSWORD, ROOM)
    with redis_server.connect() as client:
        client.flushall()
        await store.keep(Entry("kept", ["a"], b"kept"))
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreRefused, match="maxmemory"):
                await store.keep(Entry("more", ["a"], b"more"))
            assert await store.find_answers(["a"], 1, 4) == [b"kept"]
        finally:
            client.config_set("maxmemory", 0)
    await store.close()


@needs_redis
async def test_a_user_with_a_password_and_no_more_rights_than_it_needs(redis_server: RedisServer, tmp_path: Path):
    secret, wrong = tmp_path / "password", tmp_path / "wrong"
    for file, text in ((secret, "lamp-oil\n"), (wrong, "water\n")):
        file.write_text(text)
        file.chmod(0o600)
    rights = [
        "reset",
        "on",
        ">lamp-oil",
        "~outrider:*",
        "+eval",
        "+evalsha",
        "+script|load",
        "+@read",
        "+@write",
        "+@fast",
    ]
    with redis_server.connect() as client:
        client.execute_command("ACL", "SETUSER", "drafter", *rights)
    url = redis_server.url.replace("unix://", "unix://drafter@")
    store = RedisDraftStore(url, RedisPassword(secret), ROOM)
    await store.keep(Entry("mine", ["p"], b"mine"))
    assert await store.find_answers(["p"], 1, 4) == [b"mine"]
    await store.close()
    for password in (RedisPassword(wrong), RedisPassword(tmp_path / "missing"), RedisPassword(variable="NO_SUCH_NAME")):
        refused = RedisDraftStore(url, password, ROOM)
        with pytest.raises(StoreFailed) as failed:
            await refused.find_answers(["p"], 1, 4)
        await refused.close()
        assert "water" not in str(failed.value)
        assert "\n" not in str(failed.value)


@needs_redis
async def test_keys_of_other_kinds_cost_what_they_hide(redis_server: RedisServer):
    with redis_server.connect() as client:
        client.flushall()
        store = RedisDraftStore(redis_server.url, NO_PASSWORD, ROOM)
        await store.keep(Entry("one", ["a", "b"], b"one"))
        client.set(f"{PREFIX}b:a", b"no list")
        assert await store.find_answers(["a", "b"], 1, 4) == [b"one"]
        await store.keep(Entry("two", ["a", "b"], b"two"))
        assert await store.find_answers(["a"], 1, 4) == [b"two"]
        client.delete(f"{PREFIX}order")
        client.set(f"{PREFIX}order", b"no set")
        with pytest.raises(StoreRefused):
            await store.keep(Entry("three", ["a"], b"three"))
        await store.close()


async def test_a_file_that_is_no_database_is_put_aside(tmp_path: Path):
    path = tmp_path / "drafts.sqlite"
    path.write_bytes(os.urandom(8192))
    store = DiskDraftStore(path, ROOM, SystemClock())
    with pytest.raises(StoreFailed, match="put aside"):
        await store.find_answers(["a"], 1, 4)
    await store.keep(Entry("one", ["a"], b"one"))
    assert await store.find_answers(["a"], 1, 4) == [b"one"]
    assert (tmp_path / "drafts.sqlite.damaged").stat().st_size == 8192
    await store.close()


async def test_a_directory_that_cannot_be_written_is_said_in_a_line(tmp_path: Path):
    (tmp_path / "file").write_text("no directory")
    store = DiskDraftStore(tmp_path / "file" / "drafts.sqlite", ROOM, SystemClock())
    with pytest.raises(StoreFailed, match=r"^drafts\.sqlite: "):
        await store.find_answers(["a"], 1, 4)
    await store.close()
