"""The link between hosts: nobody between the two ends reads it, changes it, or takes the part of one of them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest

from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import (
    GREETING_S,
    EndpointServer,
    LinkCertificate,
    LinkLost,
    encrypt_link,
    knock,
)
from orchestrator.worker.drafting.protocol import (
    VERSION,
    Begin,
    DraftRequest,
    DraftResponse,
    Hello,
    Link,
    Update,
    WireDraft,
)
from policies.sampling import Sampling

HOST = "127.0.0.1"
KEPT_WORD = "a-key-that-can-be-searched-for"
MANY = list(range(200_000))


def far(endpoint: LinkEndpoint) -> LinkEndpoint:
    """Return the endpoint as another host sees it."""
    return msgspec.structs.replace(endpoint, addresses=endpoint.addresses[1:])


@pytest.fixture
def server() -> Iterator[EndpointServer]:
    opened = EndpointServer(HOST)
    yield opened
    opened.close()


@pytest.mark.parametrize("side", ["knocks", "is knocked at"])
def test_a_connection_that_is_reset_before_its_greeting_leaves_no_socket_open(side):
    """A socket that is left open warns, and a warning is an error here."""
    certificate = LinkCertificate()
    greet = {
        "knocks": lambda near: encrypt_link(near, certificate.pem, b"k" * 32),
        "is knocked at": lambda near: certificate.greet(near, b"k" * 32),
    }
    with socket.create_server((HOST, 0)) as listening:
        ends = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
    near, other = ends if side == "knocks" else reversed(ends)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    with near, pytest.raises(ConnectionResetError):
        greet[side](near)


def test_a_link_that_another_thread_has_closed_is_lost():
    ends = [Link(one) for one in socket.socketpair()]
    for link in ends:
        link.close()
        with pytest.raises(LinkLost):
            link.wait(0.01)


@contextmanager
def answering(server: EndpointServer) -> Iterator[list[Link]]:
    """Let in whoever knocks over TCP, and answer each request with as many tokens as it has."""
    links: list[Link] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                admitted = server.admit(server.listening[1])
            except OSError:
                return
            if admitted is not None:
                links.append(Link(admitted))
                threading.Thread(target=answer, args=(links[-1],), daemon=True).start()

    def answer(link: Link) -> None:
        try:
            link.hello(GREETING_S)
            while not over.is_set():
                link.wait(0.02)
                while (turn := link.turn()) is not None:
                    count = sum(len(one.tokens) for one in turn.updates if isinstance(one, Begin))
                    link.send(DraftResponse(turn.number, [WireDraft(tuple(range(count)))]))
        except LinkLost:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield links
    finally:
        over.set()
        server.listening[1].shutdown(socket.SHUT_RDWR)
        thread.join(GREETING_S)
        for link in links:
            link.close()


def ask(link: Link, tokens: list[int]) -> DraftResponse:
    """Send a sequence and return the answer."""
    updates: list[Update] = [Begin(KEPT_WORD, tokens, Sampling())]
    link.send(DraftRequest(1, updates, []))
    while link.unsent:
        link.wait(0.01)
    answer = link.answer(60.0)
    assert answer is not None
    return answer


@contextmanager
def relaying(endpoint: LinkEndpoint) -> Iterator[tuple[LinkEndpoint, bytearray]]:
    """Sit between: yields the endpoint with our own address, and all bytes that came by."""
    target = endpoint.addresses[0].rpartition(":")[2]
    seen = bytearray()
    with socket.create_server((HOST, 0)) as listening, ExitStack() as stack:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    seen.extend(data)
                    sink.sendall(data)
            except OSError:
                return

        def accept() -> None:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            there = stack.enter_context(socket.create_connection((HOST, int(target))))
            stack.enter_context(near)
            for pair in ((near, there), (there, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        port = listening.getsockname()[1]
        yield msgspec.structs.replace(endpoint, addresses=[f"tcp:{HOST}:{port}"]), seen


def test_long_and_short_messages_arrive_and_who_sits_between_reads_none(server: EndpointServer) -> None:
    with answering(server), relaying(far(server.endpoint)) as (between, seen):
        link = Link(knock(between))
        link.send(Hello(VERSION, "elsewhere", KEPT_WORD))
        assert len(ask(link, MANY).drafts[0].tokens) == len(MANY)
        assert ask(link, [1, 2, 3]).drafts[0].tokens == (0, 1, 2)
        link.close()
    assert len(seen) > 2 * len(MANY)
    assert KEPT_WORD.encode() not in seen
    assert server.endpoint.key not in seen
    assert msgspec.msgpack.encode(MANY[1000:1100])[3:] not in seen


def test_another_certificate_is_not_taken_and_the_key_is_not_shown_to_it(server: EndpointServer) -> None:
    endpoint = far(server.endpoint)
    stranger = EndpointServer(HOST)
    address = stranger.endpoint.addresses[1:]
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(stranger.admit(stranger.listening[1])), daemon=True)
    thread.start()
    with pytest.raises(LinkLost, match="SSLCertVerificationError in the greeting"):
        knock(msgspec.structs.replace(endpoint, addresses=address))
    thread.join(GREETING_S)
    assert got == [None]
    stranger.close()


@pytest.mark.parametrize("key", [b"guessed", b"guessed " * 4], ids=["short", "as long"])
def test_another_key_is_not_taken(server: EndpointServer, key: bytes) -> None:
    with answering(server) as links:
        with pytest.raises(LinkLost, match="in the greeting"):
            knock(msgspec.structs.replace(far(server.endpoint), key=key))
        assert links == []
        Link(knock(far(server.endpoint))).close()


def test_who_speaks_no_tls_is_not_let_in(server: EndpointServer) -> None:
    port = int(server.endpoint.addresses[1].rpartition(":")[2])
    with answering(server) as links, socket.create_connection((HOST, port)) as plain:
        plain.sendall(server.endpoint.key)
        plain.settimeout(2 * GREETING_S)
        with suppress(ConnectionError):
            while plain.recv(4096):  # an alert may come, and then the end
                pass
        assert links == []


def test_each_start_has_its_own_certificate_whatever_the_clocks_say() -> None:
    first, second = LinkCertificate(), LinkCertificate()
    assert first.pem != second.pem
    assert first.pem.startswith("-----BEGIN CERTIFICATE-----")
    assert "PRIVATE" not in first.pem
