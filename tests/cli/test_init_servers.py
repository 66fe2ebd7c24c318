"""`outrider init --servers`: real llama-servers of a machine on which nothing else is, as a replica and as a draft."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from outrider_lab.peers import llama_wheel

from orchestrator.setup.servers import list_urls
from tests.api.test_tls import make_certificate
from tests.cli.test_init import home, write_model  # noqa: F401  # a fixture
from tests.support.conformance import NO_FORK
from tests.support.hosts import Hosts, two_hosts
from tests.support.tls_proxy import speaking_tls
from tests.support.waiting import until

KEY = "the-key-of-the-mac"


@pytest.mark.parametrize(
    ("place", "urls"),
    [
        ("mac:8080", ["http://mac:8080"]),
        ("https://mac.example/v1/", ["https://mac.example/v1"]),
        ("[fe80::1]:9000", ["http://[fe80::1]:9000"]),
        ("fe80::1", ["http://[fe80::1]:8080", "http://[fe80::1]:11434", "http://[fe80::1]:8000"]),
        ("mac", ["http://mac:8080", "http://mac:11434", "http://mac:8000"]),
    ],
)
def test_a_place_is_a_host_with_or_without_a_port_or_an_url(place: str, urls: list[str]) -> None:
    assert list_urls(place) == urls


@pytest.mark.parametrize("place", ["", "http://", "ma c:80", "mac:99999", "mac:port", "ftp://mac"])
def test_what_is_no_place_is_one_line(place: str, outrider: Any, home: Path) -> None:  # noqa: F811
    done = outrider("init", "--yes", "--servers", place)
    assert done.returncode == 1
    assert done.stderr.startswith(f"outrider: --servers {place}: ")
    assert "\n" not in done.stderr.rstrip("\n")


@contextmanager
def serving(host: str, model: Path, address: str, port: int, directory: Path, *more: str) -> Iterator[None]:
    """A llama-server on a host."""
    options = ("-m", str(model), "--host", address, "--port", str(port), "-t", "1", "-c", "1024", "-np", "2", *more)
    with (directory / f"llama-server-{port}.log").open("wb") as log:
        command = ["ip", "netns", "exec", host, sys.executable, llama_wheel.__file__, *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_key(directory: Path) -> Path:
    """Write the key that the servers of `a_mac` want, and return its file."""
    key = directory / "mac.key"
    key.write_text(KEY)
    key.chmod(0o600)
    return key


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def a_mac(hosts: Hosts, target: Path, draft: Path, directory: Path) -> Iterator[tuple[str, str]]:
    """The far host with two servers: one with the target, and one that drafts, with a key, behind a proxy that speaks
    TLS. Yields their URLs."""
    certificate, key = directory / "one.crt", directory / "one.key"
    options = ("--api-key-file", str(directory / "mac.key"))
    with (
        serving(hosts.far, target, hosts.far_ip, 8080, directory),
        serving(hosts.far, draft, "127.0.0.1", 8081, directory, *options),
        speaking_tls(hosts.far, hosts.far_ip, 8443, 8081, certificate, key) as secure,
    ):
        plain = f"http://{hosts.far_ip}:8080"
        until(lambda: hosts.on_near(lambda: is_ready(plain) and is_ready(secure)))
        yield plain, secure


@NO_FORK
@pytest.mark.model
def test_servers_of_another_machine_are_a_replica_and_a_draft(
    outrider: Any,
    home: Path,  # noqa: F811
    default_model_path: Path,
    first_layers_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("xllamacpp")
    (home / "mac").mkdir()
    copy = home / "mac" / default_model_path.name
    copy.symlink_to(default_model_path)
    write_model(home / "models" / "other.gguf", 1)
    key = write_key(home)
    with two_hosts() as hosts:
        certificate, _ = make_certificate(home, address=hosts.far_ip)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with a_mac(hosts, copy, first_layers_path, home) as (plain, secure):
            places = ("--servers", plain.removeprefix("http://"), "--servers", secure)
            models = ("--models", default_model_path, "--models", home / "models")

            def run(*more: object) -> Any:
                return hosts.on_near(lambda: outrider("init", "--yes", *models, *places, *more))

            keyless = run("--output", home / "keyless.yaml", "--model", "other.gguf")
            assert keyless.returncode == 0, keyless.stderr
            assert "Invalid API Key" in keyless.stdout
            assert set(yaml.safe_load((home / "keyless.yaml").read_text())) == {"model"}, (
                "nothing there is of its model"
            )
            done = run("--server-key-file", key, "--model", default_model_path.name)
            assert done.returncode == 0, done.stderr
            written = yaml.safe_load((home / "cluster.yaml").read_text())
            own, theirs = written["model"]["replicas"]
            assert (own, theirs) == ({}, {"endpoint": plain, "api_key_file": str(key)})
            draft = {"method": "model", "endpoint": secure, "api_key_file": str(key)}
            assert written["drafts"] == [{"method": "suffix"}, draft]
