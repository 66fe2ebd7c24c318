"""KV pages go to another worker over an encrypted link while their sequence is decoded, and no token tells."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import PageLink, Submit
from orchestrator.protocol.events import MovedIn, MovedOut
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import knock
from orchestrator.protocol.links.pages import LinkBroken, Opening, PieceHead, send_opening, send_piece, sum_parts
from orchestrator.worker.engine.kv_transfer.intake import KvIntake, TakenPages
from orchestrator.worker.engine.kv_transfer.page_inbox import PageInbox
from policies.sampling import Sampling
from tests.support.kv_moves import MovingLoop
from tests.support.loops import decode, loop_over, toy

FORMAT = "toy"
HOST = "127.0.0.1"
MOST = 1 << 22
PROMPT = [60, 32, 101] * 100
PLAIN = Submit("r", PROMPT, 120)
SEEDED = Submit("r", PROMPT, 120, Sampling(0.9, seed=3))


class Next:
    """A worker that pages go to: its loop, and what it was given."""

    def __init__(self, kv_format: str = FORMAT) -> None:
        moving = movable(kv_format)
        self.loop = moving.loop
        moving.mover.inbox = self.inbox = PageInbox(HOST, kv_format)
        self.told: list[MovedIn] = []
        self.came = threading.Event()
        self.accepted: list[Submit] = []
        self.intake = KvIntake(moving.mover, self.accept, self.told.append, SystemClock())

    def accept(self, request: Submit, _: float) -> None:
        self.accepted.append(request)
        self.came.set()

    def go_on(self, request: Submit) -> list[int]:
        """Take a request in, and decode it to its end."""
        self.intake.add(request, 0.0)
        assert self.came.wait(30.0), "a link that stands still is waited for no longer than it may"
        taken: TakenPages | None = self.intake.take(request.request_id)
        assert self.loop.submit(self.accepted[0], None, taken) is None
        tokens: list[int] = []
        while not self.loop.idle:
            tokens += [token for delta in self.loop.run_round().deltas for token in delta.tokens]
        return tokens


def movable(kv_format: str = FORMAT) -> MovingLoop:
    return MovingLoop(loop_over(toy(), None), kv_format)


@pytest.fixture
def following() -> Iterator[Next]:
    found = Next()
    yield found
    found.inbox.close()


def leave(moving: MovingLoop, request: Submit, link: PageLink, after: int = 20) -> tuple[MovedOut, list[int], int]:
    """Decode some tokens, then leave; returns how many came while pages went."""
    tokens: list[int] = []
    loop = moving.loop
    assert loop.submit(request) is None
    while len(tokens) < after:
        tokens += [token for delta in loop.run_round().deltas for token in delta.tokens]
    assert moving.send_out(request.request_id, link) is None
    before = len(tokens)
    while True:
        done = loop.run_round()
        tokens += [token for delta in done.deltas for token in delta.tokens]
        time.sleep(0.01)  # a round of a real model
        if left := moving.departures.advance(done.round_ms):
            assert loop.idle
            return left[0], tokens, len(tokens) - before


@pytest.mark.parametrize("request_", [PLAIN, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("after", [4, 5, 20, 37])
def test_a_stream_that_crosses_a_link_says_what_an_undisturbed_one_says(request_, after, following):
    expected = decode(loop_over(toy(), None), [request_])[0]["r"]
    link = PageLink(following.inbox.endpoint, MOST, 5.0)
    out, tokens, meanwhile = leave(movable(), request_, link, after)
    assert out.why == ""
    assert out.pages is not None
    assert meanwhile >= 1, "it was decoded while its pages went"
    tokens += following.go_on(msgspec.structs.replace(request_, committed=list(tokens), pages=out.pages))
    assert tokens == expected
    (told,) = following.told
    assert (told.why, told.length_bytes) == ("", out.pages.length_bytes)


def test_pages_of_another_kind_are_refused_with_words(following):
    out, tokens, _ = leave(movable("other"), PLAIN, PageLink(following.inbox.endpoint, MOST, 5.0))
    assert out.pages is None
    assert "of 'other', and here they are of 'toy'" in out.why
    assert tokens == decode(loop_over(toy(), None), [PLAIN])[0]["r"][: len(tokens)]


def test_a_worker_that_is_not_there_costs_the_pages_only():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    door = LinkEndpoint([f"tcp:{HOST}:{port}"], b"k" * 32, "")
    out, _, _ = leave(movable(), PLAIN, PageLink(door, MOST, 5.0))
    assert out.pages is None
    assert "the link to the next worker" in out.why


def test_a_request_that_is_cancelled_or_ends_while_its_pages_go_says_nothing_more(following):
    moving = movable()
    loop = moving.loop
    short = msgspec.structs.replace(PLAIN, max_tokens=2)
    for end in ("cancelled", "ended"):
        loop.submit(short)
        loop.run_round()
        moving.send_out("r", PageLink(following.inbox.endpoint, MOST, 60.0))
        if end == "cancelled":
            moving.departures.cancel("r")
        while not loop.idle:
            loop.run_round()
        assert moving.departures.advance(1.0) == []


@contextlib.contextmanager
def relaying(door: LinkEndpoint, count: int, *, cut: bool) -> Iterator[LinkEndpoint]:
    """Pass on so many bytes of a link, and then cut it, or let it stand still."""
    host, _, port = door.addresses[0].removeprefix("tcp:").rpartition(":")
    ends: list[socket.socket] = []

    def copy(source: socket.socket, into: socket.socket, left: float) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(int(min(left, 4096)))):
                into.sendall(data)
                left -= len(data)
            if left <= 0 and cut:
                for one in (source, into):
                    one.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with contextlib.suppress(OSError):
            near = server.accept()[0]
            far = socket.create_connection((host, int(port)))
            ends.extend((near, far))
            threading.Thread(target=copy, args=(far, near, float("inf")), daemon=True).start()
            copy(near, far, count)

    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=run, daemon=True).start()
        yield msgspec.structs.replace(door, addresses=[f"tcp:{HOST}:{server.getsockname()[1]}"])
        for one in ends:
            one.close()


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "frozen"])
@pytest.mark.parametrize("count", [1000, 3000])
def test_a_link_that_fails_midway_has_the_stream_computed_again(count, cut, following):
    expected = decode(loop_over(toy(), None), [PLAIN])[0]["r"]
    with relaying(following.inbox.endpoint, count, cut=cut) as door:
        out, tokens, _ = leave(movable(), PLAIN, PageLink(door, MOST, 0.5))
        tokens += following.go_on(msgspec.structs.replace(PLAIN, committed=list(tokens), pages=out.pages))
    assert tokens == expected
    assert out.why or following.told[0].why


def send_by_hand(inbox: PageInbox, heads: list[PieceHead], data: bytes) -> None:
    with knock(inbox.endpoint) as link:
        assert send_opening(link, Opening("t", FORMAT, 1 << 16)) == ""
        with contextlib.suppress(OSError):
            for head in heads:
                send_piece(link, head, [memoryview(data)])


@pytest.mark.parametrize(
    ("number", "crc", "length", "words"),
    [(1, 0, 256, "piece 1 came"), (0, 1, 256, "checksum"), (0, 0, 1 << 17, "more pages")],
    ids=["out of order", "corrupt", "too long"],
)
def test_pieces_that_make_no_sense_are_not_taken(number, crc, length, words, following):
    data = bytes(length)
    send_by_hand(
        following.inbox, [PieceHead(number, 0, 16, length, sum_parts([memoryview(data)]) ^ crc, bytes(16))], data
    )
    with pytest.raises(LinkBroken, match=words):
        following.inbox.take("t")


def test_a_late_answer_is_not_taken_for_a_fresh_one(following):
    """Each transfer has a name of its own, so a second one of the same request finds nothing of the first."""
    names = set()
    for _ in range(2):
        out, _, _ = leave(movable(), PLAIN, PageLink(following.inbox.endpoint, MOST, 5.0))
        assert out.pages is not None
        names.add(out.pages.transfer)
    assert len(names) == 2
    with pytest.raises(LinkBroken, match="nothing came"):
        following.inbox.take("r/of-another-time")
