"""How two workers find each other: an address, and a key that both prove to have.

The key is new with every start of the worker that listens and travels by way of the daemon. On one machine the proof is
the challenge of `multiprocessing.connection`; between machines the link is encrypted first (links.tls).

Encrypts a link between workers on two hosts: TLS 1.3, one certificate a start.

A worker makes a certificate when it opens an address that other hosts reach. The certificate travels with its key, by
way of the daemon, and the side that connects takes no other one: who sits between sees and changes nothing. The key
then crosses inside, so it is shown to nobody but the one who made it.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from adapters.boot_id import read_boot_id
from adapters.framing import receive_exactly
from orchestrator.protocol.links.address import LinkEndpoint

_TAKEN: Final = b"\1"
"""What says that the key was the right one; a wrong one ends the connection."""
_NAME: Final = "outrider worker"
_BEGINS: Final = datetime(2000, 1, 1, tzinfo=UTC)  # hosts need no common clock: the next start has another one
_ENDS: Final = datetime(9999, 12, 31, tzinfo=UTC)
GREETING_S = 5.0
"""The longest wait for one step of the greeting. ADR 0056. Not tuned: a handshake takes 6 ms (ADR 0074)."""

_KEY_BYTES = 32
_BACKLOG = 8  # of the kernel; each is greeted in a thread at once


class _LinkSocket(ssl.SSLSocket):
    """Closes itself where its connection was reset before the greeting: `ssl`, which asks the peer, left it open."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection") from error


class LinkCertificate:
    """A new certificate, and what listens with it. `pem` is for whoever may connect."""

    def __init__(self) -> None:
        from cryptography import x509  # some 50 ms, for those alone whom other hosts reach
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        private = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        draft = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), _BEGINS, _ENDS)
        certificate = draft.sign(private, hashes.SHA256())
        self.pem = certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
        encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self._context = _build_context(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as directory:  # the library takes private keys from files only
            path = Path(directory) / "link.pem"
            path.touch(mode=0o600)
            path.write_bytes(private.private_bytes(*encoding) + self.pem.encode("ascii"))
            self._context.load_cert_chain(path)

    def greet(self, knocking: socket.socket, key: bytes) -> ssl.SSLSocket | None:
        """Return the encrypted side of an accepted connection; None where the other side has no key. Raises OSError."""
        encrypted = self._context.wrap_socket(knocking.dup(), server_side=True, do_handshake_on_connect=False)
        try:
            encrypted.settimeout(knocking.gettimeout())
            encrypted.do_handshake()
            if hmac.compare_digest(receive_exactly(encrypted, len(key)), key):
                encrypted.sendall(_TAKEN)
                return encrypted
        except BaseException:
            encrypted.close()
            raise
        encrypted.close()
        return None


def encrypt_link(connected: socket.socket, certificate: str, key: bytes) -> ssl.SSLSocket:
    """Return the encrypted side of a connection to whoever has this certificate (PEM), once the key is taken. Takes the
    socket over. Raises OSError."""
    if not certificate:
        raise ssl.SSLError("no certificate of the other side is known")
    context = _build_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the very certificate is known
    context.load_verify_locations(cadata=certificate)
    encrypted = context.wrap_socket(connected)
    try:
        encrypted.sendall(key)
        receive_exactly(encrypted, len(_TAKEN))
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def _build_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _LinkSocket
    return context


class LinkLost(Exception):
    """The other side is gone."""


def host_id() -> str:
    """Return what all processes of this machine say, and those of no other do."""
    return read_boot_id() or socket.gethostname()


class EndpointServer:
    """The side of whoever is found: listens on an abstract Unix socket, and on `host` too where one is given."""

    def __init__(self, host: str = "") -> None:
        name = f"outrider-link-{os.getpid()}-{secrets.token_hex(8)}"
        self.listening = [_listening(socket.AF_UNIX, f"\0{name}")]
        addresses = [f"unix:@{name}"]
        self._certificate: LinkCertificate | None = None
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self.listening.append(_listening(family, (host, 0)))
            except OSError:
                self.close()
                raise
            addresses.append(f"tcp:{host}:{self.listening[-1].getsockname()[1]}")
            self._certificate = LinkCertificate()
        pem = "" if self._certificate is None else self._certificate.pem
        self.endpoint = LinkEndpoint(addresses, secrets.token_bytes(_KEY_BYTES), pem)

    def admit(self, listening: socket.socket) -> socket.socket | None:
        """Accept whoever knocks there; None where it has no key. Waits GREETING_S a step at most."""
        knocking, _ = listening.accept()
        return self.greet(knocking)

    def greet(self, knocking: socket.socket) -> socket.socket | None:
        """Return what to speak through with an accepted connection. None: it has no key, and is closed. Waits
        GREETING_S for each byte at most; to end it earlier, shut the socket down."""
        admitted: socket.socket | None = None
        try:
            if knocking.family == socket.AF_UNIX:
                with _greeting(knocking) as connection:
                    deliver_challenge(connection, self.endpoint.key)
                    answer_challenge(connection, self.endpoint.key)
                admitted = knocking
            elif self._certificate is not None:
                knocking.settimeout(GREETING_S)
                admitted = self._certificate.greet(knocking, self.endpoint.key)
        except (OSError, EOFError, AuthenticationError, AssertionError):
            admitted = None
        if admitted is not knocking:
            knocking.close()
        return admitted

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listening in self.listening:
            listening.close()


def knock(endpoint: LinkEndpoint) -> socket.socket:
    """Return a connected socket to the endpoint. Raises LinkLost, with what each address gave."""
    problems = []
    for address in endpoint.addresses:
        try:
            connected = _connect_socket(address)
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
            continue
        try:
            return _greet_endpoint(connected, endpoint)
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            connected.close()
            problems.append(f"{address}: {type(error).__name__} in the greeting")
    raise LinkLost("; ".join(problems))


def notice_silence(connected: socket.socket, *, silent_s: int, every_s: int, probes: int, unheard_ms: int = 0) -> None:
    """Probe a TCP connection that was silent for `silent_s`, so often and so many times, until it is lost.
    `unheard_ms`: so long what was sent may go without a confirmation (0: as the kernel has it). Other systems than
    Linux know these options by other names; there the other side is asked every two hours."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": silent_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": probes}
    if unheard_ms:
        options["TCP_USER_TIMEOUT"] = unheard_ms
    for name, value in options.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _greet_endpoint(connected: socket.socket, endpoint: LinkEndpoint) -> socket.socket:
    if connected.family != socket.AF_UNIX:
        return encrypt_link(connected, endpoint.certificate, endpoint.key)
    with _greeting(connected) as connection:
        answer_challenge(connection, endpoint.key)
        deliver_challenge(connection, endpoint.key)
    return connected


def _listening(family: socket.AddressFamily, address: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _connect_socket(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(GREETING_S)
            connected.connect(rest.replace("@", "\0", 1))
        except OSError:
            connected.close()
            raise
        return connected
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), GREETING_S)


@contextmanager
def _greeting(connected: socket.socket) -> Iterator[Connection[Any, Any]]:
    """Lend the socket to multiprocessing's challenge, which knows no timeouts: the kernel's are set meanwhile."""
    connected.setblocking(True)
    _limit_waits(connected, GREETING_S)
    with Connection(os.dup(connected.fileno())) as connection:
        yield connection
    _limit_waits(connected, 0.0)  # who is let in may be silent for as long as it likes


def _limit_waits(connected: socket.socket, seconds: float) -> None:
    """Have the kernel end each wait of a blocking socket after so long; 0: never."""
    limit = struct.pack("ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)
