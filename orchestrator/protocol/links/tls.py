"""Encrypts a link between workers on two hosts: TLS 1.3, one certificate a start.

A worker makes a certificate when it opens an address that other hosts reach. The certificate travels with its key, by
way of the daemon, and the side that connects takes no other one: who sits between sees and changes nothing. The key
then crosses inside, so it is shown to nobody but the one who made it.
"""

from __future__ import annotations

import errno
import hmac
import socket
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from adapters.framing import receive_exactly

_TAKEN: Final = b"\1"
"""What says that the key was the right one; a wrong one ends the connection."""
_NAME: Final = "outrider worker"
_BEGINS: Final = datetime(2000, 1, 1, tzinfo=UTC)  # hosts need no common clock: the next start has another one
_ENDS: Final = datetime(9999, 12, 31, tzinfo=UTC)


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
