"""Another machine with two llama-servers, on which nothing of ours is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.api.test_tls import make_certificate
from tests.support.hosts import Hosts, two_hosts
from tests.support.tls_proxy import speaking_tls
from tests.support.waiting import until


class Mac(NamedTuple):
    """The machine: the URLs of its servers, and a file with the key of the second one."""

    hosts: Hosts
    plain: str
    secure: str
    key: Path


@contextmanager
def a_mac(home: Path, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    """The far host with two servers: one with the target, and one that drafts, with a key, behind a proxy that speaks
    TLS. Skips the test where no llama-server or no namespace can be had."""
    pytest.importorskip("xllamacpp")
    (copy := home / "mac" / target.name).parent.mkdir()
    copy.symlink_to(target)
    key = home / "mac.key"
    key.write_text("the-key-of-the-mac")
    key.chmod(0o600)
    with two_hosts() as hosts:
        certificate, secret = make_certificate(home, address=hosts.far_ip)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with (
            serving(hosts.far, copy, hosts.far_ip, 8080, home),
            serving(hosts.far, draft, "127.0.0.1", 8081, home, "--api-key-file", str(key)),
            speaking_tls(hosts.far, hosts.far_ip, 8443, 8081, certificate, secret) as secure,
        ):
            plain = f"http://{hosts.far_ip}:8080"
            until(lambda: hosts.on_near(lambda: is_ready(plain) and is_ready(secure)))
            yield Mac(hosts, plain, secure, key)


@contextmanager
def serving(host: str, model: Path, address: str, port: int, directory: Path, *more: str) -> Iterator[None]:
    """A llama-server on a host."""
    from outrider_lab.peers import llama_wheel

    options = ("-m", str(model), "--host", address, "--port", str(port), "-t", "1", "-c", "1024", "-np", "2", *more)
    with (directory / f"llama-server-{port}.log").open("wb") as log:
        command = ["ip", "netns", "exec", host, sys.executable, llama_wheel.__file__, *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
