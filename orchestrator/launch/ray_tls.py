"""TLS of Ray's links between hosts: an authority that every host makes of the token, and a certificate of each node.

Whoever has the token may be a host of the cluster, and nobody else: the authority's key is derived from it, so nothing
has to be handed from host to host but the token itself. A node makes a certificate of its own at each start. Ray asks
both ends of a link for one (docs/adr/0146-hosts-that-come-and-go.md).
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.errors import ClusterAway, WorkerError

if TYPE_CHECKING:  # some 50 ms, for hosts of a cluster alone
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_PURPOSE: Final = b"outrider: authority of a Ray cluster"
_AUTHORITY: Final = "outrider cluster"
_NODE: Final = "outrider host"
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_BEGINS: Final = datetime(2000, 1, 1, tzinfo=UTC)  # hosts need no common clock: the next start has another one
_ENDS: Final = datetime(9999, 12, 31, tzinfo=UTC)
MIN_TOKEN_CHARACTERS: Final = 32
"""Of 128 bits in hexadecimal digits: the authority's public key is shown to whoever asks, and must not be guessed."""
# Of a handshake, as of a connection (ADR 0048). Not tuned: it takes milliseconds.
_HANDSHAKE_S: Final = 5.0


def write_certificates(directory: Path, token: str, hosts: Iterable[str]) -> dict[str, str]:
    """Write what a node at these addresses or names shows, and takes, into a directory of this user's. Returns the
    variables by which Ray finds it. Raises WorkerError where the token is too short to be kept from guesses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(token) < MIN_TOKEN_CHARACTERS:
        raise WorkerError(
            f"the cluster's token has {len(token)} characters, and its links are encrypted by it: take one of "
            f"{MIN_TOKEN_CHARACTERS} at least (openssl rand -hex 32)"
        )
    issuer, key = _derive_key(token), ec.generate_private_key(ec.SECP256R1())

    def draft(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        by, of = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (_AUTHORITY, name))
        return x509.CertificateBuilder(by, of, public, x509.random_serial_number(), _BEGINS, _ENDS)

    # Python 3.13 takes no certificate without what RFC 5280, 4.2.1 asks for: identifiers of both keys, and their use.
    signs = x509.KeyUsage(*(False,) * 5, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False)
    authority = (
        draft(_AUTHORITY, issuer.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(issuer.public_key()), critical=False)
    )
    named = [_name_host(host) for host in dict.fromkeys((*hosts, *_LOCAL))]
    node = (
        draft(_NODE, key.public_key())
        .add_extension(x509.SubjectAlternativeName(named), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    texts = {
        "RAY_TLS_CA_CERT": authority.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "RAY_TLS_SERVER_CERT": node.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "RAY_TLS_SERVER_KEY": key.private_bytes(*encoding),
    }
    variables = {"RAY_USE_TLS": "1"}
    for variable, text in texts.items():
        path = directory / f"{variable.lower()}.pem"
        path.touch(mode=0o600)
        path.write_bytes(text)
        variables[variable] = str(path)
    return variables


async def check_encryption(host: str, port: int, variables: dict[str, str]) -> None:
    """Shake hands with a head. Raises WorkerError where it has another token, or encrypts nothing, and ClusterAway
    where it does not answer."""
    context = ssl.create_default_context(cafile=variables["RAY_TLS_CA_CERT"])
    context.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
    context.set_alpn_protocols(["h2"])
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise WorkerError(
            f"cannot join {where}: the token is not that of the front ({error.verify_message}): it stands in "
            "~/.ray/auth_token there, or in its RAY_AUTH_TOKEN"
        ) from error
    except ssl.SSLError as error:
        raise WorkerError(
            f"cannot join {where}: its links are not encrypted ({error.reason}): a head that `ray start` has started "
            "is joined by `ray start`; `outrider join` is for a front with cluster.head"
        ) from error
    except OSError as error:
        raise ClusterAway(f"cannot join {where}: {type(error).__name__}: {error}") from error
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _name_host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _derive_key(token: str) -> ec.EllipticCurvePrivateKey:
    """Return the key of the authority (HKDF of RFC 5869 over the token, reduced as in FIPS 186-5, A.2.1)."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
    derived = HKDF(hashes.SHA256(), length=48, salt=None, info=_PURPOSE).derive(token.encode())
    return ec.derive_private_key(int.from_bytes(derived, "big") % (order - 1) + 1, ec.SECP256R1())
