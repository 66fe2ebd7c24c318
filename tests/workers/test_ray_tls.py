"""Certificates that hosts make of one token: taken by each other, and by nobody who has another."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.errors import ClusterAway, WorkerError
from orchestrator.launch.ray_tls import check_encryption, write_certificates

HERE = "127.0.0.1"
TOKEN, OTHER = "a" * 64, "b" * 64


def make_node(directory: Path, token: str, address: str) -> dict[str, str]:
    directory.mkdir()
    variables = write_certificates(directory, token, [address])
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())
    return variables


@asynccontextmanager
async def serve(variables: dict[str, str] | None) -> AsyncIterator[int]:
    """Listen as a head does, encrypted where there are variables; yields the port."""
    context = None
    if variables is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=variables["RAY_TLS_CA_CERT"])
        context.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
        context.set_alpn_protocols(["h2"])

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no handshake at all\n")
        writer.close()

    server = await asyncio.start_server(greet, HERE, 0, ssl=context)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def test_hosts_of_one_token_take_each_other_and_no_one_else(tmp_path: Path) -> None:
    head, host = make_node(tmp_path / "head", TOKEN, HERE), make_node(tmp_path / "host", TOKEN, "10.0.0.2")
    stranger = make_node(tmp_path / "stranger", OTHER, "10.0.0.3")
    async with serve(head) as port:
        await check_encryption(HERE, port, host)
        with pytest.raises(WorkerError, match="the token is not that of the front"):
            await check_encryption(HERE, port, stranger)
    with pytest.raises(ClusterAway):
        await check_encryption(HERE, port, host)


async def test_a_head_that_encrypts_nothing_is_not_joined(tmp_path: Path) -> None:
    host = make_node(tmp_path / "host", TOKEN, HERE)
    async with serve(None) as port:
        with pytest.raises(WorkerError, match="its links are not encrypted"):
            await check_encryption(HERE, port, host)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="take one of 32 at least"):
        make_node(tmp_path / "host", "secret", HERE)
